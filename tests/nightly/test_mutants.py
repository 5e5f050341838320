"""Small mistakes in the loop, trees, acceptance rules and transcripts: a quick test finds each.

A share of all mutants (tests/mutants.py) is tried, always the same one for the same code; the
variable PACELINE_MUTANTS sets another share, 1 for all of them. A mutant that every test lets pass
shows a test that is missing, or behaves as the original does: then it goes into ``EQUIVALENT``, by
hand, with the reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.mutants import ROOT, Copy, Mutant, mutants_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * 3600)]

SHARE = float(os.environ.get("PACELINE_MUTANTS", "0.2"))
CPU_S = 90  # of the tests of one mutant; those of the unchanged code take some 30

TESTS: Mapping[str, tuple[str, ...]] = {
    "paceline/engine/loop.py": (
        "tests/core/test_loop.py", "tests/core/test_engine.py", "tests/core/test_counters.py",
        "tests/core/test_token_limits.py",
    ),
    "paceline/tree.py": ("tests/core/test_tree.py", "tests/core/test_drafter_combined.py"),
    "paceline/acceptance/*.py": (
        "tests/core/test_acceptance.py", "tests/core/test_output_law.py",
        "tests/core/test_constraints.py",
    ),
    "paceline/transcript.py": ("tests/cli/test_verify.py",),
    "rpc/*transcript*.py": ("tests/rpc/test_transcript.py",),
}  # fmt: skip
"""The quick tests of the files of a pattern."""

EQUIVALENT: Mapping[str, str] = {
    "paceline/tree.py clip: "
    "if draft.num_nodes <= min(max_depth, max_nodes): -> "
    "if draft.num_nodes < min(max_depth, max_nodes):": "a shortcut: what follows returns it, too",
    "paceline/tree.py accepted_path: "
    "node = next((n for n in followers if (parents[n], tokens[n]) == (parent, "
    "wanted)), -1) -> "
    "node = next((n for n in followers if (parents[n], tokens[n]) == (parent, "
    "wanted)), -2)": "any number below 0 ends the walk",
    "paceline/acceptance/block.py BlockVerification.accept: "
    "length, joint = (0, 1.0) -> "
    "length, joint = (1, 1.0)": "the first pass of the loop always sets the length",
    "paceline/acceptance/block.py BlockVerification.accept: "
    "weights = joint * p if last else _excess(joint, p, draft, depth) -> "
    "weights = joint * p if last else _excess(p, joint, draft, depth)": (
        "it only multiplies the two, in either order"
    ),
    "paceline/acceptance/k_seq.py ratio: "
    "if _acceptance(p, q, rho, k) <= sum64(np.minimum(rho * q, p)): -> "
    "if _acceptance(p, q, rho, k) < sum64(np.minimum(rho * q, p)):": (
        "at equality rho is the fixed point, and both ends of the interval stay near it"
    ),
    "paceline/acceptance/base.py PathLogits.draw: "
    "return sample_from(probs, self.params.seed, self.position + depth, "
    "Salt.RESIDUAL) -> "
    "return sample_from(probs, self.params.seed, Salt.RESIDUAL, self.position + "
    "depth)": "other noise of the same law; its place among the noises is not promised",
    "paceline/acceptance/tolerance.py Tolerance._tolerated: "
    "return -1 -> "
    "return -2": "any number below 0 says that none is",
    "paceline/transcript.py verify: "
    "session_id = secrets.token_hex(8) -> "
    "session_id = secrets.token_hex(9)": "any name will do",
    "paceline/transcript.py verify: "
    "while done < len(written) and (not session.finished): -> "
    "while done <= len(written) and (not session.finished):": (
        "a round adds the target's own token, so all are done only where the session ended"
    ),
}
"""Mutants that no test can find, each with the reason."""


def files() -> dict[str, tuple[str, ...]]:
    """The files to mutate, with their tests."""
    found = {
        str(path.relative_to(ROOT)): tests
        for pattern, tests in TESTS.items()
        for path in sorted(ROOT.glob(pattern))
    }
    assert len(found) > 8
    return found


def tried() -> list[Mutant]:
    """A share of each file's mutants; the order of each file's depends on nothing else."""
    every = [mutants_of(file) for file in files()]
    return [mutant for found in every for mutant in found[: math.ceil(SHARE * len(found))]]


def test_the_reviewed_mutants_exist() -> None:
    known = {str(mutant) for file in files() for mutant in mutants_of(file)}
    assert set(EQUIVALENT) - known == set(), "the code has changed: review these again"


def test_every_mutant_is_found(tmp_path: Path) -> None:
    tests = files()
    workers = len(os.sched_getaffinity(0))
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(workers):
        copies.put(Copy(tmp_path / f"copy{number}"))

    def passes(mutant: Mutant) -> bool:
        copy = copies.get()
        try:
            return copy.passes(mutant, tests[mutant.file], CPU_S)
        finally:
            copies.put(copy)

    mutants = [mutant for mutant in tried() if str(mutant) not in EQUIVALENT]
    one_of_each = {its_tests: file for file, its_tests in tests.items()}.values()
    unchanged = [Mutant(file, "", "", "", (ROOT / file).read_text("utf-8")) for file in one_of_each]
    with ThreadPoolExecutor(workers) as pool:
        assert all(pool.map(passes, unchanged)), "the tests fail without a mutant"
        survived = [
            str(mutant)
            for mutant, passed in zip(mutants, pool.map(passes, mutants), strict=True)
            if passed
        ]
    print(f"{len(mutants)} mutants, {len(survived)} survived")
    assert survived == [], "\n".join(survived)
