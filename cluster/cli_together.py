"""`paceline together KIND`: two or more models, or several drafts, write one text."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cluster.cli_generate import check_address, read_prompt, read_text
from paceline.cluster.cli_options import (
    Ca,
    Cert,
    Json,
    Key,
    MaxTokens,
    Prompt,
    Seed,
    Temperature,
    Threads,
    TokenFile,
    client_options,
    model_option,
)
from paceline.cluster.cli_output import (
    Command,
    CommandGroup,
    err,
    out,
    print_json,
    require,
    set_threads,
)
from paceline.errors import InvalidArgument

if TYPE_CHECKING:
    from paceline.models.base import ModelRunner
    from paceline.together.reasoning import StepWriter
    from paceline.tokenizer import Tokenizer

together = typer.Typer(
    cls=CommandGroup,
    help="Let models write a text together: by entropy, step by step, byte by byte (all lossy).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_SMALL = "Small model: a folder, a GGUF file or a name. Default: the demo's drafter."
_LARGE = "Large model: a folder, a GGUF file or a name. Default: the demo's target."
Small = Annotated[str | None, model_option(_SMALL)]
Large = Annotated[str | None, model_option(_LARGE)]


@dataclass(frozen=True, slots=True)
class _Loaded:
    runner: ModelRunner
    tokenizer: Tokenizer
    stop_ids: frozenset[int]


def _load(name: str | None, default: Path) -> _Loaded:
    from paceline.gguf_folder import model_folder
    from paceline.loading import load_runner
    from paceline.model_names import resolve_model
    from paceline.tokenizer import eos_token_ids, load_tokenizer

    folder = model_folder(resolve_model(name or default))
    stops = frozenset(eos_token_ids(folder))
    return _Loaded(load_runner(folder), load_tokenizer(folder), stops)


def _pair(small: str | None, large: str | None, threads: int | None) -> tuple[_Loaded, _Loaded]:
    """The two models; they must have one tokenizer."""
    set_threads(threads, large)
    from paceline.demo import DRAFTER_DIR, TARGET_DIR
    from paceline.tokenizer import check_same_tokenizer

    with err.status("loading the models ..."):
        models = _load(small, DRAFTER_DIR), _load(large, TARGET_DIR)
    check_same_tokenizer(models[1].tokenizer, models[0].tokenizer)
    return models


class _Printer:
    """Prints tokens as they come: bold those of the large model, green those of the small one."""

    def __init__(self, tokenizer: Tokenizer, quiet: bool) -> None:
        from paceline.tokenizer import IncrementalDecoder

        self._decoder, self._quiet = IncrementalDecoder(tokenizer), quiet
        self.text = ""

    def push(self, token: int, by_large: bool) -> None:
        self._show(self._decoder.push(token), by_large)

    def end(self) -> None:
        self._show(self._decoder.flush(), False)
        if not self._quiet:
            out.print()

    def _show(self, piece: str, by_large: bool) -> None:
        self.text += piece
        if not self._quiet:
            show_piece(piece, by_large)


def show_piece(piece: str, by_large: bool) -> None:
    """Print a piece of text in the style of its author."""
    style = "bold" if by_large else "green"
    out.print(piece, style=style, end="", markup=False, highlight=False, soft_wrap=True)


def _summary(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


@together.command("entropy", cls=Command)
def entropy(
    prompt: Prompt,
    threshold: Annotated[
        float,
        typer.Option(
            metavar="NATS",
            help="Mean entropy from which the large model writes: 0 always, inf never.",
        ),
    ] = 1.5,
    window: Annotated[
        int, typer.Option(metavar="N", help="Tokens that the mean is taken over.")
    ] = 5,
    small: Small = None,
    large: Large = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Entropy Adaptive Decoding: the large model writes where the text is uncertain.

    **Bold** tokens are the large model's, **green** ones the small one's. Nothing is verified.

    Example:

    - `paceline together entropy 'class Stack:' --threshold 2`
    """
    from paceline.sampling import SamplingParams
    from paceline.together.entropy import EntropyAdaptive, Router

    router = Router(threshold, window)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    text = read_prompt(prompt)
    first, second = _pair(small, large, threads)
    both = EntropyAdaptive(first.runner, second.runner, router, params, second.stop_ids)
    printer, written = _Printer(second.tokenizer, as_json), []
    for token in both.decode(second.tokenizer.encode(text)):
        written.append(token)
        printer.push(token.token_id, token.by_large)
    printer.end()
    share = sum(token.by_large for token in written) / len(written)
    if as_json:
        print_json(
            {
                "text": printer.text,
                "token_ids": [token.token_id for token in written],
                "by_large": [token.by_large for token in written],
                "entropies": [round(token.entropy, 4) for token in written],
                "large_share": share,
                "small_forwards": both.small.num_forwards,
                "large_forwards": both.large.num_forwards,
            }
        )
    else:
        _summary(
            f"{len(written)} tokens, {share:.0%} by the large model; forwards: small "
            f"{both.small.num_forwards}, large {both.large.num_forwards}"
        )


