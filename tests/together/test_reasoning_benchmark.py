"""The table of SpecReason by threshold, on the demo pair."""

from __future__ import annotations

import pytest

from benchmarks.reasoning import measure
from paceline.loading import load_engine
from paceline.together.reasoning import ReasonOptions


@pytest.mark.slow
def test_thresholds_decide_who_writes() -> None:
    small, large = load_engine("demo-drafter"), load_engine("demo")
    prompts = ["def read(path):\n", "class Stack:\n"]
    options = ReasonOptions(token_budget=48, max_step_tokens=24, separator="\n")
    rows = list(measure(small, large, prompts, options))
    kept = [row.kept for row in rows]
    assert kept[0] == 1.0
    assert kept[-1] == 0.0
    assert kept == sorted(kept, reverse=True)
    for ends in (rows[0], rows[-1]):
        assert ends.pure == len(prompts), "one model has written all of it"
    assert (rows[0].large_share, rows[-1].large_share) == (0.0, 1.0)
    assert all(row.graded == 1.0 for row in rows)
