"""Finding the most likely tokens of a vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling import SamplingParams, probabilities, token_logprobs


@given(st.data())
def test_top_k_keeps_what_a_full_sort_keeps(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([3, 64, 100, 5000, 49152]))
    k = data.draw(st.integers(1, min(size, 1500)))
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=size) * 3
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many ties
    if data.draw(st.booleans()):
        logits[: size // 2] = -np.inf
    row = logits.astype(np.float32)
    kept = np.flatnonzero(probabilities(row, SamplingParams(temperature=1.0, top_k=k)) > 0)
    least = np.sort(row)[-k]
    assert kept.tolist() == np.flatnonzero((row >= least) & (row > -np.inf)).tolist()


@pytest.mark.parametrize("count", [1, 20, 3000, 4096])
def test_logprobs_name_the_best_tokens_in_order(count: int) -> None:
    logits = np.random.default_rng(0).integers(0, 400, 4096).astype(np.float32)
    top = token_logprobs(logits, 5, count).top
    assert [token for token, _ in top] == np.argsort(-logits, kind="stable")[:count].tolist()