@together.command("oracle", cls=Command)
def oracle(
    prompt: Prompt,
    small: Small = None,
    large: Large = None,
    max_tokens: MaxTokens = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """How much of the large model's text needs the large model (FS-GEN).

    The text is the large model's greedy one. **Green** tokens the small model would have written,
    too; **bold** ones only the large one.

    Example:

    - `paceline together oracle 'class Stack:'`
    """
    from paceline.together.oracle import collaborate, how_well_entropy_tells

    text = read_prompt(prompt)
    first, second = _pair(small, large, threads)
    ids = second.tokenizer.encode(text)
    found = collaborate(first.runner, second.runner, ids, max_tokens, second.stop_ids)
    printer = _Printer(second.tokenizer, as_json)
    for token, by_large in zip(found.token_ids, found.by_large, strict=True):
        printer.push(token, by_large)
    printer.end()
    tells = how_well_entropy_tells([found])
    if as_json:
        print_json(
            {
                "text": printer.text,
                "token_ids": list(found.token_ids),
                "by_large": list(found.by_large),
                "large_share": found.large_share,
                "auc": None if tells != tells else tells,
            }
        )
    else:
        _summary(
            f"{len(found.token_ids)} tokens, {found.large_share:.0%} need the large model; area "
            f"under the curve of the small model's entropy: {tells:.2f}"
        )


@together.command("superpose", cls=Command)
def superpose_drafts(
    prompt: Prompt,
    drafts: Annotated[int, typer.Option(metavar="K", help="Texts to write.")] = 3,
    alpha: Annotated[
        float, typer.Option(metavar="X", help="Weight of the n-grams, from 0 to 1.")
    ] = 0.3,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Text that the n-grams know beside the prompt. Repeatable."
        ),
    ] = None,
    model: Annotated[str | None, model_option(_LARGE)] = None,
    max_tokens: MaxTokens = 10,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Superposed Decoding: several short continuations for the forwards of one.

    Example:

    - `paceline together superpose 'import os\\nimport ' --drafts 4 --alpha 0`
    """
    set_threads(threads, model)
    from paceline.demo import TARGET_DIR
    from paceline.models.llama import LlamaRunner
    from paceline.together.superposed import InterpolatedNgrams, superpose

    text = read_prompt(prompt)
    texts = [read_text("corpus", file) for file in corpus or ()]
    with err.status("loading the model ..."):
        loaded = _load(model, TARGET_DIR)
    if not isinstance(loaded.runner, LlamaRunner):
        raise InvalidArgument("model", model, "a model on the fast path (Llama, Mistral, Qwen)")
    ids = loaded.tokenizer.encode(text)
    known = [ids, *(loaded.tokenizer.encode(each) for each in texts)]
    ngrams = InterpolatedNgrams.of(known, loaded.runner.vocab_size)
    found = superpose(
        loaded.runner, ids, max_tokens,
        drafts=drafts, alpha=alpha, ngrams=ngrams, stop_ids=loaded.stop_ids,
    )  # fmt: skip
    written = [loaded.tokenizer.decode(draft.token_ids) for draft in found.drafts]
    if as_json:
        rows = [
            {"text": each, "token_ids": list(draft.token_ids), "score": draft.score}
            for each, draft in zip(written, found.drafts, strict=True)
        ]
        print_json({"drafts": rows, "forwards": found.num_forwards})
        return
    for each, draft in zip(written, found.drafts, strict=True):
        out.print(f"{draft.score:8.2f}  {each!r}", markup=False, highlight=False, soft_wrap=True)
    _summary(f"{drafts} drafts of {max_tokens} tokens in {found.num_forwards} forwards")


@together.command("fuse", cls=Command)
def fuse_models(
    prompt: Prompt,
    model: Annotated[
        list[str] | None,
        model_option(
            "A model, with any vocabulary: a folder, a GGUF file or a name. Repeatable. Default: "
            "the demo's target and drafter."
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(
            metavar="W", help="Weight of each model, in their order; the sum is 1. Default: equal."
        ),
    ] = None,
    beam: Annotated[
        int,
        typer.Option(metavar="N", help="Spellings of the text that each model keeps; 0: all."),
    ] = 8,
    max_bytes: Annotated[int, typer.Option(metavar="N", help="Bytes to write.")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Generative Fusion Decoding: models with different vocabularies, fused byte by byte.

    Examples:

    - `paceline together fuse 'class Stack:' --weight 0.7 --weight 0.3`
    - `paceline together fuse 'def add(a, b):' --model demo --model smollm2`
    """
    names = model or ["demo", "demo-drafter"]
    weights = weight or [1.0 / len(names)] * len(names)
    set_threads(threads, names[0])
    from paceline.demo import TARGET_DIR
    from paceline.together.fusion import ByteModel, fuse

    text = read_prompt(prompt)
    if max_bytes < 1:
        raise InvalidArgument("max_bytes", max_bytes, "at least 1")
    with err.status("loading the models ..."):
        loaded = [_load(name, TARGET_DIR) for name in names]
    models = [ByteModel(each.runner, each.tokenizer, each.stop_ids, beam) for each in loaded]
    found = fuse(models, weights, text, max_bytes)
    if as_json:
        rows = [
            {
                "model": name,
                "weight": share,
                "log_probability": value,
                "lost": each.lost,
                "forwards": each.num_forwards,
            }
            for name, share, value, each in zip(
                names, weights, found.log_probabilities, models, strict=True
            )
        ]
        print_json({"text": found.text, "ended": found.ended, "models": rows})
        return
    out.print(found.text, markup=False, highlight=False, soft_wrap=True)
    for name, value, each in zip(names, found.log_probabilities, models, strict=True):
        _summary(
            f"{name}: log-probability {value:.2f}, {each.num_forwards} forwards, "
            f"{each.lost:.1%} of the spellings' mass outside the beam"
        )


