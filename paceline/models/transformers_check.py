"""Finding out by trial how a model of ``transformers`` computes trees."""

from __future__ import annotations

import numpy as np
import torch

from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner, Segment
from paceline.models.transformers_trees import ModelTrees, Strategy
from paceline.types import IntArray

# Logits of one token computed in two ways may differ by rounding; a wrong mask or position changes
# them altogether. Root mean square of the difference over that of the (centred) logits.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.03}


def find_strategy(
    runner: ModelRunner, trees: ModelTrees, dtype: torch.dtype, *, has_window: bool
) -> Strategy:
    """The first strategy whose logits agree with runs of each path from scratch.

    Args:
        runner: of ``trees``; its sequences are free again afterwards.
        trees: its strategy is changed.
        has_window: some layer attends to less than the whole context.

    Raises:
        InvalidArgument: the logits overflow in this dtype.
    """
    # A short check would not detect a window, so rule out trees with a mask from outside.
    candidates: list[Strategy] = [] if has_window or not trees.takes_positions else ["tree"]
    generator = np.random.default_rng(0)
    length = min(12, runner.context_length - 4)
    tokens = generator.integers(0, runner.vocab_size, length + 11).astype(np.int64)
    reference = _check_logits(runner, trees, "recompute", tokens, length)
    if not bool(torch.isfinite(reference).all()):
        raise InvalidArgument(
            "dtype",
            str(dtype).removeprefix("torch."),
            "a dtype in which this model's logits are finite (try float32 or bfloat16)",
        )
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean().sqrt()
    tolerance = _TOLERANCE[dtype]
    for strategy in (*candidates, "paths", "states"):
        try:
            logits = _check_logits(runner, trees, strategy, tokens, length)
        # Each model fails in its own way at a strategy that it lacks. Such a failure is no
        # error here, because the last strategy needs only a plain forward.
        except Exception:
            continue
        error = (logits - reference).square().mean(-1).max().sqrt()
        if bool(error <= tolerance * spread):
            return strategy
    return "recompute"


def _check_logits(
    runner: ModelRunner, trees: ModelTrees, strategy: Strategy, tokens: IntArray, length: int
) -> torch.Tensor:
    """Logits of two trees with a commit between them, under ``strategy``.  # [11, vocab]"""
    trees.strategy = strategy
    sequence = runner.new_sequence()
    try:
        prompt, first, second = tokens[:length], tokens[length:-4], tokens[-4:]
        runner.forward([Segment(sequence, prompt, logits="none")])
        runner.commit(sequence, range(length))
        tree = np.array([-1, -1, 0, 1, 0, 2, 2], np.int32)
        rows = [runner.forward([Segment(sequence, first, tree)]).logits]
        runner.commit(sequence, (0, 4))
        rows.append(
            runner.forward([Segment(sequence, second[:2], np.array([-1, -1], np.int32))]).logits
        )
        # Nodes added to a tree that is pending already, as an expanding drafter does.
        rows.append(
            runner.forward([Segment(sequence, second[2:], np.array([0, 1], np.int32))]).logits
        )
        return torch.cat(rows)
    finally:
        runner.free(sequence)
