"""Output of the commands: tables and colours for people, JSON for programs, errors in one line."""

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

# A pipe or a file has no width: with 100 columns, tables fit.
_width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
out = Console(width=_width)
err = Console(stderr=True, width=_width)


class MissingExtra(PacelineError):
    """A command needs packages of an extra that is not installed."""


def model_to_show() -> str:
    """The default model: ``smollm2``, or ``demo`` if that cannot be downloaded."""
    from paceline.model_names import get_model

    try:
        get_model("smollm2")
    except ModelNotFound as error:
        message = Text(f"the embedded demo pair instead of SmolLM2: {error}", "dim")
        err.print(message, soft_wrap=True)
        return "demo"
    return "smollm2"


def require(extra: str, *modules: str) -> None:
    """Raise MissingExtra unless all ``modules`` are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this command needs {', '.join(missing)}, not installed here: "
            f"pip install 'paceline[{extra}]'"
        )


def print_json(value: Any) -> None:
    """Write one JSON document to standard output; NaN raises ValueError, because it is a bug."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    # Without rich: a value in the message may look like markup, and rich would wrap the line.
    prefix = "\x1b[1;31merror:\x1b[0m" if err.is_terminal and not err.no_color else "error:"
    sys.stderr.write(f"{prefix} {' '.join(message.split())}\n")


def show_tree(value: object, indent: int = 0) -> None:
    """Print nested mappings and lists as indented lines `key: value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)  # type: ignore[arg-type]
    for key, item in pairs:
        nested = isinstance(item, dict | list) and bool(item)
        out.print(
            f"{'  ' * indent}{key}:" + ("" if nested else f" {item}"), markup=False, soft_wrap=True
        )
        if nested:
            show_tree(item, indent + 1)


def local_model(name: str | None) -> Path | None:
    """The path of the model that an option names, downloaded if needed; None stays None."""
    from paceline.model_names import resolve_model

    return None if name is None else resolve_model(name)


def pinned_model(name: str | None) -> str | None:
    """A name of an option's model that other processes and nodes know; None stays None."""
    from paceline.model_names import pin_model

    return None if name is None else pin_model(name)


def set_threads(threads: int | None, target: str | Path | None) -> None:
    """Set the CPU threads of torch and the kernels.

    On one forward of a small model more threads gain nothing, and lose much while cores are busy.

    Args:
        threads: None: 1 for a small target, else what torch chooses.
        target: folder, file or name of the target; None: the demo's.

    Raises:
        InvalidArgument: ``threads`` is not in [1, 1024].
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
    kernels.set_num_threads(threads or 0)  # a given number also limits the threads for prompts


_UsageError: Any = typer.BadParameter.__base__
"""An unknown command or option; typer exports no name for it, and shows it with the usage."""


class _OneLineErrors:
    """Shows a failure as one line and an exit code, without a traceback.

    Exit codes: 2 for wrong input (as for unknown options), 1 for an internal failure, 130 after
    Ctrl-C. ``paceline --debug`` shows tracebacks.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (typer.Exit, typer.Abort, _UsageError):
            raise
        except KeyboardInterrupt:
            err.print("interrupted", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has closed the pipe (`paceline methods | head -1`).
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
    """A command that shows failures in one line."""


class CommandGroup(_OneLineErrors, TyperGroup):
    """A command with commands of its own that show failures in one line."""
