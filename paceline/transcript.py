"""What a target was asked and what it wrote, in a file that another machine can verify.

Verification gives the written tokens to an engine as drafts: it computes them many at a time, and
accepts each one that the target writes by itself, at any temperature. Equal fingerprints make that
exact (:mod:`paceline.numerics`), so a token that is not accepted was not written by this target.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from paceline.config import MAX_NODES, SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.engine import Engine
from paceline.errors import InvalidArgument, NumericsMismatch
from paceline.numerics import Fingerprint, mismatch
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.scoring import common_length
from paceline.types import Draft

FORMAT = "paceline-transcript-1"
_KEYS = (
    "model", "fingerprint", "numerics_changed", "prompt_token_ids", "token_ids", "sampling",
    "finish_reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One generation.

    Attributes:
        model: a folder, or the name that a server gave.
        fingerprint: of the numerics that wrote the first token.
        numerics_changed: later tokens come from other numerics.
        token_ids: the output.
        params: how the tokens were chosen.
        finish_reason: as of a session; of a cancelled generation, the tokens it has are verified.
    """

    model: str
    fingerprint: Fingerprint
    numerics_changed: bool = False
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    params: SamplingParams
    finish_reason: str

    def write(self, file: Path) -> None:
        """Write it as JSON.

        Raises:
            InvalidArgument: the file cannot be written.
        """
        sampling = asdict(self.params)
        for name in ("logprobs", "prompt_logprobs"):  # do not influence the tokens
            del sampling[name]
        values = {
            "format": FORMAT,
            "model": self.model,
            "fingerprint": str(self.fingerprint),
            "numerics_changed": self.numerics_changed,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "sampling": sampling,
            "finish_reason": self.finish_reason,
        }
        try:
            file.write_text(json.dumps(values, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            reason = error.strerror
            raise InvalidArgument("transcript", str(file), f"a writable file ({reason})") from None

    @staticmethod
    def read(file: Path) -> Transcript:
        """What :meth:`write` has written.

        Raises:
            InvalidArgument: the file cannot be read, or is not a whole transcript; names the key.
        """
        try:
            values = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"damaged: {error}"
            raise InvalidArgument("transcript", str(file), f"a transcript ({reason})") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InvalidArgument("transcript", str(file), f"a JSON object of format {FORMAT!r}")
        lacking = [key for key in _KEYS if key not in values]
        if lacking:
            raise InvalidArgument("transcript", str(file), f"the keys {', '.join(lacking)} as well")
        if not isinstance(values["sampling"], dict):
            raise InvalidArgument("transcript.sampling", values["sampling"], "an object")
        return Transcript(
            model=str(values["model"]),
            fingerprint=Fingerprint.parse(str(values["fingerprint"]), "transcript.fingerprint"),
            numerics_changed=bool(values["numerics_changed"]),
            prompt_token_ids=_ids(values, "prompt_token_ids"),
            token_ids=_ids(values, "token_ids"),
            params=_sampling(values["sampling"]),
            finish_reason=str(values["finish_reason"]),
        )


def _ids(values: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = values[key]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise InvalidArgument(f"transcript.{key}", ids, "a list of token ids")
    return tuple(ids)


def _sampling(values: dict[str, Any]) -> SamplingParams:
    try:
        biases = {int(token): bias for token, bias in values.get("logit_bias", {}).items()}
        return SamplingParams(**{**values, "logit_bias": biases})
    except InvalidArgument as error:
        field = f"transcript.sampling.{error.field}"
        raise InvalidArgument(field, error.value, error.allowed) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument("transcript.sampling", values, f"what fits: {error}") from None


def check_verifiable(config: SpeculationConfig, params: SamplingParams) -> None:
    """Raise InvalidArgument unless the method has AR's tokens: no others can be verified."""
    plan = resolve(config)
    of_ar = plan.rule.name == "coupled" or params.temperature == 0
    if not (plan.method.lossless and plan.rule.lossless and of_ar):
        raise InvalidArgument(
            "transcript", plan.method.name,
            "a method whose tokens are those of AR: lossless, and above temperature 0 with the "
            "acceptance rule 'coupled'",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What verification found.

    Attributes:
        num_verified: tokens that are the target's, from the first on.
        num_forwards: of the target, the prompt's not counted.
        position: of the first token that differs, in the output; None: all tokens are right.
        written: that token; None: the transcript ends there.
        own: the target's in its place; None: it ends there.
    """

    num_verified: int
    num_forwards: int
    position: int | None = None
    written: int | None = None
    own: int | None = None

    @property
    def verified(self) -> bool:
        return self.position is None


def check_fingerprint(transcript: Transcript, own: Fingerprint) -> None:
    """Raise NumericsMismatch unless a target with these numerics can verify the transcript."""
    advice = "verify it with the model and the dtype that wrote it, or allow a numerics mismatch"
    if transcript.fingerprint != own:
        raise mismatch("the transcript is of", transcript.fingerprint, own, advice)
    if transcript.numerics_changed:
        raise NumericsMismatch(
            f"numerics changed on the way: only the first tokens are of {own}; {advice}", str(own)
        )


def verify(engine: Engine, transcript: Transcript) -> Check:
    """Compare every token of a transcript with what the engine's target writes in its place.

    Raises:
        InvalidArgument: the engine cannot run the request, e.g. a token outside its vocabulary.
    """
    written = transcript.token_ids
    client = cast(ClientDrafter, engine.drafters["client"])
    session_id = secrets.token_hex(8)
    client.expect(session_id)
    try:
        session = engine.submit(
            Request(
                transcript.prompt_token_ids,
                transcript.params,
                SpeculationConfig(method="client"),
                session_id=session_id,
            )
        )
        done = 0
        while done < len(written) and not session.finished:
            rest = engine.intake.checked_tokens(
                "transcript.token_ids", written[done : done + MAX_NODES]
            )
            client.offer(session_id, Draft.chain(rest))
            while len(session.output_ids) == done and not session.finished:
                engine.step()
            found = session.output_ids
            if session.error is not None:
                raise session.error
            same = common_length(found, written)
            if same < min(len(found), len(written)):
                break
            done = len(found)
        found = session.output_ids
    finally:
        engine.cancel(session_id)
        client.forget(session_id)
    same = common_length(found, written)
    forwards = session.stats.num_target_forwards
    # A transcript that has ended must end where the target does.
    ended = session.finish_reason in ("stop", "length") and len(found) == len(written)
    complete = same == len(written) and (ended or transcript.finish_reason == "cancelled")
    if complete:
        return Check(num_verified=same, num_forwards=forwards)
    return Check(
        num_verified=same,
        num_forwards=forwards,
        position=same,
        written=written[same] if same < len(written) else None,
        own=found[same] if same < len(found) else None,
    )
