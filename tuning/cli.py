"""`paceline sweep`: search for the fastest exact configuration, and show what a sweep found.

`paceline` finds this module through an entry point (pyproject.toml) and imports it for `--help`, so
the commands import the rest of ``paceline.tuning`` themselves.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cluster.cli_options import Json
from paceline.cluster.cli_output import Command, err, out, print_json, require
from paceline.errors import InvalidArgument, PacelineError

if TYPE_CHECKING:
    from paceline.tuning.results import Results

VERIFY_WITHIN = 0.1
"""Largest relative difference between the served speedup and the measured one."""
_SHIPPED = sorted(path.stem for path in (Path(__file__).parent / "spaces").glob("*.yaml"))

sweep = typer.Typer(
    name="sweep",
    add_completion=False,
    help="Search for the fastest exact configuration, and show what a search found.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_command = partial(sweep.command, cls=Command)


def _result_argument(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar,
        help="Folder of a sweep's results: a path, or a URL that fsspec opens (`s3://...`).",
    )


Result = Annotated[str, _result_argument("RESULT")]


@_command()
def run(
    space: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What to search: a YAML file, or one of the spaces that ship: "
            + ", ".join(_SHIPPED),
        ),
    ] = "demo",
    result: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the results, or a URL (`s3://...`). Default: a new one in "
            "`~/paceline/sweeps`.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a sweep that was stopped or killed: the one in `--result`, else the "
            "newest of this space.",
        ),
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key of the file, such as `search.trials=8`. Repeatable.",
        ),
    ] = None,
    check_only: Annotated[
        bool, typer.Option("--check", help="Check the file, show what it holds, and stop.")
    ] = False,
) -> None:
    """Find the fastest exact configuration for a model, a workload and this cluster.

    Runs on the Ray cluster to which it is submitted or that RAY_ADDRESS names, else on a local Ray
    that it starts and stops. Writes `best.yaml`, for `paceline up --config`, and a report.

    Examples:

    - `paceline sweep run --space demo`
    - `paceline sweep run --space my.yaml --set workload.concurrency=8`
    - `ray job submit --working-dir . -- python tuning/sweep.py --space tuning/spaces/demo.yaml`
    """
    require("tune", "ray", "optuna", "plotly")
    from paceline.tuning.space import read_space

    console = Console(width=None if sys.stdout.isatty() else 110)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    checked = read_space(space, change or ())
    num_prompts = len(checked.prompts)
    if check_only:
        methods = dict.fromkeys(point.speculation.method for point in checked.points)
        say(
            f"{checked.source}: {len(checked.points)} points of {', '.join(methods)}; "
            f"{num_prompts} prompts"
        )
        return
    from paceline.tuning.results import Results
    from paceline.tuning.stages import Sweep, result_url

    results = Results(result_url(checked, result, resume))
    say(f"results: {results.url}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from paceline.tuning import drafters, tables

    several = bool(checked.document.search.drafters)
    try:
        if several:
            drafters.run_each(checked, results, console, resume=resume)
        else:
            Sweep(checked, results, console, resume=resume).run()
    except KeyboardInterrupt:
        say("interrupted: the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    (drafters if several else tables).show(results, console)


@_command()
def show(result: Result, as_json: Json = False) -> None:
    """Show what a sweep found: the best trials, AR, and where its files are.

    Works while the sweep runs, too.
    """
    found = _open(result)
    from paceline.tuning import drafters, tables

    if found.manifest().space.get("search", {}).get("drafters"):
        if as_json:
            print_json({"result": found.url, "drafters": drafters.rows(found)})
        else:
            drafters.show(found, out)
    elif as_json:
        print_json(tables.summary(found))
    else:
        tables.show(found, out)


@_command()
def compare(
    a: Annotated[str, _result_argument("A")],
    b: Annotated[str, _result_argument("B")],
    as_json: Json = False,
) -> None:
    """Show what changed from sweep A to sweep B.

    It compares settings, environment, the best configurations, and every point that both measured.
    A point counts as changed if the confidence intervals of its ratios do not overlap.
    """
    before, after = _open(a), _open(b)
    from paceline.tuning import tables

    if as_json:
        print_json(tables.comparison(before, after))
    else:
        tables.compare(before, after, out)


@_command()
def report(result: Result) -> None:
    """Write RESULT/report.html again: one page with all pictures that needs no network."""
    require("tune", "plotly", "jinja2")
    found = _open(result)
    with err.status("drawing ..."):
        from paceline.tuning.report import write_report

        path = write_report(found)
    out.print(path, markup=False, highlight=False, soft_wrap=True)


@_command()
def verify(result: Result, as_json: Json = False) -> None:
    """Serve RESULT/best.yaml on a local Ray and measure its speedup again, over gRPC.

    Exit code 1 if it differs from the sweep's by more than 10 %.
    """
    require("serve", "ray", "grpc")
    found = _open(result)
    from paceline.cluster.local import showing_progress
    from paceline.tuning.verify import verify as serve_and_measure

    with showing_progress(not as_json) as progress:
        answer = serve_and_measure(found, progress)
    if as_json:
        print_json(answer)
    else:
        measured, served = (
            f"{answer[side]['value']:.2f} ({answer[side]['low']:.2f} to {answer[side]['high']:.2f})"
            for side in ("measured", "served")
        )
        out.print(f"{answer['configuration']}", markup=False, highlight=False)
        out.print(f"measured by the sweep  {measured} times AR", highlight=False)
        out.print(f"served over gRPC       {served} times AR", highlight=False)
        out.print(f"difference             {answer['difference']:+.1%}", highlight=False)
    if abs(answer["difference"]) > VERIFY_WITHIN:
        raise typer.Exit(1)


def _open(url: str) -> Results:
    """The result folder at ``url``.

    Raises:
        InvalidArgument: no sweep is there, or nothing installed opens such a URL.
    """
    require("tune", "fsspec", "scipy")
    with err.status("loading torch ..."):
        from paceline.tuning.results import Results

    try:
        results = Results(url)
        results.manifest()
    except PacelineError:
        raise
    except (ValueError, ImportError, OSError) as error:  # of fsspec and the packages that open URLs
        reason = f"a folder that can be read ({error})"
        raise InvalidArgument("result", url, reason) from None
    return results
