"""docs/systems.md says of each published system what is here, and what shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.batching import STRATEGIES
from paceline.diffusion.schedules import SCHEDULES
from paceline.methods import LENGTHS, METHODS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "systems.md").read_text("utf-8")
NUM_SYSTEMS = 72


class System(NamedTuple):
    """A line of the document."""

    name: str
    paper: str
    here: str
    test: str


def lines() -> Iterator[System]:
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4:
            continue
        paper = re.fullmatch(r"\[(\d{4}\.\d{5})\]\(https://arxiv.org/abs/\1\)", cells[-3])
        if paper is not None:
            yield System(cells[0], paper[1], *cells[2:])


SYSTEMS = list(lines())


def test_no_system_is_missing_and_none_is_there_twice() -> None:
    assert len(SYSTEMS) == NUM_SYSTEMS
    assert len({system.paper for system in SYSTEMS}) == NUM_SYSTEMS


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_what_a_line_names_is_there(system: System) -> None:
    if system.here.startswith("*not here*"):
        assert system.test == ""
        assert not any(system.paper in method.paper for method in METHODS.values())
        return
    names = re.findall(r"`([a-z0-9_]+)`", system.here)
    for name in names:
        assert name in METHODS or name in LENGTHS, name
    for name in re.findall(r"batch_strategy: (\w+)", system.here):
        assert name in STRATEGIES
    for name in re.findall(r"--schedule ([a-z0-9_]+)", system.here):
        assert name in SCHEDULES
    for test in system.test.split(", "):
        text = (ROOT / test.strip("`")).read_text("utf-8")
        assert re.search(r"^(async )?def test_", text, re.MULTILINE), test


def test_what_is_not_here_has_its_reason() -> None:
    """In the line, and longer in a paragraph of the page that it links."""
    absent = [system for system in SYSTEMS if system.here.startswith("*not here*")]
    assert absent
    for system in absent:
        found = re.fullmatch(r"\*not here\*: .{20,} \(\[([\w-]+\.md)\]\(\1#[\w-]+\)\)", system.here)
        assert found is not None, system.name
        page = (ROOT / "docs" / found[1]).read_text("utf-8")
        assert f"https://arxiv.org/abs/{system.paper}" in page


def test_methods_of_a_systems_paper_are_in_its_line() -> None:
    for system in SYSTEMS:
        for method in METHODS.values():
            if system.paper in method.paper:
                assert f"`{method.name}`" in system.here, method.name


def test_lengths_are_those_that_exist() -> None:
    (section,) = re.findall(r"## Draft lengths\n(.*?)\n## ", TEXT, re.DOTALL)
    for name in (*re.findall(r"\| `([a-z_]+)` \|", section), *re.findall(r"length=(\w+)", TEXT)):
        assert name in LENGTHS, name
