"""Paceline's drafters for an engine that shows rows of tokens and nothing else.

vLLM asks a proposer, after each of its steps, for the next draft of every row of its batch. It says
which tokens a row holds and how many of them are new, but not whose row it is: requests come, go,
change rows and are preempted without a word. :class:`RowDrafting` finds the sessions again (by
row, request id where there is one, and prefix) and runs steps 1 and 5 of the decode loop for them;
the engine verifies, accepts and commits by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.acceptance.exact_match import Coupled
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.none import NoDrafter
from paceline.engine.drafting import DrafterSet, Drafting, round_budget
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS, Method
from paceline.plan import AR_PLAN, Plan, resolve
from paceline.rpc.mirrors import NO_VERIFICATION
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.shapes.kary import chain
from paceline.tree import accepted_path, children, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft, Load, Outcome

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]

MAX_PLANS = 256
"""Different configurations that are remembered; sessions keep theirs in any case."""
ABSENT_STEPS = 32
"""A session without a row for so many steps is closed; a preempted one is then begun anew."""


class ChainRule(Coupled):
    """The engine's own rule, as drafters see it: one branch, no distribution."""

    chain_only = True


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request says about its drafts.

    Attributes:
        speculation: method and knobs; None takes the engine's.
        prediction: token ids that the client expects as the output.
        prompt_length, max_length: of the request, None where they are not known.
    """

    speculation: SpeculationConfig | None = None
    prediction: tuple[int, ...] = ()
    prompt_length: int | None = None
    max_length: int | None = None


@dataclass(slots=True, eq=False)
class _Row:
    """A session and what its engine was given last."""

    session: Session
    owner: str
    tokens: Tokens  # [max_length]; the first session.length of them count
    draft: Draft = EMPTY_DRAFT
    draft_seconds: float = 0.0
    absent: int = 0

    def matches(self, owner: str, tokens: Tokens) -> bool:
        """Whether a row with these tokens can be this session's, some tokens later."""
        length = self.session.length
        return (
            self.owner == owner
            and len(tokens) > length
            and bool(np.array_equal(self.tokens[:length], tokens[:length]))
        )


