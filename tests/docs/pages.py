"""The fenced blocks of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"(?P<fence>`{3,}|~{3,})(?P<language>[\w-]*)\s*$")
_MARK = re.compile(r"<!-- run: (?P<mark>.+?) -->\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the repository.
        line: of the opening fence, from 1.
        language: after the opening fence; empty without one.
        text: what is between the fences.
        mark: of a comment ``<!-- run: MARK -->`` on the line before; empty without one.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order; blocks inside of lists count, too."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    opened: re.Match[str] | None = None
    begun, mark = 0, ""
    for number, line in enumerate(lines, start=1):
        found = _FENCE.match(line.strip())
        if opened is None:
            if found is not None:
                opened, begun = found, number
                before = _MARK.match(lines[number - 2].strip()) if number > 1 else None
                mark = before["mark"] if before else ""
        elif found is not None and found["fence"] == opened["fence"] and not found["language"]:
            text = "".join(f"{each}\n" for each in lines[begun : number - 1])
            yield Block(page, begun, opened["language"], text, mark)
            opened = None
    assert opened is None, f"{page}:{begun}: the block has no end"
