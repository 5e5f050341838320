"""`paceline sweep`: what a sweep found.

`paceline` finds this module through an entry point (pyproject.toml): it imports nothing of tuning.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_output import Command, Json, err, out, print_json, require
from paceline.errors import InvalidArgument, PacelineError

if TYPE_CHECKING:
    from tuning.results import Results

sweep = typer.Typer(
    name="sweep",
    add_completion=False,
    help="Search the fastest exact configuration, and read what a search found.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_command = partial(sweep.command, cls=Command)

Result = Annotated[
    str,
    typer.Argument(
        metavar="RESULT",
        help="Folder that a sweep wrote: a path, or a URL that fsspec opens (`s3://...`).",
    ),
]


@_command()
def show(result: Result, as_json: Json = False) -> None:
    """Show what a sweep found: the best trials, AR, and where the files lie.

    Works while the sweep runs, too.
    """
    found = _open(result)
    from tuning import tables

    if as_json:
        print_json(tables.summary(found))
    else:
        tables.show(found, out)


@_command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder that a sweep wrote, or its URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show what changed from sweep A to sweep B.

    Settings, environment, the best configurations, and every point that both measured. A point
    counts as changed where the confidence intervals of its ratios do not overlap.
    """
    before, after = _open(a), _open(b)
    from tuning import tables

    if as_json:
        print_json(tables.comparison(before, after))
    else:
        tables.compare(before, after, out)


@_command()
def report(result: Result) -> None:
    """Write RESULT/report.html anew: one page with all pictures, which needs no network."""
    require("tune", "plotly", "jinja2")
    found = _open(result)
    with err.status("drawing ..."):
        from tuning.report import write_report

        path = write_report(found)
    out.print(path, markup=False, highlight=False, soft_wrap=True)


def _open(url: str) -> Results:
    """The result folder at ``url``.

    Raises:
        InvalidArgument: there is no sweep, or nothing that can open such a URL.
    """
    require("tune", "fsspec", "scipy")
    with err.status("loading torch ..."):
        from tuning.results import Results

    try:
        results = Results(url)
        results.manifest()
    except PacelineError:
        raise
    except (ValueError, ImportError, OSError) as error:  # of fsspec and what it opens URLs with
        reason = f"a folder that can be read ({error})"
        raise InvalidArgument("result", url, reason) from None
    return results