class RowDrafting:
    """Drafts for rows.

    Args:
        default: what requests get that wish for nothing.
        vocab_size, max_length: of the target; ``max_length`` is the longest sequence.
        max_depth: longest draft that the engine takes.
        drafters: those that cannot be made from tokens alone, by name as in the catalogue (a draft
            model, say, or one that lives elsewhere).
    """

    def __init__(
        self,
        default: SpeculationConfig,
        *,
        vocab_size: int,
        max_length: int,
        max_depth: int,
        drafters: Mapping[str, Drafter] | None = None,
        catalogue: Mapping[str, Method] = METHODS,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._max_depth = max_depth
        self._catalogue = catalogue
        self._given = drafters or {}
        self._begin_anew()
        self._context = LengthContext(vocab_size=vocab_size)
        self._plans: dict[SpeculationConfig, Plan] = {}
        self._default = default
        self._rows: dict[int, _Row] = {}
        self._parked: list[_Row] = []
        self._returned_at: float | None = None
        self._num_made = 0
        self.plan(default)

    # --- what requests may wish for ---------------------------------------------------------------

    def plan(self, config: SpeculationConfig) -> Plan:
        """The parts of a configuration, with a chain where its row has a tree.

        Raises:
            InvalidArgument: see :func:`chain_plan`, or a drafter that is not loaded here.
        """
        if config not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = chain_plan(config, self._max_depth, self._catalogue)
            self._drafters.ensure(
                plan,
                lambda: [n for n, m in self._catalogue.items() if not self._drafters.refusal(m)],
            )
            self._plans[config] = plan
        return self._plans[config]

    def _begin_anew(self) -> None:
        """With drafters that have learnt nothing."""
        self._drafters = DrafterSet({"none": NoDrafter(), **self._given}, self._vocab_size)
        self._drafting = Drafting(self._drafters, self._vocab_size)

    # --- after each step --------------------------------------------------------------------------

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int] | npt.NDArray[Any],
        tokens: Tokens,
        owners: Sequence[str] = (),
        wishes: Callable[[int], Wishes] = lambda row: Wishes(),
        is_over: Callable[[str], bool] = lambda owner: False,
    ) -> list[list[int]]:
        """The next draft of each row; an empty one where there is none.

        Args:
            sampled: the tokens that the step committed, for each row; none for a row whose prompt
                is not read to its end.
            lengths: tokens that a row holds, the new ones included.
            tokens: of the rows.  # int32[num_rows, max_length]
            owners: the request of each row, where the engine tells.
            wishes: of the request in a row; asked once, when it is new.
            is_over: whether a request that had a row has ended.
        """
        started = time.perf_counter()
        verify_s = 0.0 if self._returned_at is None else started - self._returned_at
        live = [i for i, new in enumerate(sampled) if len(new)]
        owner = dict(enumerate(owners))
        held = {i: tokens[i, : int(lengths[i])] for i in live}
        known = self._known(live, held, owner)
        outcomes: list[tuple[_Row, Outcome]] = []
        for i in live:
            row = known.get(i)
            if row is None:
                row = self._begin(held[i], owner.get(i, ""), wishes(i))
            else:
                outcomes.append((row, self._commit(row, held[i])))
            row.absent = 0
            self._rows[i] = row
        self._observe(outcomes, verify_s)
        self._sweep(held, is_over)
        rows = [self._rows[i] for i in live]
        self._draft(rows, started)
        self._returned_at = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled]
        for i, row in zip(live, rows, strict=True):
            drafts[i] = row.draft.token_ids.tolist()
        return drafts

    def _known(
        self, live: Sequence[int], held: Mapping[int, Tokens], owner: Mapping[int, str]
    ) -> dict[int, _Row]:
        """The sessions whose rows these are: mostly in their place, else moved or back again."""
        known = {
            i: self._rows[i]
            for i in live
            if i in self._rows and self._rows[i].matches(owner.get(i, ""), held[i])
        }
        if len(known) < len(live):
            taken = set(map(id, known.values()))
            others = [row for row in (*self._rows.values(), *self._parked) if id(row) not in taken]
            # The longest prefix first: a short session may be the beginning of several rows.
            others.sort(key=lambda row: -row.session.length)
            for i in live:
                if i not in known:
                    found = next((r for r in others if r.matches(owner.get(i, ""), held[i])), None)
                    if found is not None:
                        others.remove(found)
                        known[i] = found
        taken = set(map(id, known.values()))
        left = {i: row for i, row in self._rows.items() if id(row) not in taken}
        self._parked = [row for row in self._parked if id(row) not in taken]
        self._parked += [row for i, row in left.items() if i in held]  # their rows are others' now
        self._rows = {i: row for i, row in left.items() if i not in held} | known
        return known

    def _begin(self, held: Tokens, owner: str, wishes: Wishes) -> _Row:
        try:
            plan = self.plan(wishes.speculation or self._default)
        except InvalidArgument as error:  # who let the request in knows other drafters
            logger.warning("a request gets no drafts: %s", error)
            plan = AR_PLAN
        self._num_made += 1
        session = Session(
            f"row-{self._num_made}",
            held.tolist(),
            SamplingParams(max_tokens=self._max_length, ignore_eos=True),
            plan,
            max_length=min(self._max_length, wishes.max_length or self._max_length),
            length_context=self._context,
            prediction=wishes.prediction,
        )
        if wishes.prompt_length is not None:
            session.prompt_length = wishes.prompt_length
        buffer = np.empty(self._max_length + 1, np.int32)
        buffer[: len(held)] = held
        row = _Row(session, owner, buffer)
        self._drafting.open(session)
        return row

    def _commit(self, row: _Row, held: Tokens) -> Outcome:
        """Bring a session up to its row: what became of its draft."""
        session, draft = row.session, row.draft
        before = session.length
        new = held[before:].tolist()
        row.tokens[before : len(held)] = held[before:]
        session.token_ids += new
        session.stats.num_tokens += len(new)
        path = accepted_path(draft, new)
        return Outcome(
            draft=draft,
            path=path,
            next_token=new[len(path)],
            token_ids=tuple(new[: len(path) + 1]),
            num_accepted=len(path),
            verification=NO_VERIFICATION,
        )

    def _observe(self, outcomes: Sequence[tuple[_Row, Outcome]], verify_s: float) -> None:
        for row, outcome in outcomes:
            row.session.stats.count(outcome, row.draft_seconds, verify_s)
            row.session.length_controller.observe(outcome, row.draft_seconds, verify_s)
        self._drafting.observe([row.session for row, _ in outcomes], [o for _, o in outcomes])

    def _draft(self, rows: Sequence[_Row], started: float) -> None:
        load = Load(len(rows), 0, sum(row.session.length for row in rows))
        asked: list[tuple[_Row, Budget]] = []
        for row in rows:
            row.draft = EMPTY_DRAFT
            budget = round_budget(row.session, load)
            depth = min(budget.depth, self._max_depth)
            if depth > 0:
                asked.append((row, Budget(depth, min(budget.nodes, depth))))
        drafts = self._drafting.propose([row.session for row, _ in asked], [b for _, b in asked])
        for (row, budget), draft in zip(asked, drafts, strict=True):
            if draft.is_sound(self._vocab_size):
                row.draft = first_path(draft, budget.depth)
        seconds = time.perf_counter() - started
        for row in rows:
            row.draft_seconds = seconds

    # --- rows that are gone -----------------------------------------------------------------------

    def _sweep(self, held: Container[int], is_over: Callable[[str], bool]) -> None:
        """Close sessions that have ended, or have had no row for a while."""

        def stays(row: _Row) -> bool:
            row.absent += 1
            if row.absent <= ABSENT_STEPS and not (row.owner and is_over(row.owner)):
                return True
            self._drafting.close(row.session)
            return False

        self._rows = {i: row for i, row in self._rows.items() if i in held or stays(row)}
        self._parked = [row for row in self._parked if stays(row)]

    def forget(self) -> None:
        """Close all sessions, and drop what drafters have learnt from earlier ones."""
        for row in (*self._rows.values(), *self._parked):
            self._drafting.close(row.session)
        self._rows, self._parked = {}, []
        self._begin_anew()
        self._context = LengthContext(vocab_size=self._vocab_size)
        self._plans.clear()

    @property
    def num_sessions(self) -> int:
        """Sessions that are held, those without a row included."""
        return len(self._rows) + len(self._parked)


