"""The templates of the pages, and the numbers in them. The documents' build imports this, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def templates() -> Environment:
    """The pages' templates. They escape everything; ``number`` formats, with a dash for None."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("paceline.bench"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = number
    return environment


def number(value: float | None, form: str) -> str:
    """The value in this format; a dash for None."""
    return "–" if value is None else format(value, form)
