"""How the commands speak: tables and colours for people, JSON for programs, one line for errors."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from paceline.errors import InvalidArgument, ModelNotFound, PacelineError

DEBUG_VARIABLE = "PACELINE_DEBUG"

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count

_SMALL_MODEL_BYTES = 100e6

# A pipe or a file has no width of its own; 100 columns keep tables whole.
_width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
out = Console(width=_width)
err = Console(stderr=True, width=_width)


class MissingExtra(PacelineError):
    """A command needs packages that come with an extra."""


def model_to_show() -> str:
    """The model that people meet who name none: ``smollm2``, or ``demo`` where it cannot be had."""
    from paceline.model_names import get_model

    try:
        get_model("smollm2")
    except ModelNotFound as error:
        message = Text(f"the embedded demo pair instead of SmolLM2: {error}", "dim")
        err.print(message, soft_wrap=True)
        return "demo"
    return "smollm2"


def require(extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all ``modules`` can be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this command needs {', '.join(missing)}, not installed here: "
            f"pip install 'paceline[{extra}]'"
        )


def print_json(value: Any) -> None:
    """Write one JSON document and nothing else. NaN is a bug, not a value."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    # Not through rich: a value in the message may look like markup, and lines are not to be cut.
    prefix = "\x1b[1;31merror:\x1b[0m" if err.is_terminal and not err.no_color else "error:"
    sys.stderr.write(f"{prefix} {' '.join(message.split())}\n")


def show_tree(value: object, indent: int = 0) -> None:
    """Print nested mappings and lists as indented `key: value` lines."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)  # type: ignore[arg-type]
    for key, item in pairs:
        nested = isinstance(item, dict | list) and bool(item)
        out.print(
            f"{'  ' * indent}{key}:" + ("" if nested else f" {item}"), markup=False, soft_wrap=True
        )
        if nested:
            show_tree(item, indent + 1)


def local_model(name: str | None) -> Path | None:
    """Where the model of an option lies, downloaded if it has to be; None stays None."""
    from paceline.model_names import resolve_model

    return None if name is None else resolve_model(name)


def pinned_model(name: str | None) -> str | None:
    """The model of an option under a name for other processes and nodes; None stays None."""
    from paceline.model_names import pin_model

    return None if name is None else pin_model(name)


def set_threads(threads: int | None, target: str | Path | None) -> None:
    """Set torch's CPU threads; ``None`` means 1 for a small target (None: the demo's), else all.

    On one forward of a small model threads gain nothing, and lose much when cores are busy.
    """
    import torch

    from paceline.model_names import resolve_model
    from paceline.models import kernels

    if threads is not None and not 1 <= threads <= 1024:
        raise InvalidArgument("threads", threads, "an integer in [1, 1024]")
    if threads is None:
        path = resolve_model(target or "demo")
        files = [path] if path.is_file() else path.glob("*.safetensors")
        weights = sum(file.stat().st_size for file in files)
        if weights > _SMALL_MODEL_BYTES:
            return
    torch.set_num_threads(threads or 1)
    kernels.set_num_threads(threads or 0)  # what was asked for is a limit for prompts, too


class _OneLineErrors:
    """Failures are one line and an exit code, never a traceback.

    Exit codes: 2 for input that cannot be served (as for unknown options), 1 for a failure inside,
    130 after Ctrl-C. ``paceline --debug`` shows tracebacks.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            err.print("interrupted", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The process that read our output has closed the pipe (`paceline methods | head -1`).
            # Python must not try to flush what is left when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except PacelineError as error:
            self._show_traceback()
            print_error(str(error))
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except Exception as error:
            if not self._show_traceback():
                print_error(
                    f"unexpected {type(error).__name__}: {error} "
                    "(this is a bug; `paceline --debug ...` shows where)"
                )
            raise typer.Exit(1) from None

    @staticmethod
    def _show_traceback() -> bool:
        if not os.environ.get(DEBUG_VARIABLE):
            return False
        traceback.print_exc()
        return True


class Command(_OneLineErrors, TyperCommand):
    """A command."""


class CommandGroup(_OneLineErrors, TyperGroup):
    """A command that has commands of its own."""
