"""`paceline generate`: make a request of options, run it, and show its text.

A run is a generator: it yields the pieces of text that each round committed and returns the result
as a mapping, whether the rounds run in this process or on a server.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from paceline.cluster.cli_output import err, local_model, out, set_threads
from paceline.errors import InvalidArgument
from paceline.numerics import check_mismatch

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.rpc.client import Completion
    from paceline.sampling import SamplingParams
    from paceline.session import Session
    from paceline.tokenizer import Tokenizer

ACCEPTED_STYLE = "green"
OWN_STYLE = "bold"

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A request of the command line; ``speculation`` holds only the knobs that were given.

    Attributes:
        adapter: a folder, or on a server a name; "" is none.
    """

    prompt: str
    params: SamplingParams
    speculation: Mapping[str, Any]
    prediction: str = ""
    chat: bool = False
    adapter: str = ""

    def config(self, default: str, methods: Iterable[str]) -> SpeculationConfig:
        """Method and knobs; without a given method ``default``, or its match for a prediction.

        Args:
            methods: names of the methods that can run.
        """
        from paceline.config import parse_speculation
        from paceline.drafters.predicted_outputs import method_with_prediction

        if self.prediction:
            default = method_with_prediction(default, methods)
        return parse_speculation({"method": default, **self.speculation})


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text; ``accepted`` tells whether it was drafted, None if that is unknown."""

    text: str
    accepted: bool | None


Run = Generator[list[Piece], None, dict[str, Any]]


# --- options --------------------------------------------------------------------------------------


def read_prompt(argument: str) -> str:
    """The prompt; ``-`` reads it from standard input."""
    prompt = sys.stdin.read() if argument == "-" else argument
    if not prompt:
        raise InvalidArgument("prompt", prompt, "a text that is not empty")
    return prompt


def read_text(option: str, path: Path) -> str:
    """The text of the file that an option names; InvalidArgument if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidArgument(option, str(path), f"a text file ({reason})") from None


def sampling_params(
    *, logit_bias: Sequence[str], stop: Sequence[str], stop_token_ids: Sequence[int], **values: Any
) -> SamplingParams:
    """SamplingParams of options; InvalidArgument names a wrong one."""
    from paceline.sampling import SamplingParams

    biases = {}
    for item in logit_bias:
        token, separator, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise InvalidArgument("logit_bias", item, "ID=NUMBER, for example 42=-1.5")
    return SamplingParams(
        logit_bias=biases, stop=tuple(stop), stop_token_ids=tuple(stop_token_ids), **values
    )


def speculation(
    method: str | None, num_speculative_tokens: int | None, items: Sequence[str]
) -> dict[str, Any]:
    """The fields of a SpeculationConfig that the options set."""
    result: dict[str, Any] = {}
    for item in items:
        if item.lstrip().startswith("{"):
            try:
                given = json.loads(item)
            except json.JSONDecodeError as error:
                raise InvalidArgument("speculation", item, f"valid JSON ({error})") from None
        else:
            key, separator, value = item.partition("=")
            if not separator or not key:
                raise InvalidArgument("speculation", item, "key=value, or a JSON object")
            given = {key: _value(value)}
        for key, value in given.items():
            _set(result, key, value)
    if method is not None:
        _set(result, "method", method)
    if num_speculative_tokens is not None:
        _set(result, "num_speculative_tokens", num_speculative_tokens)
    return result


