"""`paceline draft`: a drafter on this machine, the target on a server."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cluster.cli_generate import (
    ACCEPTED_STYLE,
    OWN_STYLE,
    GenerateOptions,
    Piece,
    PieceSplitter,
    check_address,
    finish,
    prompt_ids,
    read_prompt,
    sampling_params,
    speculation,
)
from paceline.cluster.cli_options import (
    Ca,
    Cert,
    Chat,
    IgnoreEos,
    Json,
    Key,
    Knobs,
    MaxTokens,
    MinP,
    NumericsMismatch,
    NumSpeculativeTokens,
    Prompt,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    Threads,
    TokenFile,
    TopK,
    TopP,
    client_options,
    method_option,
    model_option,
)
from paceline.cluster.cli_output import err, local_model, out, print_json, require, set_threads
from paceline.errors import InvalidArgument
from paceline.numerics import check_mismatch

if TYPE_CHECKING:
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.head import HeadDrafter
    from paceline.drafters.omnidraft import OmniDraft
    from paceline.rpc.device import DeviceResult
    from paceline.rpc.remote_target import TargetInfo
    from paceline.tokenizer import Tokenizer

UNVERIFIED_STYLE = "yellow dim"


def draft(
    prompt: Prompt,
    server: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT[,...]",
            help="Servers with the same target. The first that answers verifies; the next one "
            "takes over when it is lost.",
        ),
    ],
    chat: Chat = False,
    drafter: Annotated[
        str | None,
        model_option(
            "Draft model: a Hugging Face folder, a GGUF file (which needs the extra `gguf`), or a "
            "name (`paceline models --help`). Default: the demo's."
        ),
    ] = None,
    target_tokenizer: Annotated[
        str | None,
        model_option(
            "A model with the target's tokenizer, if the drafter has another one: a folder or a "
            "name."
        ),
    ] = None,
    target: Annotated[
        str | None,
        model_option(
            "With a head (`--method eagle3`, `medusa`, ...): the target, a folder or a name. Only "
            "its tokenizer, embedding and output layer are loaded. Default: the demo's."
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            metavar="FOLDER",
            help="Folder of the target's heads. Default: `heads` in its folder, or those shipped.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        method_option(
            "Its drafter must need tokens only, or be a head, to which the server sends its "
            "states. Default: draft_model, or omnidraft with `--target-tokenizer`."
        ),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    num_speculative_tokens: NumSpeculativeTokens = None,
    knobs: Knobs = None,
    offline_ok: Annotated[
        bool,
        typer.Option(
            "--offline-ok",
            help="While no server answers, generate with the drafter alone. Its text is marked, "
            "and verified or replaced when a server is back.",
        ),
    ] = False,
    give_up: Annotated[
        float,
        typer.Option(
            "--give-up", metavar="SECONDS", help="Seconds to look for a server that answers."
        ),
    ] = 30.0,
    numerics_mismatch: NumericsMismatch = None,
    only_device: Annotated[
        bool,
        typer.Option(
            "--only-device",
            help="Always draft here, even where the server alone is measured to be faster.",
        ),
    ] = False,
    direct: Annotated[
        str,
        typer.Option(
            "--direct",
            metavar="auto|never",
            help="auto: send rounds to the target past the gateway, where the gateway gives "
            "tickets for that and this machine reaches the target.",
        ),
    ] = "auto",
    threads: Threads = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Draft on this machine and let a server verify; the tokens are those of the target alone.

    Text appears as it is committed: **green** tokens were drafted and accepted, **bold** ones are
    the target's own. The drafter drafts ahead while an answer is on its way. When a connection
    breaks, the session goes on there or at the next server. Where drafting here is measured to be
    slower, the server drafts, or decodes without drafts.

    Examples:

    - `paceline draft 'def fibonacci(n):' --server 127.0.0.1:50051`
    - `paceline draft 'Once' --server a:50051,b:50051 --drafter ./small -t 0.8 --seed 7 --json`
    - `paceline draft - --server a:50051 --method prompt_lookup < code.py`
    - `paceline draft 'class Stack:' --server a:50051 --method moa`
    """
    require("serve", "grpc")
    request = GenerateOptions(
        prompt=read_prompt(prompt),
        params=sampling_params(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logit_bias=(),
            stop=stop or (),
            stop_token_ids=(),
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        ),
        speculation=speculation(method, num_speculative_tokens, knobs or ()),
        chat=chat,
    )
    servers = [check_address(address.strip()) for address in server.split(",")]
    screen = _Screen(plain=as_json or not out.is_terminal)
    run = _run(
        request,
        servers,
        drafter=drafter,
        target_tokenizer=target_tokenizer,
        target=target,
        heads=heads,
        offline_ok=offline_ok,
        give_up=give_up,
        only_device=only_device,
        numerics_mismatch=numerics_mismatch or "refuse",
        direct=direct,
        threads=threads,
        connection=client_options(server, ca, cert, key, token_file),
        screen=screen,
    )
    if as_json:
        print_json(finish(run))
    else:
        _show(run, screen)


