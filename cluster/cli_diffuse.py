"""`paceline diffuse`: a text by a masked-diffusion model, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.cli_generate import read_prompt
from paceline.cluster.cli_options import Json, MaxTokens, Prompt, Seed, Temperature, Threads
from paceline.cluster.cli_output import err, out, print_json, set_threads


def diffuse(
    prompt: Prompt,
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help="static, freedave (the same text in fewer forwards), confidence, prophet, sched, "
            "dparallel, set_block, learn2pd, apd or remask.",
        ),
    ] = "freedave",
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="A knob of the schedule. Repeatable."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a masked model. Default: the demo's."),
    ] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    sub_block_cache: Annotated[
        bool,
        typer.Option(
            "--sub-block-cache", help="Compute only the sub-block in work: cheaper, not the same."
        ),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also print forwards and tokens per forward.")
    ] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a text with a masked-diffusion model: several tokens a forward, block by block.

    Examples:

    - `paceline diffuse 'copy: g p e ->' --schedule freedave --stats`
    - `paceline diffuse 'copy: g p e ->' --schedule confidence --set threshold=0.7 --stats`
    """
    set_threads(threads, model)
    from paceline.demo import DIFFUSION_DIR
    from paceline.diffusion.loop import DiffusionModel
    from paceline.diffusion.schedules import make_schedule, read_knobs

    chosen = make_schedule(schedule, **read_knobs(knobs or (), "set"))
    loaded = DiffusionModel(model or DIFFUSION_DIR)
    denoiser = loaded.denoiser(
        chosen, temperature=temperature, seed=seed, sub_block_cache=sub_block_cache
    )
    ids = loaded.tokenizer.encode(read_prompt(prompt), False)
    written, shown = [], ""
    for block in denoiser.decode(ids, max_tokens):
        written += block
        text = loaded.tokenizer.decode(written)
        if not as_json:
            out.print(text[len(shown) :], end="", markup=False, highlight=False, soft_wrap=True)
        shown = text
    counts = denoiser.counts
    if as_json:
        print_json(
            {
                "text": shown,
                "token_ids": written,
                "schedule": schedule,
                "lossless": chosen.lossless and not sub_block_cache,
                "tokens": counts.tokens,
                "forwards": counts.forwards,
                "states": counts.states,
                "positions": counts.positions,
                "tokens_per_forward": counts.tokens_per_forward,
            }
        )
        return
    out.print()
    if stats:
        err.print(
            f"{counts.tokens} tokens in {counts.forwards} forwards "
            f"({counts.tokens_per_forward:.2f} tokens per forward), {counts.states} states, "
            f"blocks: {counts.blocks}",
            highlight=False,
        )
