"""Each public class has a name of its own, so that a name says which one is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("paceline", "rpc", "deployments", "cluster", "tuning")


def test_no_public_class_name_is_defined_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            relative = file.relative_to(ROOT)
            # The package shows the other folders through links; protoc chooses its own names.
            if (
                relative.parts[:2] in {("paceline", name) for name in FOLDERS}
                or "gen" in relative.parts
            ):
                continue
            for node in ast.parse(file.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(relative))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
