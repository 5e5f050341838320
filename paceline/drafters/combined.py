"""Several drafters in one: their trees, merged under one node budget.

At temperature 0 the accepted length of a union of trees is the best of its parts (a verified tree
holds every path of each), so drafters that are right in different places add up: a lookup drafter
for copied text and a model for the rest, say.

The parts draft in the order of the knob ``drafters``. Each may spend an equal share of the nodes
that are left, divided by the parts still to come; what it does not use, and nodes that an earlier
part has proposed already, go to those after it. So no part can starve another, no node is drafted
to be thrown away, and the last one fills the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.drafters.base import DRAFTERS, Drafter, DrafterPart, at_once, part_outcome
from paceline.tree import merge
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView


class Combined(Drafter):
    """Passes each call on to its parts; its state is each part's last proposal.

    Rules that verify chains only get the first draft that a part finds, with its q.

    Args:
        part: another drafter of the engine by name.
    """

    def __init__(self, part: Callable[[str], Drafter]) -> None:
        self._part = part
        self._states: dict[str, dict[str, Draft]] = {}  # session -> part -> draft, in order

    def open(self, session: SessionView) -> None:
        names = session.config[DRAFTERS] or ()
        self._states[session.session_id] = dict.fromkeys(names, EMPTY_DRAFT)
        try:
            for name in names:
                self._part(name).open(session)
        except Exception:
            self.close(session)  # no other code closes them
            raise

    def close(self, session: SessionView) -> None:
        with ExitStack() as parts:  # wait for all parts, even if one fails
            for name in self._states.pop(session.session_id, {}):
                parts.callback(self._part(name).close, session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        states = [self._states[session.session_id] for session in sessions]
        merged = [EMPTY_DRAFT] * len(sessions)
        asked = [min(budget.depth, budget.nodes) > 0 for budget in budgets]
        for state in states:
            state.update(dict.fromkeys(state, EMPTY_DRAFT))
        for turn in range(max(map(len, states), default=0)):
            for name, indices in self._by_part(states, turn).items():
                members = [i for i in indices if asked[i]]
                if not members:
                    continue
                shares = []
                for i in members:
                    left = budgets[i].nodes - merged[i].num_nodes
                    if sessions[i].chain_only and merged[i].num_nodes:
                        left = 0
                    nodes = -(-left // (len(states[i]) - turn))
                    shares.append(Budget(budgets[i].depth if nodes else 0, nodes))
                drafts = at_once(self._part(name).propose([sessions[i] for i in members], shares))
                for i, draft in zip(members, drafts, strict=True):
                    states[i][name] = draft
                    if not merged[i].num_nodes:
                        merged[i] = draft
                    elif draft.num_nodes:
                        merged[i] = merge([merged[i], draft], budgets[i].nodes)
        return merged

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        states = [self._states.get(session.session_id, {}) for session in sessions]
        for turn in range(max(map(len, states), default=0)):
            for name, members in self._by_part(states, turn).items():
                part = self._part(name)
                part.observe(
                    [sessions[i] for i in members],
                    [part_outcome(outcomes[i], states[i][name], part.needs) for i in members],
                )

    @staticmethod
    def _by_part(states: Sequence[dict[str, Draft]], turn: int) -> dict[str, list[int]]:
        """Indices of the sessions by the part at position ``turn`` of their order."""
        groups: dict[str, list[int]] = {}
        for i, state in enumerate(states):
            if turn < len(state):
                groups.setdefault(list(state)[turn], []).append(i)
        return groups


COMBINED = DrafterPart(
    make=lambda context: Combined(context.drafter),
    knobs=(DRAFTERS.but(("prompt_lookup", "draft_model")),),
    replay="composite",
    remembers=True,
)
