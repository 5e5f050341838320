"""The base of heads that guess several next tokens from one hidden state, independently.

The guesses for a depth are the same for all nodes of that depth, and all of them are known as soon
as the state is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.models.heads.base import Frontier, Head, confidence, cut_chains
from paceline.types import FloatArray, IntArray


class Guesses(Protocol):
    """What a state has of the current round.

    Attributes:
        logits: # [max_depth, vocab_size]
        depth: of each node; -1 is the last committed token.
    """

    logits: Tensor
    depth: dict[int, int]


class ParallelState:
    """The guesses of the current round: see :class:`Guesses`."""

    def __init__(self) -> None:
        self.logits: Tensor = torch.empty(0)
        self.depth = {-1: 0}


def guesses_after(states: Sequence[Guesses], frontiers: Sequence[Frontier]) -> Tensor:
    """Logits after new nodes, whatever their tokens.  # [num_nodes, vocab_size]"""
    rows = []
    for state, frontier in zip(states, frontiers, strict=True):
        for node, _, parent in frontier:
            state.depth[node] = state.depth[parent] + 1
            rows.append(state.logits[state.depth[node]])
    return torch.stack(rows)


def best_guesses(
    states: Sequence[Guesses], depth: int, stop_below: FloatArray | None = None
) -> IntArray:
    """Chains by argmax, as :meth:`Head.greedy_chains` returns them."""
    logits = torch.stack([state.logits[:depth] for state in states])
    chains: IntArray = logits.argmax(-1).cpu().numpy()
    if stop_below is None:
        return chains
    unsure = [confidence(logits[:, node]) < limits for node, limits in enumerate(stop_below, 1)]
    return cut_chains(chains, unsure[: depth - 1])


class ParallelHead(Head):
    """Drafts from the logits of :meth:`guesses`."""

    @property
    @abstractmethod
    def max_depth(self) -> int: ...

    @abstractmethod
    def guesses(self, hidden: Tensor) -> list[Tensor]:
        """Logits for each of the tokens after the one that the target predicts itself.

        # [..., hidden_size] -> max_depth x [..., vocab_size]
        """

    def new_state(self) -> ParallelState:
        return ParallelState()

    def root(
        self,
        states: Sequence[ParallelState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        last = torch.stack([rows[-1] for rows in features])
        logits = torch.stack(self.guesses(last), 1)  # [num_sessions, max_depth, vocab_size]
        for state, rows in zip(states, logits, strict=True):
            state.logits, state.depth = rows, {-1: 0}
        return logits[:, 0]

    def expand(self, states: Sequence[ParallelState], frontiers: Sequence[Frontier]) -> Tensor:
        return guesses_after(states, frontiers)

    def greedy_chains(
        self,
        states: Sequence[ParallelState],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        return best_guesses(states, depth, stop_below)
