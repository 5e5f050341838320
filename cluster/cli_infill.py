"""`paceline infill`: the gaps of a text by an any-subset model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.cli_generate import read_prompt
from paceline.cluster.cli_options import Json, Seed, Temperature, Threads
from paceline.cluster.cli_output import err, out, print_json, set_threads
from paceline.errors import InvalidArgument

ORDERS = ("left", "random")


def infill(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="A text with blanks; - reads standard input.")
    ],
    blank: Annotated[
        str, typer.Option(metavar="C", help="The character that stands for one byte to be written.")
    ] = "_",
    order: Annotated[
        str,
        typer.Option(metavar="NAME", help="Order of the gaps: left (to right), or random by seed."),
    ] = "left",
    draft_tokens: Annotated[
        int,
        typer.Option(
            "--draft-tokens",
            "-k",
            metavar="K",
            help="Most bytes that a forward drafts; 1: each byte takes a forward.",
        ),
    ] = 10,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of an any-subset model. Default: the demo's."),
    ] = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also print bytes, forwards and accepted drafts.")
    ] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Fill the gaps of a short text, several bytes a forward, with the law of one at a time.

    Examples:

    - `paceline infill 'copy: c f a b -> _______' --stats`
    - `paceline infill 'copy: _ f _ b -> c _ a _' --order random --stats`
    """  # fmt: skip
    if order not in ORDERS:
        raise InvalidArgument("order", order, f"one of {', '.join(ORDERS)}")
    set_threads(threads, model)
    from paceline.demo import ANY_SUBSET_DIR
    from paceline.diffusion.any_subset import AnySubsetModel, SeededDice, with_gaps
    from paceline.diffusion.any_subset import infill as fill

    loaded = AnySubsetModel.load(model or ANY_SUBSET_DIR)
    tokens = with_gaps(read_prompt(text), blank, loaded.context_length)
    gaps = [place for place, token in enumerate(tokens) if token is None]
    if order == "random":
        random.Random(seed).shuffle(gaps)
    result = fill(
        loaded, tokens, order=gaps, draft_tokens=draft_tokens, temperature=temperature,
        dice=SeededDice(seed),
    )  # fmt: skip
    whole = bytes(result.token_ids).decode("utf-8", "replace")
    if as_json:
        print_json(
            {
                "text": whole,
                "tokens": result.tokens,
                "forwards": result.forwards,
                "drafted": result.drafted,
                "accepted": result.accepted,
                "tokens_per_forward": result.tokens / result.forwards,
            }
        )
        return
    out.print(whole, markup=False, highlight=False, soft_wrap=True)
    if stats:
        err.print(
            f"{result.tokens} bytes in {result.forwards} forwards, "
            f"{sum(result.accepted)} of {result.drafted} drafted bytes accepted",
            highlight=False,
        )
