"""`paceline verify`: compare a transcript with what the model writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.cli_output import err, local_model, out, set_threads
from paceline.errors import InvalidArgument
from paceline.numerics import PORTABLE, check_mismatch

if TYPE_CHECKING:
    from paceline.engine import Engine
    from paceline.transcript import Transcript


def run(
    file: Path,
    *,
    target: str | None,
    device: str,
    threads: int | None,
    numerics_mismatch: str,
) -> dict[str, Any]:
    """Load the model and compare it with a transcript.

    Raises:
        InvalidArgument: an option or the file is wrong.
        NumericsMismatch: the numerics here are not the transcript's, and the caller did not allow
            others.
    """
    check_mismatch(numerics_mismatch)
    with err.status("loading torch ..."):
        from paceline.transcript import Transcript, check_fingerprint, verify

        transcript = Transcript.read(file)
    path = local_model(target) or _named(transcript)
    with err.status("loading the model ..."):
        set_threads(threads, path)
        engine = _load(transcript, path, device, numerics_mismatch)
    runner = engine.local_target.runner
    if numerics_mismatch == "refuse":
        check_fingerprint(transcript, runner.fingerprint)
    check = verify(engine, transcript)
    difference = None
    if not check.verified:
        difference = {
            "position": check.position,
            "transcript_token_id": check.written,
            "target_token_id": check.own,
            "transcript_text": _text(engine, check.written),
            "target_text": _text(engine, check.own),
        }
    return {
        "verified": check.verified,
        "num_tokens": len(transcript.token_ids),
        "num_verified": check.num_verified,
        "num_target_forwards": check.num_forwards,
        "fingerprint": str(runner.fingerprint),
        "transcript_fingerprint": str(transcript.fingerprint),
        "batch_invariant": runner.batch_invariant,
        "difference": difference,
    }


def _named(transcript: Transcript) -> Path | None:
    """The folder that a transcript names, if it exists here; None: the demo's."""
    folder = Path(transcript.model)
    return folder if folder.is_absolute() and folder.is_dir() else None


def _load(
    transcript: Transcript, target: Path | None, device: str, numerics_mismatch: str
) -> Engine:
    from paceline.demo import TARGET_DIR
    from paceline.loading import load_engine

    portable = transcript.fingerprint.numerics_class == PORTABLE
    folder = target or TARGET_DIR  # without the demo's drafter
    options: dict[str, Any] = {"dtype": transcript.fingerprint.dtype, "device": device}
    try:
        return load_engine(folder, numerics=PORTABLE if portable else "fastest", **options)
    except InvalidArgument as error:
        if error.field != "numerics" or numerics_mismatch == "refuse":
            raise
        return load_engine(folder, **options)


def _text(engine: Engine, token: int | None) -> str | None:
    if token is None or engine.tokenizer is None:
        return None
    return engine.tokenizer.decode([token])


def show(result: dict[str, Any]) -> None:
    """Print the result, with the first difference if there is one."""
    count, difference = result["num_tokens"], result["difference"]
    if difference is None:
        out.print(
            f"all {count} tokens verified, in {result['num_target_forwards']} target forwards "
            f"({result['fingerprint']})",
            highlight=False,
            soft_wrap=True,
        )
    else:
        out.print(
            f"token {difference['position']} (from 0) of {count} differs: the transcript has "
            f"{_token(difference, 'transcript')}, the target writes {_token(difference, 'target')}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if result["fingerprint"] != result["transcript_fingerprint"]:
        err.print(
            f"numerics here: {result['fingerprint']}; of the transcript: "
            f"{result['transcript_fingerprint']}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    if difference is not None and not result["batch_invariant"]:
        err.print(
            "this model is not batch-invariant here: a difference may be due to rounding",
            style="yellow",
        )


def _token(difference: dict[str, Any], side: str) -> str:
    token = difference[f"{side}_token_id"]
    if token is None:
        return "its end" if side == "transcript" else "no more"
    return f"{token} ({difference[f'{side}_text']!r})"
