"""`paceline export`: write a trained head in a format that other engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.cli_options import Json, Target
from paceline.cluster.cli_output import err, out, pinned_model, print_json


def export(
    head: Annotated[
        Path, typer.Argument(metavar="HEAD", help="Folder of a head, as `paceline train` writes.")
    ],
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the result.")],
    target: Target = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the result calls the target, for the engine that loads it: a name of the "
            "hub or a folder. Default: where the target is here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a trained head in the format of `speculators`, which vLLM and SGLang load.

    The weights stay what they are, in bfloat16. The heads `dflash`, `dflash2`, `dspark`, `xpress`,
    `peagle`, `mtp` (of a Qwen3) and, trained with `--set published=true`, `eagle3` have that
    format; Paceline loads it, too.

    Examples:

    - `paceline export trained/dspark --target ./model --out ./model-dspark`
    - `paceline export heads/peagle --target Qwen/Qwen3-0.6B --verifier Qwen/Qwen3-0.6B --out p`
    """
    with err.status("loading torch ..."):
        from paceline.model_names import parse_hub_name, resolve_model
        from paceline.models.heads import load_any_head
        from paceline.models.heads.base import HeadTarget
        from paceline.models.heads.export import export_head

    name = pinned_model(target) or "demo"
    place = resolve_model(name)
    hub = parse_hub_name(name) if name.startswith("hf:") else None
    verifier = verifier or (str(place.resolve()) if hub is None else hub.repo)
    loaded = load_any_head(head, HeadTarget.from_folder(place))
    export_head(loaded, folder, verifier)
    result = {"kind": loaded.kind, "out": str(folder), "verifier": verifier}
    if as_json:
        print_json(result)
    else:
        for key, value in result.items():
            out.print(f"{key}: {value}", markup=False, highlight=False, soft_wrap=True)