def _run(
    request: GenerateOptions,
    servers: Sequence[str],
    *,
    drafter: str | None,
    target_tokenizer: str | None,
    target: str | None,
    heads: str | None,
    offline_ok: bool,
    give_up: float,
    only_device: bool,
    numerics_mismatch: str,
    direct: str,
    threads: int | None,
    connection: Mapping[str, Any],
    screen: _Screen,
) -> Generator[list[Piece], None, dict[str, Any]]:
    from paceline.config import parse_speculation
    from paceline.drafters.draft_model import DraftModel
    from paceline.methods import METHODS
    from paceline.rpc.client import open_channel, open_direct
    from paceline.rpc.device import LADDER, DeviceClient, checked_speculation
    from paceline.rpc.ladder import Mode
    from paceline.rpc.reconnect import Patience

    check_mismatch(numerics_mismatch)
    if direct not in ("auto", "never"):
        raise InvalidArgument("direct", direct, "auto or never")
    if not give_up > 0:
        raise InvalidArgument("give_up", give_up, "seconds above 0")
    method_name = "draft_model" if target_tokenizer is None else "omnidraft"
    given = {"method": method_name, **request.speculation}
    method = METHODS.get(given["method"])
    if method is not None and method.length in ("fixed", "goodput"):
        given.setdefault("length", "round_trip")  # this controller knows what a round trip costs
    config = checked_speculation(parse_speculation(given))
    patience = Patience(give_up=give_up)
    connect = partial(open_channel, **connection)
    without_token = {name: value for name, value in connection.items() if name != "token"}
    head = method.drafter if method is not None and method.head else None
    _check_models(head, drafter, target_tokenizer, target, heads)
    path = local_model((target or "demo") if head else (drafter or "demo-drafter"))
    assert path is not None  # only None stays None
    with err.status("loading the drafter ..."):
        set_threads(threads, path)
        model, tokenizer = _load(path) if head is None else _load_head(head, path, heads)
        if target_tokenizer is not None:
            model, tokenizer = _translating(model, tokenizer, target_tokenizer)
    info = _info(servers, connect, patience, tokenizer, model, path, offline_ok)
    _check_tokenizer(info, tokenizer, drafter, target_tokenizer)
    name = head or "omnidraft"
    if isinstance(model, DraftModel):
        name = "draft_model"
        model.fit_vocabulary(info.vocab_size)
    splitter = PieceSplitter(tokenizer)
    screen.decode = tokenizer.decode
    with DeviceClient(
        servers, {name: model},
        speculation=config,
        info=info,
        tokenizer=tokenizer,
        connect=connect,
        patience=patience,
        offline_ok=offline_ok,
        numerics_mismatch=numerics_mismatch,
        modes=(Mode.DEVICE,) if only_device else LADDER,
        direct=partial(open_direct, **without_token) if direct == "auto" else None,
        on_unverified=screen.unverified,
    ) as client:  # fmt: skip
        ids = prompt_ids(request, tokenizer, target_tokenizer or path)
        for item in client.generate(ids, request.params):
            pieces = splitter.split(item.token_ids, item.num_accepted, item.text)
            if pieces:
                yield pieces
        return _result(client.result, config.method, len(ids), tokenizer)


def _check_models(
    head: str | None,
    drafter: str | None,
    target_tokenizer: str | None,
    target: str | None,
    heads: str | None,
) -> None:
    """Raise InvalidArgument for a model that the method does not use."""
    with_head, without = (("target", target), ("heads", heads)), (
        ("drafter", drafter), ("target_tokenizer", target_tokenizer),
    )  # fmt: skip
    for name, value in without if head else with_head:
        if value is not None:
            allowed = f"none with the head {head}" if head else "none without the method of a head"
            raise InvalidArgument(name, value, allowed)


