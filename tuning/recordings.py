"""What was recorded of a target and its drafters: arrays with a row for each position.

A position is a token of the target's output after a prompt; those of all prompts stand one after
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.tuning.families import Kind
from paceline.types import Budget

NUM_RANKS = 64  # candidates among which the right token is looked for: all that a template can name
ABSENT = 255  # the right token is not among them, or the draft ends before
NEVER = 65535  # a node that no draft has


@dataclass(frozen=True, slots=True, eq=False)
class RankRecording:
    """Where the right tokens are among a drafter's candidates.

    Attributes:
        ranks: of the right token at each depth, given that the tokens before it were drafted;
            ABSENT where no draft has it.  # uint8 [positions, depth]
        reached: depth of the deepest drafts that the drafter makes, if less than asked for.
        prefix_only: the rank at a depth is the first one of the position where the token stands.
        context_length: where a draft would end behind it the drafter makes none; 0: no matter.
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
    """When trees of different sizes take the right path's nodes.

    Attributes:
        before: how many nodes of a tree that is ``d + 1`` deep come before the right path's node
            at depth ``k + 1``; NEVER where there is no such node.
            # uint16 [positions, depth (k), depth (d)]
        total: nodes of the largest tree of each depth.  # uint16 [positions, depth]
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
        budgets: depth and nodes.  # int64 [budgets, 2]
        accepted: length of the right path in the draft.  # uint8 [positions, budgets]
        nodes: of the draft.  # uint16 [positions, budgets]
    """

    kind: ClassVar[Kind] = "drafts"

    budgets: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.uint8]
    nodes: npt.NDArray[np.uint16]

    def place(self, budget: Budget) -> int | None:
        """Column of a budget."""
        found = np.flatnonzero((self.budgets == (budget.depth, budget.nodes)).all(axis=1))
        return int(found[0]) if len(found) else None

    def covers(self, budget: Budget) -> bool:
        return self.place(budget) is not None

    def joined(self, other: DraftRecording) -> DraftRecording:
        """With the budgets of another recording of the same positions."""
        new = [i for i, budget in enumerate(other.budgets) if not self.covers(Budget(*budget))]
        return DraftRecording(
            np.concatenate([self.budgets, other.budgets[new]]),
            np.concatenate([self.accepted, other.accepted[:, new]], axis=1),
            np.concatenate([self.nodes, other.nodes[:, new]], axis=1),
        )


Recording: TypeAlias = RankRecording | OrderRecording | DraftRecording


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What the target says after each prompt, one output after the other.

    Attributes:
        output_ids: # int64 [positions]
        offsets: where each output begins, and the end of the last.  # int64 [prompts + 1]
        prompt_lengths: # int64 [prompts]
        room: tokens that could have been generated: more than there are where the output came to
            an end by itself.  # int64 [prompts]
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
