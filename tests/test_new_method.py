"""A new paper with a new knob and a new shape is one file and one entry of the catalogue.

The test adds such a paper to a copy of the sources, and uses it there as any other method is used:
in the library, on the command line, over gRPC, in the documents, the chart's schema and a sweep.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

SHAPE = '''
"""A comb: a chain whose nodes have leaves beside them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.knobs import Knob
from paceline.shapes.base import ALL_DRAWS, ShapePart, TreeBuilder, grow

TEETH = Knob[int](
    "teeth", int, 1, "Leaves beside each node of a comb.", ge=0, le=8, search=(1, 2, 3)
)


@dataclass(frozen=True, slots=True)
class Comb:
    teeth: int

    @property
    def draws(self):
        return ALL_DRAWS

    def build(self, expander, sessions, budgets):
        def step(tree, frontier, level, row):
            return tree.add_children(frontier[0], level, row, 1 + self.teeth)[:1]

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: 1 + self.teeth)
        return [tree.draft() for tree in trees]


COMB = ShapePart(
    make=lambda knobs: Comb(knobs[TEETH]),
    nodes=lambda knobs, depth: depth * (1 + knobs[TEETH]),
    knobs=(TEETH,),
)
'''
ENTRY = {
    "from paceline.shapes.confidence import BEST_FIRST": "from paceline.shapes.comb import COMB\n",
    '    "kary": KARY,\n': '    "comb": COMB,\n',
    '        Method(\n            name="pearl",': (
        '        Method(name="comb", paper="arXiv 0000.00000", summary="Drafts combs.",\n'
        '               drafter="draft_model", shape="comb", acceptance="coupled",\n'
        '               length="fixed", defaults={"num_speculative_tokens": 4, "teeth": 2}),\n'
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the new method; large files are linked."""
    root = tmp_path_factory.mktemp("copy")

    def copy_or_link(source: str, target: str) -> None:
        if os.path.getsize(source) > 1 << 20:
            os.symlink(source, target)
        else:
            shutil.copyfile(source, target)

    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.egg-info")
    for folder in ("paceline", "rpc", "deployments", "cluster", "tuning", "helm", "k8s"):
        shutil.copytree(
            ROOT / folder, root / folder, symlinks=True, ignore=ignored,
            copy_function=copy_or_link,
        )  # fmt: skip
    (root / "docs").mkdir()
    (root / "paceline" / "shapes" / "comb.py").write_text(SHAPE.lstrip())
    catalogue = root / "paceline" / "methods.py"
    text = catalogue.read_text()
    for place, added in ENTRY.items():
        assert text.count(place) == 1
        text = text.replace(place, added + place)
    catalogue.write_text(text)
    return root


def run(copy: Path, *command: str, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_its_tokens_are_those_of_ar_and_its_drafts_are_combs(copy: Path) -> None:
    said = run(copy, "-c", """
import json
from paceline.config import SpeculationConfig
from paceline.loading import load_engine
from paceline.plan import resolve
from paceline.sampling import SamplingParams

engine = load_engine()
params, comb = SamplingParams(max_tokens=32), SpeculationConfig(method="comb")
(ar,) = engine.generate([[40, 7, 19, 3]], params, SpeculationConfig(method="ar"))
(session,) = engine.generate([[40, 7, 19, 3]], params, comb)
print(json.dumps({
    "same": session.output_ids == ar.output_ids, "drafted": session.stats.num_drafted,
    "budget": resolve(comb).config.node_budget,
}))
""")  # fmt: skip
    result = json.loads(said.strip().splitlines()[-1])
    assert result["same"]
    assert result["drafted"] > 0
    assert result["budget"] == 4 * (1 + 2)


def test_the_command_line_knows_it(copy: Path) -> None:
    said = run(
        copy, "-m", "paceline.cluster.cli", "generate", "x = 1", "--method", "comb", "--set",
        "teeth=3", "--max-tokens", "8",
    )  # fmt: skip
    assert "method comb" in said
    said = run(
        copy, "-m", "paceline.cluster.cli", "generate", "x = 1", "--method", "comb", "--set",
        "teeth=9", fails=True,
    )  # fmt: skip
    assert "teeth" in said
    assert "8" in said
    said = run(
        copy, "-m", "paceline.cluster.cli", "generate", "x = 1", "--method", "draft_model",
        "--set", "teeth=3", fails=True,
    )  # fmt: skip
    assert "teeth" in said


def test_documents_proto_and_chart_are_derived(copy: Path) -> None:
    run(copy, "-m", "paceline.methods_table")
    document = (copy / "docs" / "methods.md").read_text()
    assert (
        "| `teeth` | `2` | Leaves beside each node of a comb. At least 0, at most 8. |" in document
    )
    assert "| `teeth` | `1`, `2`, `3` |" in document
    run(copy, "-m", "paceline.rpc.generate")
    proto = (copy / "rpc/proto/paceline/v1/common.proto").read_text()
    assert "// Leaves beside each node of a comb. At least 0, at most 8.\n" in proto
    assert "  optional int32 teeth = " in proto
    said = run(copy, "-c", """
from paceline.config import SpeculationConfig
from paceline.rpc.gen.paceline.v1 import common_pb2
from paceline.rpc.messages import speculation_from_message, speculation_to_message

given = SpeculationConfig(method="comb", teeth=3)
wire = speculation_to_message(given).SerializeToString()
print(speculation_from_message(common_pb2.Speculation.FromString(wire)) == given)
""")  # fmt: skip
    assert said.strip() == "True"
    run(copy, "helm/generate.py")
    schema = (copy / "helm/paceline/values.schema.json").read_text()
    assert '"teeth"' in schema
    assert "Leaves beside each node of a comb." in schema


def test_a_sweep_varies_and_simulates_it(copy: Path) -> None:
    said = run(copy, "-c", """
from paceline.config import SpeculationConfig
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.tuning.families import parts_of, why_not
from paceline.tuning.space import parse_space

space = parse_space({"space": {"method": "comb", "teeth": "auto"}})
print(sorted(p.speculation.teeth for p in space.points if p.speculation.method == "comb"))
plan = resolve(SpeculationConfig(method="comb"))
print(why_not(plan, SamplingParams()), *{part.family.kind for part in parts_of(plan)})
others = [resolve(SpeculationConfig(method=m)) for m in ("draft_model", "draft_model_tree")]
print({p.family.key for o in others for p in parts_of(o)} == {p.family.key for p in parts_of(plan)})
""")  # fmt: skip
    # One recording serves it and the chain of the same drafter: a comb is another static shape.
    assert said.split("\n")[:3] == ["[1, 2, 3]", "None ranks", "True"]