def _value(text: str) -> Any:
    """The JSON value of a text, else the text itself: ``4``, ``true``, ``kary``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(result: dict[str, Any], key: str, value: Any) -> None:
    if result.get(key, value) != value:
        raise InvalidArgument(key, value, f"one value, but {result[key]!r} was given as well")
    result[key] = value


def check_transcript(
    file: Path | None, config: SpeculationConfig, request: GenerateOptions
) -> None:
    """Raise InvalidArgument if no transcript can be written there, or none of such a request."""
    if file is None:
        return
    from paceline.methods import METHODS
    from paceline.transcript import check_verifiable

    if not file.parent.is_dir():
        raise InvalidArgument("transcript", str(file), "a file in a folder that exists")
    if request.adapter:
        raise InvalidArgument(
            "transcript", str(file), "none with an adapter: `paceline verify` runs models alone"
        )
    if config.method in METHODS:
        check_verifiable(config, request.params)


def prompt_ids(
    request: GenerateOptions, tokenizer: Tokenizer, target: str | Path | None
) -> list[int]:
    """Token ids of the prompt, through the chat template of ``target`` if it is a question.

    Args:
        target: folder or file of the model; None: the demo's target.

    Raises:
        InvalidArgument: the model has no chat template.
    """
    from paceline.chat import encode_prompt
    from paceline.demo import TARGET_DIR
    from paceline.tokenizer import chat_template

    template = chat_template(target or TARGET_DIR) if request.chat else None
    if template is not None and not template.source:
        raise InvalidArgument("chat", True, "a target that has a chat template, such as smollm2")
    return encode_prompt(tokenizer, template, request.prompt)


def refuse_local_options(**options: Any) -> None:
    """Raise InvalidArgument for an option about loading a model: the server has loaded it."""
    for name, value in options.items():
        if value is not None:
            raise InvalidArgument(name, str(value), "no such option together with --server")


# --- in this process ------------------------------------------------------------------------------


def run_here(
    request: GenerateOptions,
    *,
    target: str | None,
    drafter: str | None,
    heads: Path | None,
    corpus: Sequence[Path],
    dtype: str,
    device: str,
    drafter_device: str | None,
    batch_invariant: bool | None,
    threads: int | None,
    numerics: str,
    transcript: Path | None,
    with_fingerprint: bool,
) -> Run:
    """Load the models and generate with an engine in this process.

    Args:
        transcript: file to write; None writes none.
        with_fingerprint: add the fingerprint to the result, which reads all weights.
    """
    from paceline.deployments.experience import kept_experience
    from paceline.methods import METHODS
    from paceline.model_names import default_drafter
    from paceline.plan import resolve
    from paceline.request import Request

    # Knobs are one drafter's: with them, and no method, it is the usual drafter's method.
    shipped = default_drafter(target)
    usual = "draft_model" if drafter or shipped else "prompt_lookup"
    config = request.config(usual if request.speculation else "auto", METHODS)
    check_transcript(transcript, config, request)
    resolve(config)  # before loading anything: a wrong name is found at once

    if config.method == "omnidraft":
        shipped = None  # not the one with the target's tokenizer: load_engine takes its own
    texts = [read_text("corpus", file) for file in corpus]
    target_path, drafter_path = local_model(target), local_model(drafter) or shipped
    with err.status("loading the models ..."):
        from paceline.loading import load_engine

        set_threads(threads, target_path)

        engine = load_engine(
            target_path,
            drafter_path,
            heads=heads,
            dtype=dtype,
            device=device,
            drafter_device=drafter_device,
            batch_invariant=batch_invariant,
            translate=config.method == "omnidraft",
            numerics=numerics,
            adapters={"adapter": request.adapter} if request.adapter else None,
            corpus=texts,
        )
    assert engine.tokenizer is not None  # load_engine always has one
    splitter = PieceSplitter(engine.tokenizer)
    pieces: list[Piece] = []

    with kept_experience(engine, config):
        session = engine.submit(
            Request(
                prompt_ids(request, engine.tokenizer, target_path),
                request.params,
                config,
                prediction=engine.tokenizer.encode(request.prediction, False),
                adapter="adapter" if request.adapter else "",
            ),
            on_event=lambda event: pieces.extend(
                splitter.split(event.token_ids, event.num_accepted, event.text)
            ),
        )
        try:
            while engine.has_work:
                engine.step()
                if pieces:
                    yield pieces[:]
                    pieces.clear()
        finally:
            engine.cancel(session.session_id)  # does nothing when it has finished
    if session.error is not None:
        raise session.error
    numerics_of: dict[str, Any] = {}
    if transcript is not None or with_fingerprint:
        fingerprint = engine.local_target.fingerprint_of(session.adapter)
        numerics_of = {"fingerprint": str(fingerprint)}
    if transcript is not None:
        from paceline.transcript import Transcript

        Transcript(
            model="demo" if target_path is None else str(target_path.resolve()),
            fingerprint=fingerprint,
            prompt_token_ids=tuple(session.token_ids[: session.prompt_length]),
            token_ids=tuple(session.output_ids),
            params=request.params,
            finish_reason=session.finish_reason or "",
        ).write(transcript)
    return {
        "text": session.text,
        "token_ids": session.output_ids,
        "method": config.method,
        "num_prompt_tokens": session.prompt_length,
        **session.stats.as_dict(),
        "finish_reason": session.finish_reason,
        **_note(config, session.stats.as_dict()),
        **chat_note(request, target_path, session.text, session.finish_reason),
        **_explanation(session),
        **numerics_of,
    }


# --- on a server ----------------------------------------------------------------------------------


def check_address(server: str) -> str:
    """Return ``server``; InvalidArgument unless it has the form HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument("server", server, "HOST:PORT, for example 127.0.0.1:50051")
    return server