def chain_plan(
    config: SpeculationConfig, max_depth: int, catalogue: Mapping[str, Method] = METHODS
) -> Plan:
    """The plan of a configuration for an engine that verifies chains by a rule of its own.

    A row that drafts a tree drafts its best chain, unless the configuration asks for a shape.

    Raises:
        InvalidArgument: what :func:`paceline.plan.resolve` raises; a shape or a rule that the
            engine does not have; a drafter that needs more than tokens; a draft that is too long.
    """
    plan = resolve(config, catalogue)
    if plan.shape is not None and plan.shape != chain():
        if config.shape is not None:
            raise InvalidArgument("shape", config.shape, "'chain': vLLM verifies no trees")
        plan = resolve(config.model_copy(update={"shape": "chain"}), catalogue)
    if plan.rule.name not in ("coupled", "greedy"):
        raise InvalidArgument(
            "acceptance", plan.rule.name, "'coupled': vLLM accepts by a rule of its own"
        )
    lacking = needs_beyond_tokens(plan)
    if lacking:
        raise InvalidArgument(
            "method", config.method, f"a method that drafts from tokens alone: vLLM gives its "
            f"drafters no {', '.join(lacking)}",
        )  # fmt: skip
    depth = plan.config.num_speculative_tokens or 0
    if depth > max_depth and config.num_speculative_tokens is not None:
        raise InvalidArgument(
            "num_speculative_tokens", depth, f"at most {max_depth}, which this engine was started "
            "with (vllm.max_speculative_tokens)",
        )  # fmt: skip
    return replace(plan, rule=ChainRule())


def needs_beyond_tokens(plan: Plan) -> list[str]:
    """What the drafters of a plan want of the target that rows of tokens do not have."""
    rows = (plan.method, *plan.parts)
    return sorted({need.value for row in rows for need in row.needs - row.optional_needs})


def first_path(draft: Draft, depth: int) -> Draft:
    """The chain of first children, which are the best ones, at most ``depth`` deep."""
    if is_chain(draft.parent_indices):
        return draft if draft.num_nodes <= depth else Draft.chain(draft.token_ids[:depth])
    followers = children(draft.parent_indices)
    path: list[int] = []
    node = -1
    while len(path) < depth and followers[node]:
        node = followers[node][0]
        path.append(node)
    return Draft.chain(draft.token_ids[path])
