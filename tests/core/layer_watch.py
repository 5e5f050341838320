"""What each layer of a model computes and reads, KV entry by KV entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.models.llama import LlamaRunner
from paceline.models.rows import Rows
from paceline.types import IntArray


class LayerWatch:
    """Fails where a layer reads keys and values that it has not written for the present token.

    Attributes:
        computed: how often a layer has computed the token in a slot, since the slot was taken.
        num_rows: rows that all layers together have computed.
    """

    def __init__(self, runner: LlamaRunner, patch: pytest.MonkeyPatch) -> None:
        self.computed: Counter[tuple[int, int]] = Counter()
        self.num_rows = 0
        self._num_layers = runner.config.num_layers
        ops, pool = runner._ops, runner._pool
        run_layers, take = ops.run_layers, pool.append

        def watched(
            stack: Any,
            first: int,
            last: int,
            x: torch.Tensor,
            k: Any,
            v: Any,
            rows: Rows,
            *out: Any,
        ) -> None:
            self._note(range(first, last), rows, range(len(x)))
            run_layers(stack, first, last, x, k, v, rows, *out)

        def taken(sequence: Any, parents: Sequence[int]) -> list[int]:
            slots = take(sequence, parents)
            for slot in slots:
                for layer in range(self._num_layers):
                    del self.computed[layer, slot]
            return slots

        patch.setattr(ops, "run_layers", watched)
        patch.setattr(pool, "append", taken)
        if runner.drafts_chains:
            chain = ops.greedy_chain  # type: ignore[attr-defined]

            def watched_chain(
                stack: Any, num_layers: int, *arguments: Any, **more: Any
            ) -> IntArray:
                tokens: IntArray = chain(stack, num_layers, *arguments, **more)
                rows, given = arguments[-3:-1]
                first, count = sum(map(len, given)), len(given)
                self._note(range(num_layers), rows, range(first))
                for step in range(1, len(tokens)):
                    going = [i for i in range(count) if tokens[step, i] >= 0]
                    if going:
                        at = first + (step - 1) * count
                        self._note(range(num_layers), rows, [at + i for i in going])
                return tokens

            patch.setattr(ops, "greedy_chain", watched_chain)

    def times(self, slots: Sequence[int]) -> set[int]:
        """How often any layer computed any of these tokens."""
        return {self.computed[layer, slot] for layer in range(self._num_layers) for slot in slots}

    def _note(self, layers: Sequence[int], rows: Rows, which: Sequence[int]) -> None:
        for layer in layers:
            for row in which:
                self.computed[layer, int(rows.slots[row])] += 1
                self.num_rows += 1
            for row in which:
                for slot in rows.context(row).tolist():
                    assert self.computed[layer, slot], f"layer {layer} reads slot {slot} unwritten"
