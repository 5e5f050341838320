"""`paceline train KIND`: train draft models, early exits, draft heads and length controllers."""

from __future__ import annotations

import inspect
import shlex
import typing
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from paceline.cluster.cli_options import (
    Device,
    Drafter,
    Json,
    RayAddress,
    Target,
    Threads,
    model_option,
)
from paceline.cluster.cli_output import (
    Command,
    err,
    out,
    pinned_model,
    print_json,
    require,
    set_threads,
    show_tree,
)


class Kinds(TyperGroup):
    """The commands below, and one for each kind of draft head; their list needs torch."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        from paceline.models.heads import HEADS

        return [*super().list_commands(ctx), *HEADS]  # type: ignore[arg-type]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        found = super().get_command(ctx, cmd_name)  # type: ignore[arg-type]
        if found is None:
            from paceline.models.heads import HEADS

            if cmd_name in HEADS:
                found = _head_command(cmd_name)
        return found


train = typer.Typer(
    cls=Kinds,
    help="Train draft models, early exits, draft heads and length controllers.",
    epilog="An interrupted training goes on when the same command is run again.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_command = partial(train.command, cls=Command)

Student = Annotated[
    str | None,
    model_option(
        "Draft model to start from: a folder or a name. A folder with nothing but a config.json "
        "gives random weights. Default: the demo's drafter with the demo target, else the target's "
        "first layers."
    ),
]
Layers = Annotated[
    int,
    typer.Option(metavar="N", help="Layers that a drafter takes from the target."),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh", help="With the demo target: start from its layers, not from the demo's drafter."
    ),
]
Divergence = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Loss: forward_kl, reverse_kl, jsd, tvd, tvdpp, or ce, which fine-tunes on the text.",
    ),
]
DataSource = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Text to train on: corpus, target (the target writes it), on_policy (the drafter "
        "writes it), or mixed (the drafter writes the share `--mix` of the rows).",
    ),
]
Mix = Annotated[
    float, typer.Option(metavar="SHARE", help="With `--data-source mixed`: the drafter's share.")
]
TrainSeed = Annotated[int, typer.Option(metavar="S", help="Equal seeds give equal weights.")]
Beta = Annotated[float, typer.Option(metavar="B", help="With `jsd`: weight of the target.")]


def _shared(
    target: Target = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text: .txt, or .jsonl with `text`, `prompt` and `completion`, or conversations "
            "(`messages`, or ShareGPT's `conversations`). Repeatable. Default: the demo corpus.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Write conversations, and prompts with their completions, with the target's chat "
            "template; only what the assistant writes has a loss. Default: conversations only.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the result. Default: trained/KIND."),
    ] = None,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in each row of text.")] = 256,
    held_out_rows: Annotated[
        int, typer.Option(metavar="N", help="Rows of held-out text for measurements.")
    ] = 32,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 500,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", "-b", metavar="N", help="Rows in each step, over all workers."
        ),
    ] = 8,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--lr", metavar="X", help="Learning rate after the warm-up; it then falls as a cosine."
        ),
    ] = 2e-4,
    warmup: Annotated[int, typer.Option(metavar="N", help="Steps of warm-up.")] = 20,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Weight decay of AdamW.")] = 0.01,
    clip: Annotated[float, typer.Option(metavar="X", help="Largest gradient norm.")] = 1.0,
    seed: TrainSeed = 0,
    eval_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between measurements on held-out text.")
    ] = 50,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Stop after N measurements without a better acceptance, and keep the best "
            "weights. Default: run all steps and keep the last weights.",
        ),
    ] = None,
    checkpoint_steps: Annotated[
        int, typer.Option(metavar="N", help="Most steps between checkpoints.")
    ] = 200,
    checkpoint_seconds: Annotated[
        float, typer.Option(metavar="S", help="Seconds between checkpoints, roughly.")
    ] = 60.0,
    device: Device = "auto",
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Compute in bfloat16; the weights stay in float32.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads. Default: what torch chooses.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Train on Ray with N workers (Ray Train, gloo)."),
    ] = None,
    address: RayAddress = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """The options of all kinds that train on text."""
    return locals()


def _kind(
    name: str, app: typer.Typer = train, **defaults: Any
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Turn a function that returns a kind's own knobs into a command.

    The command has the options of the function and those of :func:`_shared`. Typer reads them from
    a signature that is put together here, so that each option is written down once.

    Args:
        defaults: this kind's defaults of shared options, where they differ.
    """

    def wrap(own: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
            hints = typing.get_type_hints(function, include_extras=True)
            signature = inspect.signature(function).parameters
            return {n: p.replace(annotation=hints[n]) for n, p in signature.items()}

        ours, shared = parameters(own), parameters(_shared)

        @wraps(own)
        def command(**given: Any) -> None:
            knobs = own(**{name: given[name] for name in ours})
            _run(name, knobs, {name: given[name] for name in shared})

        both = [p.replace(default=defaults.get(n, p.default)) for n, p in shared.items()]
        both += ours.values()
        ordered = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in both]
        command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in ordered}
        return app.command(name, cls=Command)(command)

    return wrap


