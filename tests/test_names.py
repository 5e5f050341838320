"""Each public class has a name of its own, and no class or central file is too long to read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("paceline", "rpc", "deployments", "cluster", "tuning")
MOST_LINES = 300
"""Of a class."""


def classes(*folders: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes at the top of each file, and the file."""
    for folder in folders:
        yield from _classes(folder)


@cache
def _classes(folder: str) -> list[tuple[str, ast.ClassDef]]:
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        relative = file.relative_to(ROOT)
        # The package shows the other folders through links; protoc chooses its own names.
        if (
            relative.parts[:2] in {("paceline", name) for name in FOLDERS}
            or "gen" in relative.parts
        ):
            continue
        nodes = ast.parse(file.read_text("utf-8")).body
        found += [(str(relative), node) for node in nodes if isinstance(node, ast.ClassDef)]
    return found


@pytest.mark.slow
def test_no_public_class_name_is_defined_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file, node in classes(*FOLDERS):
        if not node.name.startswith("_"):
            places[node.name].append(file)
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_class_is_too_long() -> None:
    found = {
        f"{file} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file, node in classes("paceline", "rpc", "deployments")
    }
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize(("file", "most"), [("loop.py", 150), ("engine.py", 300)])
def test_the_loop_and_the_engine_can_be_read_at_once(file: str, most: int) -> None:
    assert len((ROOT / "paceline" / "engine" / file).read_text("utf-8").splitlines()) <= most
