"""Forwards of a masked model with a KV cache of finished blocks and, in a block, of sub-blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.diffusion.model import KV, MaskedModel

Tensor = torch.Tensor


@dataclass(slots=True)
class Context:
    """The finished blocks of one sequence."""

    length: int = 0
    entries: KV | None = None
    carry: Tensor | None = None
    """Logits of the token behind the last finished block.  # [vocab_size]"""
    block: KV | None = None
    """Entries of the open block's last whole forward, for the sub-block cache."""


class BlockRunner:
    """Computes logits of open blocks behind cached ones.

    A state is computed on its own, in shapes that depend on nothing else, so its logits have the
    same bits whatever other states the forward holds. FreeDave's `==` rests on this.
    """

    def __init__(self, model: MaskedModel) -> None:
        self.model, self.blocks = model, model.blocks
        self.vocab_size = model.config.vocab_size
        self.context_length = model.config.context_length

    @torch.inference_mode()
    def append(self, context: Context, tokens: Sequence[int]) -> None:
        """Cache finished blocks.  # tokens: a multiple of block_size"""
        size, start = self.blocks.block_size, context.length
        assert len(tokens) % size == 0
        if not tokens:
            return
        positions = torch.arange(start, start + len(tokens))
        mask = self.blocks.past_mask(start + len(tokens))[start:]
        states, entries = self.model.forward(
            torch.tensor([tokens]), positions, mask, context.entries
        )
        if context.entries is not None:
            entries = [
                (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))
                for old, new in zip(context.entries, entries, strict=True)
            ]
        context.entries, context.length = entries, start + len(tokens)
        context.carry, context.block = self.model.logits(states[0, -1]), None

    def truncate(self, context: Context, length: int) -> None:
        """Forget all but the first ``length`` tokens, a multiple of block_size.

        What follows them is unknown until :meth:`append` reads more.
        """
        assert length % self.blocks.block_size == 0
        if length < context.length:
            assert context.entries is not None
            kept = [(k[:, :, :length], v[:, :, :length]) for k, v in context.entries]
            context.entries = kept if length else None
            context.length, context.carry, context.block = length, None, None

    @torch.inference_mode()
    def predict(self, context: Context, states: Sequence[Tensor]) -> list[Tensor]:
        """Logits of every position of open blocks.

        Args:
            states: each the open block's ids, masks among them.  # [rows]

        Returns:
            For each state the logits of its own positions.  # [rows, vocab_size]
        """
        return [self._predict_one(context, state) for state in states]

    def _predict_one(self, context: Context, state: Tensor) -> Tensor:
        positions = torch.arange(context.length, context.length + len(state))
        hidden, context.block = self.model.forward(state[None], positions, past=context.entries)
        logits = self.model.logits(hidden[0])
        return torch.cat([self._carry(context)[None], logits[:-1]])

    @torch.inference_mode()
    def predict_sub_block(self, context: Context, state: Tensor, start: int, stop: int) -> Tensor:
        """Logits of a sub-block; the block's other rows are as the last whole forward saw them.

        Only rows ``start - 1`` to ``stop`` are computed, so this is cheaper than :meth:`predict`
        and not the same.  # [stop - start, vocab_size]
        """
        assert context.block is not None, "predict() comes first"
        first = max(start - 1, 0)
        rows = min(len(state), context.block[0][0].shape[2])
        others = [row for row in range(rows) if not first <= row < stop]
        past: KV = []
        for layer, (keys, values) in enumerate(context.block):
            keys, values = keys[:, :, others], values[:, :, others]
            if context.entries is not None:
                keys = torch.cat([context.entries[layer][0], keys], 2)
                values = torch.cat([context.entries[layer][1], values], 2)
            past.append((keys, values))
        positions = torch.arange(context.length + first, context.length + stop)
        hidden, _ = self.model.forward(state[None, first:stop], positions, past=past)
        logits = self.model.logits(hidden[0, :-1])
        return logits if start else torch.cat([self._carry(context)[None], logits])

    def _carry(self, context: Context) -> Tensor:
        # Nothing predicts the first token of all; a prompt has it.
        return torch.zeros(self.vocab_size) if context.carry is None else context.carry