@together.command("fork", cls=Command)
def fork_answer(
    prompt: Prompt,
    model: Annotated[
        str | None,
        model_option(
            "A model that was fine-tuned to fork: a folder, a GGUF file or a name. Default: a "
            "small one that lists animals."
        ),
    ] = None,
    fork: Annotated[
        str, typer.Option(metavar="TEXT", help="The token behind which a branch begins.")
    ] = "[Fork]",
    child: Annotated[
        str, typer.Option(metavar="TEXT", help="The token that is given to a branch first.")
    ] = "[Child]",
    method: Annotated[
        str, typer.Option(metavar="NAME", help="How each branch decodes: a lossless method.")
    ] = "auto",
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Write one branch after another.")
    ] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """APAR: a model opens branches of its own answer, which are written in parallel.

    Each branch is shown when it ends, with its place in the tree; then the answer in order.
    `--max-tokens` is the most of a path from the root to a leaf.

    Examples:

    - `paceline together fork $'cat, owl, pike:\\n'`
    - `paceline together fork $'cat, owl, pike:\\n' --method token_recycling`
    """
    set_threads(threads, model)
    from paceline.config import SpeculationConfig
    from paceline.demo import FORKS_DIR
    from paceline.loading import load_engine
    from paceline.sampling import SamplingParams
    from paceline.together.forks import ForkedAnswer, ForkTokens

    text = read_prompt(prompt)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    with err.status("loading the model ..."):
        engine = load_engine(model or FORKS_DIR)
    assert engine.tokenizer is not None
    tokens = ForkTokens.named(engine.tokenizer, fork, child)
    answer = ForkedAnswer(
        engine, tokens, params, SpeculationConfig(method=method), parallel=not one_by_one
    )
    texts: dict[tuple[int, ...], str] = {}
    for piece in answer.write(engine.tokenizer.encode(text)):
        texts[piece.address] = texts.get(piece.address, "") + piece.text
        if piece.finished and not as_json:
            _summary(f"[{_place_of(piece.address)}] {texts[piece.address]!r}")
    if as_json:
        rows = [
            {
                "branch": _place_of(address),
                "text": texts.get(address, ""),
                "token_ids": branch.session.output_ids,
                "forks": branch.forks,
                "tokens_above": branch.above,
            }
            for address, branch in answer.branches.items()
        ]
        print_json(
            {
                "text": answer.text,
                "branches": rows,
                "tokens": answer.num_tokens,
                "longest_path": answer.longest_path,
                "steps": answer.num_steps,
            }
        )
        return
    out.print(answer.text, markup=False, highlight=False, soft_wrap=True)
    _summary(
        f"{answer.num_tokens} tokens in {len(answer.branches)} branches, {answer.longest_path} on "
        f"the longest path; {answer.num_steps} steps"
    )


