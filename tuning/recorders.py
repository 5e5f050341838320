"""Record what drafters propose, in the engine, in the drafter's place.

A recorder stands in for a drafter and passes every call on to it. It writes down the drafts and
drops them, so that the session moves along a known output by one token a round. The drafter is thus
recorded at every position, in the state that it has there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.acceptance.base import AcceptanceRule, PathLogits
from paceline.config import MAX_NODES, SpeculationConfig
from paceline.drafters.base import Drafter, LookupDrafter
from paceline.errors import InvalidArgument
from paceline.plan import Plan, resolve
from paceline.session import Session
from paceline.shapes.base import ALL_DRAWS, Expander, Level, Shape, TreeBuilder, grow
from paceline.shapes.confidence import ConfidenceTree
from paceline.shapes.dyspec import DySpec
from paceline.shapes.rsd_s import StochasticBeam
from paceline.tree import depths
from paceline.tuning.families import PREFIX_ONLY, SHAPING_KNOBS, Kind, with_budget
from paceline.tuning.recordings import (
    ABSENT,
    NEVER,
    NUM_RANKS,
    DraftRecording,
    OrderRecording,
    RankRecording,
    Recording,
    Truth,
)
from paceline.types import EMPTY_DRAFT, Acceptance, Budget, Draft, Draws

Budgets = Collection[tuple[int, int]]  # depth and nodes


class _Follow:
    """An acceptance rule that commits a known output token by token.

    Another rule could commit other tokens, if a target's rounding depends on what is computed
    beside a token.
    """

    lossless = True

    def __init__(self, rule: AcceptanceRule, output: list[int], prompt_length: int) -> None:
        self.name, self.chain_only, self.draws = rule.name, rule.chain_only, rule.draws
        self._output = output
        self._prompt_length = prompt_length

    def accept(self, draft: Draft, logits: PathLogits) -> Acceptance:
        return Acceptance((), self._output[logits.position - self._prompt_length])


class DraftRecorder(ABC):
    """Takes a drafter's place: records what it proposes, and proposes nothing.

    Attributes:
        config: method and knobs of the sessions.
    """

    config: SpeculationConfig

    def __init__(self, truth: Truth) -> None:
        self._error: Exception | None = None
        self._truth = truth
        self._rules: dict[str, _Follow] = {}
        self._prompts: dict[str, int] = {}  # the number of each session's prompt
        self._outputs = [truth.output(prompt) for prompt in range(truth.num_prompts)]
        self._drafter: Any = None
        self._fallback: Drafter | None = None

    def wrap(self, drafter: Drafter) -> None:
        """Take the place of a drafter, which must have no sessions, until :meth:`release`."""
        if drafter.elsewhere:
            raise InvalidArgument("engine", "a drafter elsewhere", "drafters in this process")
        self._drafter = drafter
        if isinstance(drafter, LookupDrafter):
            self._fallback = drafter.fallback
            drafter.fallback = None  # the fallback has a recording of its own

    def release(self) -> None:
        """Restore the drafter."""
        if isinstance(self._drafter, LookupDrafter):
            self._drafter.fallback = self._fallback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)  # open, observe, ...: pass on

    def follow(self, session: Session, number: int) -> None:
        """Make a session commit the known output of a prompt."""
        name = session.session_id
        self._prompts[name] = number
        self._rules[name] = _Follow(session.plan.rule, self._outputs[number], session.prompt_length)
        session.plan = self._plan(session.plan, session)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        try:
            self._look(sessions)
        except Exception as error:
            self._error = error
            raise
        return [EMPTY_DRAFT] * len(sessions)

    def check(self, sessions: Iterable[Session]) -> None:
        """Check that the recorder followed these sessions to their end.

        Raises:
            RuntimeError: the drafter failed, so the engine went on without it.
        """
        for session in sessions:
            if session.error is not None:
                raise session.error
            if self._error is not None or session.stats.drafter_lost:
                name = session.plan.method.drafter
                raise RuntimeError(f"a drafter failed while it was recorded ({name})") from (
                    self._error
                )

    def _position(self, session: Session) -> int:
        """The position of a session in the arrays over all outputs."""
        first = int(self._truth.offsets[self._prompts[session.session_id]])
        return first + session.length - session.prompt_length

    def _following(self, session: Session) -> list[int]:
        """The tokens of the known output from a session's position on."""
        output = self._outputs[self._prompts[session.session_id]]
        return output[session.length - session.prompt_length :]

    def _plan(self, plan: Plan, session: Session) -> Plan:
        return replace(plan, rule=self._rules[session.session_id])

    @abstractmethod
    def _look(self, sessions: Sequence[Session]) -> None:
        """Record what the drafter proposes now."""

    @abstractmethod
    def recording(self) -> Recording:
        """The recording."""

    @property
    def _context_length(self) -> int:
        """Context length behind which the drafter makes no drafts; 0: it has none of its own."""
        runner = getattr(self._drafter, "runner", None)
        return int(getattr(runner, "context_length", 0))