def _run(kind: str, knobs: dict[str, Any], shared: dict[str, Any]) -> None:
    workers, address = shared.pop("workers"), shared.pop("address")
    as_json, threads = shared.pop("as_json"), shared.pop("threads")
    if workers is not None:
        require("train", "ray", "pyarrow", "pandas")
    with err.status("loading torch ..."):
        from paceline.cluster import train_job
        from paceline.errors import InvalidArgument
        from paceline.train.trainer import TrainOptions

    if workers is not None and not 1 <= workers <= 1024:
        raise InvalidArgument("workers", workers, "1 to 1024")
    if address is not None and workers is None:
        raise InvalidArgument("address", address, "only with --workers")
    if threads is not None:
        set_threads(threads, None)
    text = {name: shared.pop(name) for name in ("target", "length", "held_out_rows", "chat")}
    given = text["target"]
    text["target"] = pinned_model(given)
    if "drafter" in knobs:
        knobs["drafter"] = pinned_model(knobs["drafter"])
    text["data"] = shared.pop("data") or []
    folder = shared.pop("folder") or Path("trained") / kind
    job = train_job.TrainJob(
        kind=kind,
        knobs=train_job.absolute({**text, **knobs}),
        options=TrainOptions(out=folder, **shared),
    )
    if workers is None:
        result = train_job.train_here(job)
    else:
        result = train_job.train_on_ray(job, workers, address)
    if as_json:
        print_json(result)
    else:
        _show(kind, result, given)


def _show(kind: str, result: dict[str, Any], target: str | None) -> None:
    """Show the measurements before and after, where the result is, and how to use it."""
    table = Table("held out", box=None, header_style="bold", pad_edge=False)
    for title in ("before", "after"):
        table.add_column(title, justify="right")
    for name, value in result["after"].items():
        table.add_row(name, f"{result['before'][name]:.4f}", f"{value:.4f}")
    out.print(table)
    folder = Path(result["out"])
    early = ", no better since then" if result["stopped_early"] else ""
    lines = [
        f"steps: {result['steps']}, kept_step: {result['kept_step']}{early}",
        f"out: {folder}",
        f"plot: {result['plot']}",
    ]
    use = _use(kind, folder, target)
    if use:
        lines.append(f"use: paceline generate 'def add(a, b):' {use}")
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _use(kind: str, folder: Path, target: str | None) -> str | None:
    """Options of `paceline generate` that use the result; None if it has none."""
    chosen = f"--target {shlex.quote(target)} " if target else ""
    place = shlex.quote(str(folder))
    if kind == "exits":
        return f"--target {place} --method layer_skip"
    if kind == "sorted":
        return f"{chosen}--drafter {place} --method s2d"
    if kind in ("distill", "align"):
        return f"{chosen}--drafter {place}"
    if folder.name == kind:  # as a library of heads has it
        return f"{chosen}--method {kind} --heads {shlex.quote(str(folder.parent))}"
    return None