def _place_of(address: tuple[int, ...]) -> str:
    """A branch's place as people count: "root", "1", "1.2"."""
    return ".".join(str(number + 1) for number in address) or "root"


@together.command("words", cls=Command)
def write_whole_words(
    prompt: Prompt,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Candidates of a step, tokens and words together.")
    ] = 10,
    length_power: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Log-likelihoods are divided by the number of tokens to this power; at 0 no word "
            "is written.",
        ),
    ] = 1.0,
    words: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of `paceline train words`. Default: the file words.safetensors in the folder "
            "`heads` of the model, for the demo target that of Paceline.",
        ),
    ] = None,
    no_words: Annotated[
        bool, typer.Option("--no-words", help="The model's own tokens only: greedy decoding.")
    ] = False,
    model: Annotated[str | None, model_option(_LARGE)] = None,
    max_tokens: MaxTokens = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """MuMo: whole words from a second output layer; the model picks the best of the candidates.

    **Bold** words took one forward instead of one for each of their tokens.

    Examples:

    - `paceline together words 'class Stack:'`
    - `paceline together words 'class Stack:' --no-words`
    """
    set_threads(threads, model)
    from paceline.demo import TARGET_DIR, WORDS_FILE
    from paceline.model_names import resolve_model
    from paceline.models.llama import LlamaRunner
    from paceline.together.words import WordHead, write_words
    from paceline.tokenizer import IncrementalDecoder

    text = read_prompt(prompt)
    with err.status("loading the model ..."):
        loaded = _load(model, TARGET_DIR)
    if not isinstance(loaded.runner, LlamaRunner):
        raise InvalidArgument("model", model, "a model on the fast path (Llama, Mistral, Qwen)")
    place = resolve_model(model or TARGET_DIR)
    file = words or (WORDS_FILE if place == TARGET_DIR else place / "heads" / WORDS_FILE.name)
    head = None if no_words else WordHead.load(file)
    found = write_words(
        loaded.runner, head, loaded.tokenizer.encode(text), max_tokens,
        top_k=top_k, length_power=length_power, stop_ids=loaded.stop_ids,
    )  # fmt: skip
    if as_json:
        steps = [
            {"text": loaded.tokenizer.decode(step.token_ids), "token_ids": list(step.token_ids),
             "rank": step.rank}
            for step in found.steps
        ]  # fmt: skip
        print_json(
            {
                "text": loaded.tokenizer.decode(found.token_ids),
                "token_ids": list(found.token_ids),
                "steps": steps,
                "words": found.num_words,
            }
        )
        return
    decoder = IncrementalDecoder(loaded.tokenizer)
    for step in found.steps:
        pieces = "".join(decoder.push(token) for token in step.token_ids)
        show_piece(pieces, len(step.token_ids) > 1)
    show_piece(decoder.flush(), False)
    out.print()
    _summary(
        f"{len(found.token_ids)} tokens in {len(found.steps)} steps, {found.num_words} of them "
        "whole words"
    )


_ADDRESS = re.compile(r"https?://.+|(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d+")
_PLACE = "a folder, a GGUF file or a name; HOST:PORT (gRPC) or http://HOST:PORT of a server."