class _Expanded(DraftRecorder):
    """Records an expanding drafter through a shape of its own."""

    def __init__(self, plan: Plan, truth: Truth, depth: int, nodes: int, **changes: Any) -> None:
        super().__init__(truth)
        # At temperature 0 all rules draw the most likely tokens; above it, this is the only rule.
        self.config = with_budget(
            plan, Budget(depth, nodes), acceptance="coupled", draft_support=None, **changes
        )
        self._depth = depth
        self._nodes = nodes
        self._reached = 0
        self._num_positions = len(truth.output_ids)

    @property
    def draws(self) -> frozenset[Draws]:
        return ALL_DRAWS

    def _plan(self, plan: Plan, session: Session) -> Plan:
        return replace(super()._plan(plan, session), shape=self)

    def _look(self, sessions: Sequence[Session]) -> None:
        depths = [min(self._depth, session.remaining - 1) for session in sessions]
        self._drafter.propose(sessions, [Budget(depth, self._nodes) for depth in depths])

    def build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        """Build the trees, as a shape does. A drafter may have cut the budgets."""
        self._reached = max(self._reached, *(budget.depth for budget in budgets))
        return self._build(expander, sessions, budgets)

    @abstractmethod
    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]: ...


class _Ranks(_Expanded):
    """Records the rank of each right token, as deep as the drafter's candidates have it."""

    def __init__(self, plan: Plan, budgets: Budgets, truth: Truth) -> None:
        self._prefix_only = plan.method.drafter in PREFIX_ONLY
        depth = 1 if self._prefix_only else max(depth for depth, _ in budgets)
        unshaped = dict.fromkeys(SHAPING_KNOBS)
        super().__init__(plan, truth, depth, depth, **{**unshaped, "shape": "chain"})
        self._ranks = np.full((self._num_positions, depth), ABSENT, np.uint8)

    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        following = {session.session_id: self._following(session) for session in sessions}

        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            right = following[tree.session.session_id]
            node = frontier[0]
            depth = tree.depth_of[node] if node >= 0 else 0
            if depth >= len(right):
                return []
            choices = tree.choose(node, level, row, NUM_RANKS)
            if right[depth] not in choices.tokens:
                return []
            rank = choices.tokens.index(right[depth])
            self._ranks[self._position(tree.session), depth] = rank
            return [tree.add(node, choices, rank)]

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: NUM_RANKS)
        return [tree.draft() for tree in trees]

    def recording(self) -> Recording:
        return RankRecording(self._ranks, self._reached, self._prefix_only, self._context_length)


