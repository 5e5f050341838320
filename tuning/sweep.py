"""Find the fastest exact configuration on a Ray cluster: `paceline sweep run` as a Ray job.

::

    ray job submit --working-dir . -- python tuning/sweep.py --space tuning/spaces/demo.yaml

This file is only a script: the command is in ``tuning/cli.py``, what it does in
``tuning/stages.py``. Nothing imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, its own folder would come first on the path
    _root = Path(__file__).resolve().parents[1]  # of a checkout, or the installed package
    sys.path[0] = str(_root.parent if (_root / "__init__.py").exists() else _root)

import typer

from paceline.cluster.cli_output import print_error
from paceline.errors import PacelineError
from paceline.tuning.cli import run


def main() -> None:
    """Run `paceline sweep run`; a user's mistake is one line on stderr and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    try:
        app()
    except PacelineError as error:
        print_error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