@_kind("exits")
def exits(
    exits: Annotated[
        list[int] | None,
        typer.Option(
            "--exit",
            metavar="LAYER",
            help="Exit layer to measure. Repeatable. Default: a quarter, a third and half of the "
            "layers.",
        ),
    ] = None,
    layer_dropout: Annotated[
        float, typer.Option(metavar="P", help="Probability of leaving out the last layer.")
    ] = 0.1,
    exit_scale: Annotated[
        float, typer.Option(metavar="X", help="Weight of the losses at exits.")
    ] = 0.2,
    curriculum: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Exits that learn in a step: rotational, gradual or all."
        ),
    ] = "rotational",
    period: Annotated[
        int, typer.Option(metavar="N", help="With rotational: one exit in N learns in a step.")
    ] = 4,
) -> dict[str, Any]:
    """Teach a Llama-type model to predict from its early layers (LayerSkip).

    It trains with layer dropout and losses at early exits. The result is a model folder for
    `--method layer_skip` and the other methods with early exits.

    Examples:

    - `paceline train exits --target ./model --data text.jsonl --out ./model-exits`
    - `paceline train exits --steps 200 --workers 2`
    """
    return {
        "exits": exits or [],
        "layer_dropout": layer_dropout,
        "exit_scale": exit_scale,
        "curriculum": curriculum,
        "period": period,
    }


@_kind("distill")
def distill(
    drafter: Student = None,
    layers: Layers = 2,
    fresh: Fresh = False,
    divergence: Divergence = "forward_kl",
    data_source: DataSource = "corpus",
    mix: Mix = 0.5,
    beta: Beta = 0.5,
) -> dict[str, Any]:
    """Distil a target into a draft model (DistillSpec).

    Examples:

    - `paceline train distill --target ./big --drafter ./small --data text.jsonl --out ./better`
    - `paceline train distill --divergence tvd --data-source mixed --patience 3`
    """
    return locals()


@_kind("align")
def align(
    drafter: Student = None,
    layers: Layers = 2,
    fresh: Fresh = False,
    divergence: Divergence = "tvdpp",
    data_source: DataSource = "target",
    mix: Mix = 0.5,
    beta: Beta = 0.5,
) -> dict[str, Any]:
    """Align a draft model with text that its target writes, by TVD++ (direct alignment).

    The target continues the first quarter of each row. The drafter learns on that text with the
    policy gradient of the total variation distance, with a normalised reward.
    """
    return locals()


@_kind("sorted")
def nested(
    exits: Annotated[
        list[int] | None,
        typer.Option(
            "--exit", metavar="LAYER", help="Layers of a nested model. Repeatable. Default: 1."
        ),
    ] = None,
    drafter: Student = None,
    layers: Layers = 2,
    fresh: Fresh = False,
    divergence: Divergence = "ce",
    data_source: DataSource = "corpus",
    mix: Mix = 0.5,
    beta: Beta = 0.5,
) -> dict[str, Any]:
    """Train a draft model whose first layers are draft models themselves (SoFT, for S2D)."""
    return {**locals(), "exits": exits or [1]}


def _head_command(kind: str) -> Any:
    """`paceline train KIND` for a draft head."""
    import json
    import sys
    from dataclasses import fields

    from paceline.models.heads import HEADS

    options = fields(HEADS[kind].Options)
    names = ", ".join(f"{field.name} ({json.dumps(field.default)})" for field in options)

    def own(
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="NAME=VALUE", help="An option of the head, see above. Repeatable."
            ),
        ] = None,
        data_source: Annotated[
            str,
            typer.Option(
                metavar="NAME",
                help="Text to train on: corpus, or target, which continues the first quarter of "
                "each row, greedily and at temperature 1.",
            ),
        ] = "corpus",
        start: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR",
                help="Another head of this target, of any kind: begin with its weights wherever "
                "name and shape are equal.",
            ),
        ] = None,
        int8: Annotated[
            bool,
            typer.Option("--int8", help="Save matrices in eight bits: half the size."),
        ] = False,
    ) -> dict[str, Any]:
        from paceline.errors import InvalidArgument

        given = {}
        for item in settings or []:
            name, separator, value = item.partition("=")
            if not separator:
                raise InvalidArgument("set", item, "NAME=VALUE")
            given[name] = value
        return {"options": given, "data_source": data_source, "start": start, "int8": int8}

    paper = (sys.modules[HEADS[kind].__module__].__doc__ or kind).splitlines()[0]
    own.__doc__ = f"""Train a head that drafts from the target's states. {paper}

    An engine finds the head in its folder of heads, by default `heads` in the target's folder.

    Options of the head, with their defaults: {names}.

    Example:

    - `paceline train {kind} --target ./model --data text.jsonl --out ./model/heads/{kind}`
    """
    app = typer.Typer(rich_markup_mode="markdown")
    _kind(kind, app, learning_rate=3e-3)(own)
    return typer.main.get_command(app)


TextFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text, as for `distill`. Default: the demo corpus."),
]
HeadFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Folder for the result. Default: `heads` in the target's."
    ),
]
NumPrompts = Annotated[int, typer.Option(metavar="N", help="Prompts to train on.")]
PromptTokens = Annotated[
    int, typer.Option(metavar="N", help="Tokens that the target writes for each prompt.")
]


@_command("length-head")
def length_head(
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="Length controller: specdecpp, disco, ldlp or all.")
    ] = "all",
    target: Target = None,
    drafter: Drafter = None,
    folder: HeadFolder = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Train ldlp for a draft head of this kind, into its folder, or with omnidraft "
            "specdecpp for a drafter with tokens of its own; default: for the draft model.",
        ),
    ] = None,
    prompts: NumPrompts = 160,
    max_tokens: PromptTokens = 128,
    draft_cost: Annotated[
        float,
        typer.Option(
            metavar="C",
            help="Cost of drafting and verifying one more token, in verifications; decides "
            "thresholds.",
        ),
    ] = 0.1,
    seed: TrainSeed = 0,
    as_json: Json = False,
) -> None:
    """Train the length controllers that learn, on text that the target writes; takes a minute."""
    with err.status("loading torch ..."):
        from paceline.loading import load_engine
        from paceline.train import length_heads

    set_threads(None, target)
    engine = load_engine(target, drafter, translate=head == "omnidraft")
    out_folder = folder or engine.length_context.heads
    assert out_folder is not None
    result = length_heads.train_length_head(
        engine,
        kind,
        out_folder,
        length_heads.training_prompts(engine, prompts),
        head=head,
        num_tokens=max_tokens,
        draft_cost=draft_cost,
        seed=seed,
    )
    if as_json:
        print_json(result)
    else:
        show_tree(result)


@_command("judge")
def judge(
    target: Target = None,
    drafter: Drafter = None,
    folder: HeadFolder = None,
    prompts: NumPrompts = 160,
    max_tokens: PromptTokens = 128,
    seed: TrainSeed = 0,
    as_json: Json = False,
) -> None:
    """Train the judge of `--method judge_decoding`; takes two minutes.

    The labels come from the target: another token of the draft model's is right if the target
    still finds what its own text says next as likely.

    Example:

    - `paceline train judge --target ./model --drafter ./small`
    """
    with err.status("loading torch ..."):
        from paceline.loading import load_engine
        from paceline.train.judge import train_judge
        from paceline.train.length_heads import training_prompts

    set_threads(None, target)
    engine = load_engine(target, drafter)
    out_folder = folder or engine.length_context.heads
    assert out_folder is not None
    result = train_judge(
        engine, out_folder, training_prompts(engine, prompts), num_tokens=max_tokens, seed=seed
    )
    if as_json:
        print_json(result)
    else:
        show_tree(result)