def _load_head(kind: str, path: Path, heads: str | None) -> tuple[HeadDrafter, Tokenizer]:
    """Load a head and what it needs of its target, and the target's tokenizer."""
    from paceline.gguf_folder import model_folder
    from paceline.loading import load_head_drafter
    from paceline.models.llama_config import LlamaConfig
    from paceline.tokenizer import load_tokenizer

    longest = LlamaConfig.from_folder(model_folder(path)).context_length
    return load_head_drafter(kind, path, heads, kv_tokens=longest), load_tokenizer(path)


def _load(path: Path) -> tuple[DraftModel, Tokenizer]:
    """Load the draft model of a folder or GGUF file, and its tokenizer."""
    from paceline.loading import load_drafter
    from paceline.tokenizer import load_tokenizer

    return load_drafter(path, path), load_tokenizer(path)


def _translating(
    model: DraftModel, tokenizer: Tokenizer, target: str
) -> tuple[DraftModel | OmniDraft, Tokenizer]:
    """The draft model as a drafter for targets with the tokenizer of the model ``target``."""
    from paceline.drafters.omnidraft import OmniDraft, Translator
    from paceline.tokenizer import load_tokenizer

    theirs = load_tokenizer(target)
    if theirs.vocabulary() == tokenizer.vocabulary():
        return OmniDraft(model), theirs
    return OmniDraft(model, Translator(theirs, tokenizer)), theirs


def _check_tokenizer(
    info: TargetInfo, tokenizer: Tokenizer, drafter: str | None, target_tokenizer: str | None
) -> None:
    """Raise InvalidArgument unless the target has this tokenizer."""
    from paceline.tokenizer import fingerprint

    same = tokenizer.vocab_size <= info.vocab_size
    if info.tokenizer:
        same = fingerprint(tokenizer) == info.tokenizer
    if same:
        return
    if target_tokenizer is not None:
        raise InvalidArgument(
            "target_tokenizer", target_tokenizer, "a model with the tokenizer of this target"
        )
    raise InvalidArgument(
        "drafter", drafter or "the demo's",
        f"a drafter with the tokenizer of the target {info.name!r}, or --target-tokenizer MODEL, "
        "with which the method omnidraft translates drafts",
    )  # fmt: skip


def _info(
    servers: Sequence[str],
    connect: Any,
    patience: Any,
    tokenizer: Tokenizer,
    model: DraftModel | OmniDraft | HeadDrafter,
    path: Path,
    offline_ok: bool,
) -> TargetInfo:
    """What the servers say of their target; offline, the drafter's own sizes."""
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.head import HeadDrafter
    from paceline.rpc.errors import ServerUnavailable
    from paceline.rpc.remote_target import TargetInfo, get_model
    from paceline.tokenizer import eos_token_ids

    try:
        timeout = min(2.0, patience.give_up) if offline_ok else patience.give_up
        return TargetInfo.of(get_model(servers, connect, timeout=timeout))
    except ServerUnavailable as error:
        if not offline_ok:
            raise
        err.print(f"offline: {error}", style="yellow", highlight=False, soft_wrap=True)
        if isinstance(model, HeadDrafter):
            return TargetInfo(
                vocab_size=model.target.vocab_size,
                context_length=model.target.context_length,
                eos_token_ids=eos_token_ids(path),
            )
        own = model if isinstance(model, DraftModel) else model.model
        return TargetInfo(
            vocab_size=own.vocab_size if own is model else tokenizer.vocab_size,
            context_length=own.runner.context_length,
            eos_token_ids=eos_token_ids(path),
        )