class _Order(_Expanded):
    """Records the largest tree of the real shape, and the order in which it grows."""

    def __init__(self, plan: Plan, budgets: Budgets, truth: Truth) -> None:
        depth, nodes = (max(sizes) for sizes in zip(*budgets, strict=True))
        super().__init__(plan, truth, depth, min(MAX_NODES, nodes))
        assert plan.shape is not None
        self._shape: Shape = plan.shape
        self._before = np.full((self._num_positions, self._depth, self._depth), NEVER, np.uint16)
        self._total = np.zeros((self._num_positions, self._depth), np.uint16)

    def _build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        drafts, orders = _grown(self._shape, expander, sessions, budgets)
        for session, draft, order in zip(sessions, drafts, orders, strict=True):
            if not draft.num_nodes:
                continue
            position, limits = self._position(session), np.arange(1, self._depth + 1)
            place = np.argsort(order)  # rank of each node in that order
            shallow = depths(draft.parent_indices)[order][:, None] <= limits  # [nodes, depth]
            self._total[position] = shallow.sum(0)
            for depth, node in enumerate(right_path(draft, self._following(session))):
                counts = shallow[: place[node]].sum(0)
                self._before[position, depth, depth:] = counts[depth:]
        return drafts

    def recording(self) -> Recording:
        return OrderRecording(
            self._before, self._total, self._reached, self._nodes, self._context_length
        )


def _grown(
    shape: Shape, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
) -> tuple[list[Draft], list[list[int]]]:
    """Grow trees; also returns their nodes in the order in which smaller trees take them."""
    if isinstance(shape, ConfidenceTree):
        trees = shape.grow(expander, sessions, budgets)
        orders = [
            sorted(range(len(tree.values)), key=lambda node, tree=tree: -tree.values[node][0])  # type: ignore[misc]
            for tree in trees
        ]
        return [tree.draft() for tree in trees], orders
    assert isinstance(shape, DySpec | StochasticBeam)
    drafts = shape.build(expander, sessions, budgets)
    return drafts, [list(range(draft.num_nodes)) for draft in drafts]


class _Drafts(DraftRecorder):
    """Records a draft of every budget."""

    def __init__(self, plan: Plan, budgets: Budgets, truth: Truth) -> None:
        super().__init__(truth)
        self._budgets = sorted(budgets)
        self._plans = [resolve(with_budget(plan, Budget(*budget))) for budget in self._budgets]
        self.config = self._plans[-1].config
        shape = len(truth.output_ids), len(self._budgets)
        self._accepted = np.zeros(shape, np.uint8)
        self._nodes = np.zeros(shape, np.uint16)

    def _look(self, sessions: Sequence[Session]) -> None:
        for column, ((depth, nodes), plan) in enumerate(
            zip(self._budgets, self._plans, strict=True)
        ):
            for session in sessions:
                session.plan = self._plan(plan, session)
            budgets = [Budget(min(depth, session.remaining - 1), nodes) for session in sessions]
            drafts = self._drafter.propose(sessions, budgets)
            for session, draft in zip(sessions, drafts, strict=True):
                position = self._position(session)
                right = right_path(draft, self._following(session))
                self._accepted[position, column] = len(right)
                self._nodes[position, column] = draft.num_nodes

    def recording(self) -> Recording:
        return DraftRecording(np.asarray(self._budgets, np.int64), self._accepted, self._nodes)


RECORDERS: Mapping[Kind, Callable[[Plan, Budgets, Truth], DraftRecorder]] = {
    "ranks": _Ranks,
    "order": _Order,
    "drafts": _Drafts,
}


def right_path(draft: Draft, output: Sequence[int]) -> list[int]:
    """The nodes of a draft that equal the output, from the root down."""
    below: dict[tuple[int, int], int] = {}
    for node, step in enumerate(
        zip(draft.parent_indices.tolist(), draft.token_ids.tolist(), strict=True)
    ):
        below.setdefault(step, node)  # of equal siblings, rules take the first
    path: list[int] = []
    for token in output:
        step = (path[-1] if path else -1, token)
        if step not in below:
            break
        path.append(below[step])
    return path
