"""`paceline board`: measure its rows, make its page, and check rows that others add."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from paceline.cluster.cli_options import (
    Device,
    Drafter,
    Dtype,
    Heads,
    MaxTokens,
    MeasuredTarget,
    Numerics,
    Repetitions,
    Seed,
    Temperature,
    Threads,
)
from paceline.cluster.cli_output import (
    EXIT_BAD_INPUT,
    Command,
    CommandGroup,
    err,
    out,
    pinned_model,
    print_error,
    require,
)
from paceline.errors import InvalidArgument

if TYPE_CHECKING:
    from paceline.bench.board_rows import BoardRow

board = typer.Typer(
    cls=CommandGroup,
    help="Measure all methods on a suite, and show them on a page, with those of other machines.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Places = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Folders of rows, or their files.")
]


@board.command("run", cls=Command)
def run(
    folder: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the rows: `MACHINE/TARGET/SUITE/METHOD.json` in it.",
        ),
    ],
    target: MeasuredTarget = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format of the file of `--prompts`, as in `bench`."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of the suite. Default: the built-in prompts."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="`all`, or methods with their knobs, separated by commas."
        ),
    ] = "all",
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Also measure methods that can change the output."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Most prompts of each category.")
    ] = None,
    max_tokens: MaxTokens = 128,
    repetitions: Repetitions = 3,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Ask the prompts as questions, as in `bench`."),
    ] = None,
    drafter: Drafter = None,
    heads: Heads = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = None,
    numerics: Numerics = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Measure on the nodes of this Ray: HOST:PORT or auto. Default: RAY_ADDRESS, which "
            "`ray job submit` sets, else in this machine's own processes.",
        ),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="N",
            help="CPUs that a row reserves on a node of the Ray. Default: all, so that nothing "
            "else runs there meanwhile.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also measure rows that have their files already.")
    ] = False,
) -> None:
    """Measure methods against AR, each in a process of its own, into a file each.

    A row that has its file, with the same settings, is left out: a board that was stopped goes on.
    A method that cannot run gets a file that says why.

    Examples:

    - `paceline board run --out rows --limit 2 --max-tokens 64 --repetitions 2`
    - `paceline board run --model smollm2 --suite spec-bench --prompts question.jsonl --out rows`
    - `ray job submit --working-dir . -- paceline board run --out /shared/rows`
    """
    with err.status("loading torch ..."):
        from paceline.bench import BenchOptions
        from paceline.bench.board import board_methods
        from paceline.bench.suites import read_prompts
        from paceline.cluster.board_job import BoardJob, run_here, run_on_ray

    address = address or os.environ.get("RAY_ADDRESS") or None
    if target == "demo" and drafter is None:  # with its drafter, as without the option
        target = None
    target, drafter = pinned_model(target), pinned_model(drafter)
    options = BenchOptions(
        target=target,
        drafter=drafter,
        heads=heads,
        prompts=prompts,
        suite=suite,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repetitions=repetitions,
        limit=limit,
        peers=False,
        allow_lossy=allow_lossy,
        dtype=dtype or "float32",
        device=device or "auto",
        numerics=numerics or "fastest",
    )
    if prompts is not None:
        read_prompts(prompts, suite or "spec-bench")  # before minutes of measuring
    job = BoardJob(
        options=options,
        methods=tuple(board_methods(methods, allow_lossy=allow_lossy)),
        command=shlex.join(["paceline", *sys.argv[1:]]),
        out=folder,
        threads=threads,
        again=again,
        cpus=cpus,
    )
    measured = failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        def report(row: BoardRow) -> None:
            nonlocal measured, failed
            measured, failed = measured + (row.reason is None), failed + (row.reason is not None)
            err.print(_line(row), markup=False, highlight=False, soft_wrap=True)

        if address is not None:
            require("serve", "ray")
            skipped = run_on_ray(job, address, report, progress)
        else:
            skipped = run_here(job, report, progress)
    out.print(
        f"{folder}: {measured} rows measured, {failed} could not run, {skipped} were there",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if not measured and not skipped:
        raise typer.Exit(1)


def _line(row: BoardRow) -> str:
    if row.reason is not None:
        return f"{row.method}: not measured, {row.reason}"
    overall = next(result for result in row.results if result.category == "all")
    exact = "" if row.exactness is None else (
        f", {row.exactness.num_identical} of {row.exactness.num_prompts} prompts as AR"
    )  # fmt: skip
    return (
        f"{row.method}: {overall.speedup:.2f} x AR, tau {overall.mean_accepted_length:.2f}{exact}"
    )


@board.command("page", cls=Command)
def page(
    rows: Places,
    file: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path(
        "board.html"
    ),
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the numbers as CSV.")
    ] = None,
) -> None:
    """Write one page of the rows of any machines and targets; it needs no network.

    Of two rows of the same method, machine, target and suite the newer one is shown.

    Example: `paceline board page rows other-machine/rows --out board.html --csv board.csv`
    """
    from paceline.bench.board_page import render_board, render_board_csv
    from paceline.bench.board_rows import read_rows

    for name, path in (("out", file), ("csv", csv)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidArgument(name, str(path), "a file in a folder that exists")
    found = read_rows(rows)
    file.write_text(render_board(found), "utf-8")
    if csv is not None:
        csv.write_text(render_board_csv(found), "utf-8")
    out.print(f"{file}: {len(found)} rows", markup=False, highlight=False, soft_wrap=True)


@board.command("check", cls=Command)
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of rows.")],
) -> None:
    """Check rows that are to be added: every field, and that methods are of the catalogue.

    Names each file that is wrong, with the field, its value and what is allowed. Exit code 2 if
    there is one.
    """
    from paceline.bench.board_rows import read_row
    from paceline.methods import METHODS

    wrong = 0
    for file in files:
        try:
            row = read_row(file)
            if row.method.partition(":")[0] not in METHODS:
                raise InvalidArgument(f"{file}: method", row.method, f"one of {', '.join(METHODS)}")
            out.print(f"{file}: a row of {row.method}", markup=False, highlight=False,
                      soft_wrap=True)  # fmt: skip
        except InvalidArgument as error:
            wrong += 1
            print_error(str(error))
    if wrong:
        raise typer.Exit(EXIT_BAD_INPUT)
