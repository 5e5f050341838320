"""Running commands in this process.

Import ``CliRunner`` from here: Typer's builds the commands of an app anew whenever one is run,
which takes longer than most of them.
"""

from __future__ import annotations

from functools import cache

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result"]

vars(typer.testing)["_get_command"] = cache(get_command)