@together.command("reason", cls=Command)
def reason_in_steps(
    prompt: Prompt,
    threshold: Annotated[
        float,
        typer.Option(
            metavar="GRADE", help="Grade from which a small model's step stays: 0 all, 10 none."
        ),
    ] = 7.0,
    first_steps: Annotated[
        int, typer.Option(metavar="N", help="First steps that the large model writes.")
    ] = 0,
    max_tokens: MaxTokens = 512,
    max_step_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of a step.")] = 128,
    separator: Annotated[
        str, typer.Option(metavar="TEXT", help="What ends a step; \\n is a new line.")
    ] = "\\n\\n",
    small: Annotated[
        str | None, model_option(f"Small model: {_PLACE} Default: the demo's drafter.")
    ] = None,
    large: Annotated[
        str | None, model_option(f"Large model: {_PLACE} Default: the demo's target.")
    ] = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """SpecReason: a small model writes the steps, a large one grades each and rewrites bad ones.

    A grade costs the large model one token. **Bold** steps are the large model's. Both models may
    be servers of a deployment, and decode with drafts of their own.

    Examples:

    - `paceline together reason 'Question: ...' --small 10.0.0.5:50051 --large 10.0.0.6:50051`
    - `paceline together reason 'Question: Tom has 3 apples.\\nAnswer: ' --separator '\\n'`
    """
    from paceline.sampling import SamplingParams
    from paceline.together.reasoning import ReasonedAnswer, ReasonOptions, reason

    text = read_prompt(prompt)
    options = ReasonOptions(
        threshold=threshold, first_steps=first_steps, token_budget=max_tokens,
        max_step_tokens=max_step_tokens, separator=separator.replace("\\n", "\n"),
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=seed)
    servers = [name for name in (small, large) if name and _ADDRESS.fullmatch(name)]
    access = client_options(servers[0] if servers else None, ca, cert, key, token_file)
    steps = []
    with ExitStack() as stack:
        writers = _writers(stack, small, large, access, threads)
        for step in reason(*writers, text, options, params):
            steps.append(step)
            if not as_json:
                show_piece(step.text, step.by_large)
    answer = ReasonedAnswer(tuple(steps))
    if as_json:
        rows = [
            {
                "text": step.text,
                "by_large": step.by_large,
                "grade": step.grade,
                "tokens": step.num_tokens,
                "rejected_tokens": step.num_rejected,
            }
            for step in steps
        ]
        print_json(
            {
                "text": answer.text,
                "steps": rows,
                "tokens": answer.num_tokens,
                "large_share": answer.large_share,
                "grades": answer.num_graded,
                "accepted_steps": answer.num_accepted,
            }
        )
        return
    out.print()
    _summary(
        f"{len(steps)} steps, {answer.num_accepted} of {answer.num_graded} graded ones stayed; "
        f"{answer.num_tokens} tokens, {answer.large_share:.0%} by the large model"
    )


def _http_writer(url: str, access: dict[str, Any]) -> StepWriter:
    from paceline.rpc.writer import HttpWriter

    for option in ("cert", "key"):
        if option in access:
            raise InvalidArgument(option, str(access[option]), "servers over gRPC with it")
    return HttpWriter(url, **access)


def _writers(
    stack: ExitStack,
    small: str | None,
    large: str | None,
    access: dict[str, Any],
    threads: int | None,
) -> tuple[StepWriter, StepWriter]:
    """The small model's writer and the large one's."""
    from paceline.demo import DRAFTER_DIR, TARGET_DIR
    from paceline.together.reasoning import EngineWriter

    writers: list[StepWriter] = []
    for name, default in ((small, DRAFTER_DIR), (large, TARGET_DIR)):
        if name is not None and _ADDRESS.fullmatch(name):
            require("serve", "grpc")
            from paceline.rpc.client import Client
            from paceline.rpc.writer import ClientWriter

            if name.startswith("http"):
                writers.append(_http_writer(name, access))
                continue
            client = Client(check_address(name), timeout=600.0, **access)
            writers.append(ClientWriter(stack.enter_context(client)))
            continue
        set_threads(threads, name)
        from paceline.loading import load_engine

        with err.status("loading a model ..."):
            engine = load_engine(name or default)
        writers.append(EngineWriter(engine))
    return writers[0], writers[1]
