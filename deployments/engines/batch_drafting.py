"""Paceline's drafters for an engine that shows them nothing but its batch of tokens.

After each step, vLLM asks a proposer for the next draft of every row of its batch. It tells which
tokens a row holds and how many of them are new, but not which request the row belongs to: requests
come, go, change rows and are preempted without notice. :class:`BatchDrafting` finds each session
again by its row, its request id (if the engine gives one) and its prefix, and runs steps 1 and 5 of
the decode loop for it. The engine verifies, accepts and commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import SpeculationConfig
from paceline.deployments.vllm_plan import chain_plan
from paceline.drafters.base import Drafter
from paceline.drafters.none import NoDrafter
from paceline.engine.drafting import DrafterSet, Drafting, round_budget
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS, Method
from paceline.plan import AR_PLAN, Plan
from paceline.rpc.mirrors import NO_VERIFICATION
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tree import accepted_path, children, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft, Load, Outcome

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]

MAX_PLANS = 256
"""Plans that are kept for later requests; a session keeps its own in any case."""
ABSENT_STEPS = 32
"""Steps without a row after which a session is closed; a preempted one then starts anew."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What a request says about its drafts.

    Attributes:
        speculation: method and knobs; None: the engine's default.
        prediction: token ids of the expected output.
        prompt_length, max_length: of the request, in tokens; None if unknown.
    """

    speculation: SpeculationConfig | None = None
    prediction: tuple[int, ...] = ()
    prompt_length: int | None = None
    max_length: int | None = None


@dataclass(slots=True, eq=False)
class _Tracked:
    """A session, the request that it belongs to, and its last draft."""

    session: Session
    owner: str
    tokens: Tokens  # [max_length + 1]; only the first session.length are valid
    draft: Draft = EMPTY_DRAFT
    draft_seconds: float = 0.0
    absent: int = 0

    def matches(self, owner: str, tokens: Tokens) -> bool:
        """Whether a row with these tokens can be this session some tokens later."""
        length = self.session.length
        return (
            self.owner == owner
            and len(tokens) > length
            and bool(np.array_equal(self.tokens[:length], tokens[:length]))
        )


class BatchDrafting:
    """Drafts for the rows of an engine's batch.

    Args:
        default: method and knobs of requests that name none.
        vocab_size: of the target.
        max_length: tokens of the longest sequence.
        max_depth: tokens of the longest draft that the engine takes.
        drafters: those that are not made here, by their names in the catalogue: a draft model, or
            drafter replicas.

    Raises:
        InvalidArgument: the engine cannot run ``default``.
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
        self._rows: dict[int, _Tracked] = {}
        self._parked: list[_Tracked] = []
        self._returned_at: float | None = None
        self._num_made = 0
        self.plan(default)

    # --- plans ------------------------------------------------------------------------------------

    def plan(self, config: SpeculationConfig) -> Plan:
        """The plan of a configuration, with a chain in place of a tree.

        Raises:
            InvalidArgument: as :func:`chain_plan`, or a drafter is not loaded here.
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
        """Make new drafters, which have learnt nothing."""
        self._drafters = DrafterSet({"none": NoDrafter(), **self._given}, self._vocab_size)
        self._drafting = Drafting(self._drafters, self._vocab_size)

    # --- after each step --------------------------------------------------------------------------

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Sequence[int] | npt.NDArray[Any],
        tokens: Tokens,
        owners: Sequence[str] = (),
        options: Callable[[int], DraftOptions] = lambda row: DraftOptions(),
        is_over: Callable[[str], bool] = lambda owner: False,
    ) -> list[list[int]]:
        """The next draft of each row; an empty list is no draft.

        Args:
            sampled: for each row the tokens that the step committed; none while the engine still
                reads the row's prompt.
            lengths: how many tokens each row holds, the new ones included.
            tokens: the rows' tokens.  # [num_rows, max_length] int32
            owners: the request id of each row, if the engine gives it.
            options: the options of the request in a row; called once for each new request.
            is_over: whether the request with this id has ended.
        """
        started = time.perf_counter()
        verify_s = 0.0 if self._returned_at is None else started - self._returned_at
        live = [i for i, new in enumerate(sampled) if len(new)]
        owner = dict(enumerate(owners))
        held = {i: tokens[i, : int(lengths[i])] for i in live}
        known = self._known(live, held, owner)
        outcomes: list[tuple[_Tracked, Outcome]] = []
        for i in live:
            row = known.get(i)
            if row is None:
                row = self._begin(held[i], owner.get(i, ""), options(i))
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
    ) -> dict[int, _Tracked]:
        """The session of each row: mostly the one it had, else one that moved or came back."""
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
        self._parked += [
            row for i, row in left.items() if i in held
        ]  # other sessions have their rows now
        self._rows = {i: row for i, row in left.items() if i not in held} | known
        return known

    def _begin(self, held: Tokens, owner: str, options: DraftOptions) -> _Tracked:
        """Open a session for a new row."""
        try:
            plan = self.plan(options.speculation or self._default)
        except InvalidArgument as error:  # the process that took the request has other drafters
            logger.warning("a request goes on without drafts: %s", error)
            plan = AR_PLAN
        self._num_made += 1
        session = Session(
            f"row-{self._num_made}",
            held.tolist(),
            SamplingParams(max_tokens=self._max_length, ignore_eos=True),
            plan,
            max_length=min(self._max_length, options.max_length or self._max_length),
            length_context=self._context,
            prediction=options.prediction,
        )
        if options.prompt_length is not None:
            session.prompt_length = options.prompt_length
        buffer = np.empty(self._max_length + 1, np.int32)
        buffer[: len(held)] = held
        row = _Tracked(session, owner, buffer)
        self._drafting.open(session)
        return row

    def _commit(self, row: _Tracked, held: Tokens) -> Outcome:
        """Add a row's new tokens to its session; returns what became of its draft."""
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

    def _observe(self, outcomes: Sequence[tuple[_Tracked, Outcome]], verify_s: float) -> None:
        for row, outcome in outcomes:
            row.session.stats.count(outcome, row.draft_seconds, verify_s)
            row.session.length_controller.observe(outcome, row.draft_seconds, verify_s)
        self._drafting.observe([row.session for row, _ in outcomes], [o for _, o in outcomes])

    def _draft(self, rows: Sequence[_Tracked], started: float) -> None:
        load = Load(len(rows), 0, sum(row.session.length for row in rows))
        asked: list[tuple[_Tracked, Budget]] = []
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

    # --- sessions without a row -------------------------------------------------------------------

    def _sweep(self, held: Container[int], is_over: Callable[[str], bool]) -> None:
        """Close sessions that have ended, or have had no row for ``ABSENT_STEPS`` steps."""

        def stays(row: _Tracked) -> bool:
            row.absent += 1
            if row.absent <= ABSENT_STEPS and not (row.owner and is_over(row.owner)):
                return True
            self._drafting.close(row.session)
            return False

        self._rows = {i: row for i, row in self._rows.items() if i in held or stays(row)}
        self._parked = [row for row in self._parked if stays(row)]

    def forget(self) -> None:
        """Close all sessions, and drop what drafters have learnt."""
        for row in (*self._rows.values(), *self._parked):
            self._drafting.close(row.session)
        self._rows, self._parked = {}, []
        self._begin_anew()
        self._context = LengthContext(vocab_size=self._vocab_size)
        self._plans.clear()

    @property
    def num_sessions(self) -> int:
        """How many sessions are open, those without a row included."""
        return len(self._rows) + len(self._parked)


def first_path(draft: Draft, depth: int) -> Draft:
    """The chain of first children, which are the best ones, cut at ``depth``."""
    if is_chain(draft.parent_indices):
        return draft if draft.num_nodes <= depth else Draft.chain(draft.token_ids[:depth])
    followers = children(draft.parent_indices)
    path: list[int] = []
    node = -1
    while len(path) < depth and followers[node]:
        node = followers[node][0]
        path.append(node)
    return Draft.chain(draft.token_ids[path])