def run_on_server(
    request: GenerateOptions,
    server: str,
    *,
    timeout: float,
    tokenizer_from: str | None,
    client_options: Mapping[str, Any],
    transcript: Path | None = None,
    numerics_mismatch: str | None = None,
) -> Run:
    """Generate over gRPC.

    Args:
        timeout: seconds for the whole generation.
        tokenizer_from: a model whose tokenizer tells which text came from which token;
            None tries the demo pair's.
        client_options: how to connect, see :func:`paceline.cluster.cli_options.client_options`.
        transcript: file to write; None writes none.
        numerics_mismatch: see :meth:`paceline.rpc.client.Client.generate`.
    """
    from paceline.rpc.client import Client, Completion

    check_address(server)
    if numerics_mismatch is not None:
        check_mismatch(numerics_mismatch)
    if not timeout > 0:
        raise InvalidArgument("timeout", timeout, "seconds above 0")
    connect_s = min(timeout, _CONNECT_TIMEOUT_S)
    with Client(server, timeout=connect_s, **client_options) as client:
        model = client.get_model()
    config = request.config(model.default_method, model.methods)
    check_transcript(transcript, config, request)
    splitter = PieceSplitter(_tokenizer_of(model.vocab_size, tokenizer_from))
    rounds = []
    with (
        Client(server, timeout=timeout, **client_options) as client,
        client.generate(
            request.prompt,
            request.params,
            config,
            prediction=request.prediction,
            return_prompt_token_ids=transcript is not None,
            return_explanation=True,
            numerics_mismatch=numerics_mismatch,
            adapter=request.adapter,
        ) as generation,
    ):
        for item in generation:
            rounds.append(item)
            pieces = splitter.split(item.token_ids, item.num_accepted, item.text)
            if pieces:
                yield pieces
    last = rounds[-1]
    assert last.statistics is not None  # the last round of a generation carries them
    done = Completion.of(rounds)
    if transcript is not None:
        _write_transcript(transcript, model.name, request.params, done)
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "method": config.method,
        "num_prompt_tokens": last.prompt_length,
        **last.statistics.as_dict(),
        "finish_reason": last.finish_reason,
        **_note(config, last.statistics.as_dict()),
        "target_pid": last.target_pid,
        "drafter_pid": last.drafter_pid,
        "fingerprint": done.fingerprint,
        "numerics_changed": done.numerics_changed,
        **({} if last.explanation is None else {"explain": dict(last.explanation)}),
    }


def _explanation(session: Session) -> dict[str, Any]:
    """Why method ``auto`` chose what it chose; what a tree's ranks were worth; else nothing."""
    from paceline.lengths.auto import Auto

    if session.ranks is not None:
        return {"rank_acceptance": session.ranks.rates()}
    controller = session.length_controller
    return {"explain": controller.explain()} if isinstance(controller, Auto) else {}


def _note(config: SpeculationConfig, statistics: Mapping[str, Any]) -> dict[str, str]:
    """A ``note`` if a method was mostly AR, since its length controller chose so; else nothing.

    That is: drafts in fewer than half of the rounds. A lookup that finds nothing drafts nothing in
    any case, so it gets a note only below an eighth.
    """
    from paceline.methods import METHODS
    from paceline.plan import resolve

    if config.method not in METHODS or statistics["drafter_lost"]:
        return {}
    plan = resolve(config)
    by_depth, rounds = statistics["drafted_by_depth"], statistics["num_rounds"]
    drafted, lookup = by_depth[0] if by_depth else 0, plan.method.shape is None
    if (
        plan.method.drafter == "none"
        or plan.config.length in ("fixed", "auto")  # AR is one of auto's own choices
        or plan.config.num_speculative_tokens == 0
        or (8 if lookup else 2) * drafted >= rounds
    ):
        return {}
    why = "drafts do not pay on this machine"
    if lookup:
        why = f"the others found nothing to draft, or {why}"
    return {
        "note": f"{drafted} of {rounds} rounds drafted: {why}; `--set length=fixed` shows the "
        "method anyway"
    }


def chat_note(
    request: GenerateOptions, target: Path | None, text: str, finish_reason: str | None
) -> dict[str, str]:
    """A ``note`` if a chat model added nothing to a prompt that was not asked as a question."""
    from paceline.tokenizer import chat_template

    if request.chat or text.strip() or finish_reason != "stop" or request.params.stop:
        return {}
    if target is None or not chat_template(target).source:
        return {}
    return {"note": "the model ended the text at once; --chat asks the prompt as a question"}


