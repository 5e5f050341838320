"""Recordings of a target and its drafters: arrays with a row for each position.

A position is a token of the target's output; the outputs of all prompts follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.tuning.families import Kind
from paceline.types import Budget

NUM_RANKS = 64  # candidates of which the right token may be one: all that a template can name
ABSENT = 255  # the right token is not among them, or the draft ends before it
NEVER = 65535  # no draft has the node


@dataclass(frozen=True, slots=True, eq=False)
class RankRecording:
    """The ranks of the right tokens among a drafter's candidates.

    Attributes:
        ranks: rank of the right token at each depth, if the tokens before it were drafted; ABSENT
            if no draft has it.  # [positions, depth] uint8
        reached: depth of the drafter's deepest drafts, if it makes shallower ones than asked for.
        prefix_only: the rank at a depth equals the first one at that token's own position.
        context_length: the drafter makes no draft that ends behind it; 0: no limit.
    """

    kind: ClassVar[Kind] = "ranks"

    ranks: npt.NDArray[np.uint8]
    reached: int
    prefix_only: bool
    context_length: int = 0

    def covers(self, budget: Budget) -> bool:
        return self.prefix_only or budget.depth <= self.ranks.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class OrderRecording:
    """How large a tree must be to have the nodes of the right path.

    Attributes:
        before: how many nodes of a tree that is ``d + 1`` deep come before the right path's node
            at depth ``k + 1``; NEVER if there is no such node.
            # [positions, depth (k), depth (d)] uint16
        total: nodes of the largest tree of each depth.  # [positions, depth] uint16
        reached: as in :class:`RankRecording`.
        nodes: budget of the largest tree.
        context_length: as in :class:`RankRecording`.
    """

    kind: ClassVar[Kind] = "order"

    before: npt.NDArray[np.uint16]
    total: npt.NDArray[np.uint16]
    reached: int
    nodes: int
    context_length: int = 0

    def covers(self, budget: Budget) -> bool:
        return budget.depth <= self.before.shape[1] and budget.nodes <= self.nodes


@dataclass(frozen=True, slots=True, eq=False)
class DraftRecording:
    """How much of each draft is right.

    Attributes:
        budgets: depth and nodes.  # [budgets, 2] int64
        accepted: length of the right path in the draft.  # [positions, budgets] uint8
        nodes: of the draft.  # [positions, budgets] uint16
    """

    kind: ClassVar[Kind] = "drafts"

    budgets: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.uint8]
    nodes: npt.NDArray[np.uint16]

    def place(self, budget: Budget) -> int | None:
        """The column of a budget; None if it was not recorded."""
        found = np.flatnonzero((self.budgets == (budget.depth, budget.nodes)).all(axis=1))
        return int(found[0]) if len(found) else None

    def covers(self, budget: Budget) -> bool:
        return self.place(budget) is not None

    def joined(self, other: DraftRecording) -> DraftRecording:
        """This recording with the budgets of another one of the same positions."""
        new = [i for i, budget in enumerate(other.budgets) if not self.covers(Budget(*budget))]
        return DraftRecording(
            np.concatenate([self.budgets, other.budgets[new]]),
            np.concatenate([self.accepted, other.accepted[:, new]], axis=1),
            np.concatenate([self.nodes, other.nodes[:, new]], axis=1),
        )


Recording: TypeAlias = RankRecording | OrderRecording | DraftRecording


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The target's outputs for all prompts, one after the other.

    Attributes:
        output_ids: # [positions] int64
        offsets: where each output begins, and the end of the last one.  # [prompts + 1] int64
        prompt_lengths: # [prompts] int64
        room: tokens that could have been generated: more than the output has if it ended by itself.
            # [prompts] int64
    """

    output_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    room: npt.NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lengths)

    def output(self, prompt: int) -> list[int]:
        found: list[int] = self.output_ids[self.offsets[prompt] : self.offsets[prompt + 1]].tolist()
        return found