def _result(
    result: DeviceResult, method: str, num_prompt_tokens: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What `--json` prints: raw counters, and ratios of them."""
    counters, stats = result.counters, result.statistics
    travel = counters.median_travel_seconds
    answered = max(1, counters.rounds_sent)
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "method": method,
        "num_prompt_tokens": num_prompt_tokens,
        **stats.as_dict(),
        "finish_reason": result.finish_reason,
        "fingerprint": result.fingerprint,
        "numerics_changed": result.numerics_changed,
        "verified": not result.unverified_ids,
        "unverified_text": tokenizer.decode(result.unverified_ids),
        "unverified_token_ids": result.unverified_ids,
        "round_trip_p50_ms": None if travel is None else 1e3 * travel,
        "rounds_sent": counters.rounds_sent,
        "rounds_sent_ahead": counters.sent_ahead,
        "rounds_ahead_right": counters.ahead_right,
        "bytes_up_per_round": counters.bytes_up / answered,
        "bytes_down_per_round": counters.bytes_down / answered,
        "states_bytes_per_token": counters.states_bytes / max(1, stats.num_tokens),
        "num_failures": counters.num_failures,
        "num_resumed": counters.num_resumed,
        "direct_rounds": counters.direct_rounds,
        "direct_failures": counters.direct_failures,
        "mode_changes": [
            {"after_tokens": change.num_tokens, "from": change.old.value, "to": change.new.value}
            for change in result.mode_changes
        ],
    }


class _Screen:
    """Shows committed text, and behind it unverified text until a server is back.

    Args:
        plain: show committed text only, for a pipe or JSON.
    """

    def __init__(self, *, plain: bool) -> None:
        self._plain = plain
        self._lock = threading.Lock()
        self._shown = ""  # unverified text on the terminal
        self.decode: Any = None

    def unverified(self, token_ids: Sequence[int]) -> None:
        """Show all tokens so far that no target has verified."""
        if self._plain:
            return
        text = self.decode(list(token_ids))
        if not self._shown:
            err.print("\n[offline, not verified]", style=UNVERIFIED_STYLE, markup=False)
        if text.startswith(self._shown):
            out.print(Text(text[len(self._shown) :], UNVERIFIED_STYLE), end="", soft_wrap=True)
            self._shown = text
        out.file.flush()

    def committed(self, pieces: Sequence[Piece]) -> None:
        """Show tokens that the target has committed."""
        if self._shown:
            # Text on a terminal cannot be taken back: the verified text is printed again.
            err.print("\n[connected again: verified text]", style=UNVERIFIED_STYLE, markup=False)
            self._shown = ""
        for piece in pieces:
            style = {True: ACCEPTED_STYLE, False: OWN_STYLE, None: ""}[piece.accepted]
            out.print(Text(piece.text, style), end="", soft_wrap=True)
        out.file.flush()


def _show(run: Generator[list[Piece], None, dict[str, Any]], screen: _Screen) -> None:
    """Print pieces as they come, then a line of statistics (on stderr: the text can be piped)."""
    started = False
    try:
        while True:
            pieces = next(run)
            started = True
            screen.committed(pieces)
    except StopIteration as stop:
        result = stop.value
    finally:
        run.close()
        if started:
            out.print()
    if not result["verified"]:
        err.print(
            f"no server came back: {len(result['unverified_token_ids'])} more tokens are the "
            "drafter's alone, not verified:",
            style=UNVERIFIED_STYLE,
        )
        err.print(Text(result["unverified_text"], UNVERIFIED_STYLE), soft_wrap=True)
    err.print(" · ".join(statistics(result)), style="dim", highlight=False, soft_wrap=True)


def statistics(result: Mapping[str, Any]) -> list[str]:
    """The parts of the last line."""
    seconds = result["num_tokens"] / result["tokens_per_second"] if result["num_tokens"] else 0.0
    parts = [
        f"{result['num_tokens']} tokens in {seconds:.2f} s ({result['tokens_per_second']:.0f}/s)",
        f"{result['num_rounds']} rounds",
        f"mean accepted length {result['mean_accepted_length']:.2f}",
    ]
    if result["num_drafted"]:
        parts.append(f"acceptance rate {result['acceptance_rate']:.2f}")
    if result["round_trip_p50_ms"] is not None:
        parts.append(f"round trip {result['round_trip_p50_ms']:.1f} ms")
    parts.append(
        f"{result['bytes_up_per_round']:.0f} B up, {result['bytes_down_per_round']:.0f} B down a "
        "round"
    )
    if result["rounds_sent_ahead"]:
        parts.append(
            f"{result['rounds_ahead_right']} of {result['rounds_sent_ahead']} rounds ahead were "
            "right"
        )
    if result["numerics_changed"]:
        parts.append("numerics changed on the way")
    if result["num_failures"]:
        parts.append(f"{result['num_failures']} lost connections")
    parts += [
        f"{change['from']} → {change['to']} after {change['after_tokens']}"
        for change in result["mode_changes"]
    ]
    parts.append(f"method {result['method']}, finished: {result['finish_reason'] or 'offline'}")
    return parts