def _write_transcript(file: Path, model: str, params: SamplingParams, done: Completion) -> None:
    from paceline.numerics import Fingerprint
    from paceline.transcript import Transcript

    if not done.fingerprint or not done.last.prompt_token_ids:
        raise InvalidArgument("transcript", str(file), "a server that tells its fingerprint")
    Transcript(
        model=model,
        fingerprint=Fingerprint.parse(done.fingerprint),
        numerics_changed=done.numerics_changed,
        prompt_token_ids=done.last.prompt_token_ids,
        token_ids=done.token_ids,
        params=params,
        finish_reason=done.finish_reason,
    ).write(file)


def _tokenizer_of(vocab_size: int, model: str | None) -> Tokenizer | None:
    """A local tokenizer that may be the server's; it only decides about colours."""
    from paceline.demo import TARGET_DIR
    from paceline.errors import ModelNotFound
    from paceline.tokenizer import load_tokenizer

    if model is not None:
        return load_tokenizer(model)
    try:
        tokenizer = load_tokenizer(TARGET_DIR)
    except ModelNotFound:
        return None
    return tokenizer if tokenizer.vocab_size == vocab_size else None


# --- which token a text came from -----------------------------------------------------------------


class PieceSplitter:
    """Splits the text of each round into the pieces of its tokens.

    A round's text may lag behind its tokens (half of a character, the start of a stop string), or a
    stop string may cut it. So pieces wait in a queue until their text has come.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = None
        if tokenizer is not None:
            from paceline.tokenizer import IncrementalDecoder

            self._decoder = IncrementalDecoder(tokenizer)
        self._queue: deque[Piece] = deque()

    def split(self, token_ids: Sequence[int], num_accepted: int, text: str) -> list[Piece]:
        """The pieces of ``text``; their texts joined are ``text``."""
        if self._decoder is None:
            return [Piece(text, None)] if text else []
        for i, token in enumerate(token_ids):
            piece = self._decoder.push(token)
            if piece:
                self._queue.append(Piece(piece, i < num_accepted))
        result = []
        while text and self._queue:
            piece = self._queue.popleft()
            if not text.startswith(piece.text):
                if piece.text.startswith(text):  # the rest of its text has not come yet
                    self._queue.appendleft(Piece(piece.text[len(text) :], piece.accepted))
                    return [*result, Piece(text, piece.accepted)]
                break  # the server has another tokenizer
            result.append(piece)
            text = text[len(piece.text) :]
        return [*result, Piece(text, None)] if text else result


# --- on the terminal ------------------------------------------------------------------------------


def finish(run: Run) -> dict[str, Any]:
    """Run to the end and return the result."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            result: dict[str, Any] = stop.value
            return result


def show_note(result: Mapping[str, Any]) -> None:
    """Print the note of a result, if it has one (on stderr)."""
    if "note" in result:
        err.print(result["note"], style="yellow", highlight=False, markup=False, soft_wrap=True)


def show(run: Run) -> None:
    """Print pieces as they come, then a line of statistics (on stderr: the text can be piped)."""
    from paceline.methods import DIFFUSION_METHODS

    started = False
    try:
        while True:
            for piece in next(run):
                started = True
                style = {True: ACCEPTED_STYLE, False: OWN_STYLE, None: ""}[piece.accepted]
                out.print(Text(piece.text, style), end="", soft_wrap=True)
            out.file.flush()
    except StopIteration as stop:
        result = stop.value
    finally:
        run.close()
        if started:
            out.print()
    if result.get("numerics_changed"):
        err.print(
            "the server was lost on the way, and one with other numerics went on: the rest may "
            "differ from an unbroken generation",
            style="yellow",
        )
    if result.get("drafter_lost"):
        err.print("the drafter was lost on the way; the rest is plain AR", style="yellow")
    show_note(result)
    seconds = result["num_tokens"] / result["tokens_per_second"] if result["num_tokens"] else 0.0
    masked = result["method"] in DIFFUSION_METHODS
    parts = [
        f"{result['num_tokens']} tokens in {seconds:.2f} s ({result['tokens_per_second']:.0f}/s)",
        f"{result['num_target_forwards']} target forwards",
        f"{'tokens per forward' if masked else 'mean accepted length'} "
        f"{result['mean_accepted_length']:.2f}",
    ]
    if result["num_drafted"]:
        parts.append(f"acceptance rate {result['acceptance_rate']:.2f}")
    parts.append(f"method {result['method']}, finished: {result['finish_reason']}")
    err.print(" · ".join(parts), style="dim", highlight=False, soft_wrap=True)
