"""Chi-square and binomial bounds for seeded tests: deterministic, so a failure is a finding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

ALPHA = 1e-5


def chi_square_p(counts: Sequence[int] | npt.NDArray[np.int64], expected: npt.ArrayLike) -> float:
    """P-value of ``counts`` under the distribution ``expected``; rare cells are put together."""
    observed, probs = np.asarray(counts, np.float64), np.asarray(expected, np.float64)
    total = observed.sum()
    assert abs(probs.sum() - 1.0) < 1e-6
    assert not observed[probs == 0.0].any(), "an outcome that is impossible"
    order = np.argsort(-probs, kind="stable")
    cells: list[tuple[float, float]] = []
    have = want = 0.0
    for i in order:
        have, want = have + observed[i], want + probs[i] * total
        if want >= 8.0:
            cells.append((have, want))
            have = want = 0.0
    if cells:  # what is left joins the last cell
        cells[-1] = (cells[-1][0] + have, cells[-1][1] + want)
    assert len(cells) >= 2, "too few samples to test anything"
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = torch.tensor((len(cells) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2.0)))


def standard_error(rate: float, count: int) -> float:
    """Of a proportion."""
    return math.sqrt(max(rate * (1 - rate), 1e-6) / count)