@_command("words")
def words(
    target: Target = None,
    data: TextFiles = None,
    folder: HeadFolder = None,
    count: Annotated[int, typer.Option(metavar="N", help="Words, at most.")] = 1024,
    rows: Annotated[
        int, typer.Option(metavar="N", help="Rows of 128 tokens that the target reads.")
    ] = 800,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 1500,
    seed: TrainSeed = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train the output layer of whole words for `paceline together words` (MuMo).

    The words are those of the text that the target's tokenizer cuts into several tokens. The target
    does not change.

    Example:

    - `paceline train words --target ./model --data text.jsonl`
    """
    with err.status("loading torch ..."):
        from paceline.demo import TARGET_DIR, WORDS_FILE
        from paceline.loading import load_runner
        from paceline.model_names import resolve_model
        from paceline.models.llama import LlamaRunner
        from paceline.train.data import load_text
        from paceline.train.words import train_words

    from paceline.errors import InvalidArgument

    set_threads(threads, target)
    place = resolve_model(target or "demo")
    runner = load_runner(place)
    if not isinstance(runner, LlamaRunner):
        raise InvalidArgument("target", target, "a model on the fast path (Llama, Mistral, Qwen)")
    out_folder = folder or (WORDS_FILE.parent if place == TARGET_DIR else place / "heads")
    result = train_words(
        runner, place, load_text(place, data or [], 128, 64), out_folder,
        count=count, num_rows=rows, steps=steps, seed=seed,
    )  # fmt: skip
    if as_json:
        print_json(result)
    else:
        show_tree(result)


Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="LAYERSxWIDTH",
        help="Layers of a drafter and width of their MLPs. Repeatable.",
    ),
]


@_command("scaling")
def scaling(
    target: Target = None,
    data: TextFiles = None,
    size: Sizes = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Tokens that a drafter is trained on. Repeatable."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder of drafters and points.json.")
    ] = Path("trained/scaling"),
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in each row of text.")] = 128,
    held_out_rows: Annotated[
        int, typer.Option(metavar="N", help="Rows that the target goes on from, to measure on.")
    ] = 32,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", metavar="N", help="Rows in each step.")
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option("--lr", metavar="X", help="Learning rate after the warm-up.")
    ] = 3e-3,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Compute in bfloat16; the weights stay in float32.")
    ] = False,
    seed: TrainSeed = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train small drafters of several sizes on several numbers of tokens (Scylla's grid).

    `paceline train plan` fits the scaling laws to the points. The defaults take some minutes.

    Example:

    - `paceline train scaling --target ./model --data text.jsonl --out ./grid`
    """
    with err.status("loading torch ..."):
        from paceline.model_names import resolve_model
        from paceline.train.data import load_text
        from paceline.train.drafter_grid import SIZES, TOKENS, train_grid
        from paceline.train.drafter_law import DrafterPoint, DrafterSize

    set_threads(threads, target)
    place = resolve_model(target or "demo")
    sizes = [DrafterSize.parse(each) for each in size or SIZES]

    def show(point: DrafterPoint) -> None:
        err.print(
            f"{point.size}: {point.params} parameters, {point.tokens} tokens, acceptance "
            f"{point.acceptance:.3f}, agreement {point.agreement:.3f}, {point.core_seconds:.0f} s"
        )

    found = train_grid(
        place, load_text(place, data or [], length, held_out_rows), sizes, tokens or TOKENS, folder,
        batch_size=batch_size, learning_rate=learning_rate, seed=seed, bfloat16=bfloat16,
        on_point=show,
    )  # fmt: skip
    if as_json:
        print_json({"file": str(folder / "points.json"), "points": len(found.points)})
    else:
        out.print(f"points: {folder / 'points.json'}", markup=False, soft_wrap=True)


@_command("plan")
def plan(
    points: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Points of `paceline train scaling`. Default: those of the demo target that come "
            "with Paceline.",
        ),
    ] = None,
    target: Target = None,
    budget_s: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="Seconds of a core, of the kind that the points were trained on, for a training.",
        ),
    ] = 600.0,
    from_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Fit to drafters that saw at least N tokens. Default: all."),
    ] = 0,
    batch: Annotated[int, typer.Option(metavar="N", help="Sessions that decode together.")] = 1,
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Plan for temperature 0; otherwise for temperature 1."),
    ] = False,
    size: Sizes = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw points, law and speeds here.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Fit the scaling laws to trained drafters, and say which one to train (Scylla).

    What target and drafters cost is measured here, with random weights; acceptance comes from the
    law. Training none is always a choice.

    Examples:

    - `paceline train plan --budget-s 60`
    - `paceline train plan --points ./grid/points.json --target ./model --batch 8 --size 2x1024`
    """
    with err.status("loading torch ..."):
        from paceline.cluster import cli_plan

    set_threads(threads, target)
    made = cli_plan.run(
        points, target, size or [],
        core_seconds=budget_s, batch=batch, from_tokens=from_tokens,
        measure="agreement" if greedy else "acceptance", plot_file=plot,
    )  # fmt: skip
    if as_json:
        print_json(cli_plan.as_json(made))
    else:
        cli_plan.show(made)
