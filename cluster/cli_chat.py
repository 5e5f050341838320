"""`paceline chat`: a conversation in the terminal, with an engine of its own."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from paceline.cluster.cli_generate import (
    ACCEPTED_STYLE,
    OWN_STYLE,
    Piece,
    PieceSplitter,
    sampling_params,
)
from paceline.cluster.cli_options import (
    Adapter,
    ChatDtype,
    Drafter,
    MaxTokens,
    Seed,
    Temperature,
    Threads,
    method_option,
    model_option,
)
from paceline.cluster.cli_output import err, local_model, model_to_show, out, set_threads
from paceline.errors import InvalidArgument, PacelineError

if TYPE_CHECKING:
    from paceline.engine import Engine
    from paceline.sampling import SamplingParams
    from paceline.session import Session
    from paceline.tokenizer import ChatTemplate

COMMANDS = {
    "/method [NAME]": "show the method, or choose another one",
    "/stats": "show the statistics of the last answer",
    "/system TEXT": "start a new conversation with this instruction",
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/exit": "leave, as ctrl-d does; ctrl-c stops an answer",
}


class Chat:
    """A conversation.

    Attributes:
        messages: so far; of an answer that was stopped, the part that came.
        last: the session of the last answer.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        params: SamplingParams,
        method: str,
        system: str = "",
    ) -> None:
        self._engine = engine
        self._template = template
        self._params = params
        self.last: Session | None = None
        self.use(method)
        self.reset(system)

    def use(self, method: str) -> None:
        """Answer with this method from now on; InvalidArgument if no method has this name."""
        from paceline.config import SpeculationConfig
        from paceline.plan import resolve

        config = SpeculationConfig(method=method)
        resolve(config)
        self.config = config

    def reset(self, system: str = "") -> None:
        """Start anew, with an instruction if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Generator[list[Piece], None, None]:
        """Ask, and get the pieces of the answer as its tokens are committed.

        To stop the answer, close the generator: the conversation keeps the part that came.

        Raises:
            PacelineError: the conversation is too long, or the template refuses it; then the
                conversation does not change.
        """
        from paceline.chat import encode_chat
        from paceline.request import Request

        engine, template, tokenizer = self._engine, self._template, self._engine.tokenizer
        assert tokenizer is not None  # load_engine always has one
        asked = [*self.messages, {"role": "user", "content": text}]
        splitter = PieceSplitter(tokenizer)
        pieces: list[Piece] = []
        self.last = session = engine.submit(
            Request(
                encode_chat(tokenizer, template, asked),
                self._params,
                self.config,
                adapter="".join(engine.target.adapters),  # at most one
            ),
            on_event=lambda event: pieces.extend(
                splitter.split(event.token_ids, event.num_accepted, event.text)
            ),
        )
        said = ""
        try:
            while engine.has_work:
                engine.step()
                if pieces:
                    said += "".join(piece.text for piece in pieces)
                    yield pieces[:]
                    pieces.clear()
            if session.error is not None:
                raise session.error
        finally:
            engine.cancel(session.session_id)  # does nothing when it has finished
            if said or session.error is None:
                self.messages = [*asked, {"role": "assistant", "content": said}]


def chat(
    target: Annotated[
        str | None,
        model_option(
            "The model: a Hugging Face folder, a GGUF file or a name (`paceline models --help`). "
            "Default: smollm2, or the demo pair if it cannot be downloaded."
        ),
    ] = None,
    drafter: Drafter = None,
    adapter: Adapter = None,
    dtype: ChatDtype = "auto",
    method: Annotated[
        str | None,
        method_option("Default: auto, the best of what is loaded in each round."),
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="Instruction that begins the conversation.")
    ] = "",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    max_tokens: MaxTokens = 512,
    threads: Threads = None,
) -> None:
    """Chat with a model in the terminal.

    Answers appear as they are committed: **green** tokens were drafted and accepted, **bold** ones
    are the target's own. `/help` lists the commands; ctrl-c stops an answer.

    Examples:

    - `paceline chat`
    - `paceline chat --target ./model --method suffix_decoding -t 0.7`
    """
    from paceline.deployments.experience import kept_experience
    from paceline.loading import load_engine
    from paceline.methods import METHODS
    from paceline.tokenizer import chat_template

    params = sampling_params(
        logit_bias=(), stop=(), stop_token_ids=(), temperature=temperature, seed=seed,
        max_tokens=max_tokens,
    )  # fmt: skip
    if target is None and drafter is None and model_to_show() == "smollm2":
        target = "smollm2"
    if method is not None and method not in METHODS:
        raise InvalidArgument("method", method, f"one of {', '.join(sorted(METHODS))}")
    with err.status("loading the models ..."):
        from paceline.demo import TARGET_DIR

        set_threads(threads, target)
        adapters = None if adapter is None else {"adapter": adapter}
        engine = load_engine(target, drafter, dtype=dtype, adapters=adapters)
        chosen = method or "auto"
        template = chat_template(local_model(target) or TARGET_DIR)
    if not template.source:
        err.print(
            "this model has no chat template: it continues the conversation as plain text",
            style="yellow",
        )
    talk = Chat(engine, template, params, chosen, system)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # input() has a history then
        err.print("[dim]/help lists the commands; ctrl-d leaves[/]")
    with kept_experience(engine, talk.config):
        while (line := _read()) is not None:
            text = line.strip()
            try:
                if text.startswith("/"):
                    if not _obey(talk, *text.split(maxsplit=1)):
                        break
                elif text:
                    _show(talk, text)
            except PacelineError as error:
                err.print(str(error), style="red", highlight=False)


def _read() -> str | None:
    """The next line; None at the end of the conversation."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            out.print()
        return None


def _show(talk: Chat, text: str) -> None:
    """Show an answer, which ctrl-c stops, and a line of statistics."""
    answer = talk.answer(text)
    try:
        for pieces in answer:
            for piece in pieces:
                style = ACCEPTED_STYLE if piece.accepted else OWN_STYLE
                out.print(Text(piece.text, style), end="", soft_wrap=True)
            out.file.flush()
        stopped = ""
    except KeyboardInterrupt:
        stopped = " · stopped"
    finally:
        answer.close()
        out.print()
    assert talk.last is not None
    stats = talk.last.stats.as_dict()
    err.print(
        f"{stats['num_tokens']} tokens · {stats['tokens_per_second']:.0f}/s · mean accepted length "
        f"{stats['mean_accepted_length']:.2f} · {talk.config.method}{stopped}",
        style="dim", highlight=False,
    )  # fmt: skip


def _obey(talk: Chat, command: str, argument: str = "") -> bool:
    """Run a command; False if it ends the conversation."""
    if command == "/exit":
        return False
    if command == "/method":
        if argument:
            talk.use(argument)
        err.print(f"method {talk.config.method}", highlight=False)
    elif command == "/stats":
        err.print("no answer yet" if talk.last is None else _table(talk.last.stats.as_dict()))
    elif command in ("/reset", "/system"):
        talk.reset(argument)
        err.print("a new conversation")
    elif command == "/help":
        for name, meaning in COMMANDS.items():
            err.print(f"{name:16} {meaning}", highlight=False, markup=False)
    else:
        names = ", ".join(name.split()[0] for name in COMMANDS)
        raise InvalidArgument("command", command, f"one of {names}")
    return True


def _table(stats: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    for name, value in stats.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return table
