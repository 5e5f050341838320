"""Chooses drafter and length anew in every round: the length controller of method ``auto``.

Under the coupled rule the committed text is the same whatever drafted it, so it judges every draft
that was made, verified or not: what a draft would have had accepted is its common prefix with what
was committed after it (the full information of "Not-a-Bandit", 2025, arXiv 2510.20064). A draft
costs a lookup next to nothing, so lookups draft in every round in which that pays, and the choice
comes after their drafts: a long match promises more than a short one. What a model would draft is
only known once it has; a model that is not chosen drafts now and then within a share of the time.

Each choice is the one with the most expected tokens per second, by the costs of this machine
(:class:`paceline.lengths.goodput.Learnt`) and the acceptance seen so far: in this session, and
before anything was seen in it, in earlier sessions whose prompts look alike. AR is always among the
choices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    ConfidenceStop,
    LengthBounds,
    LengthContext,
    LengthPart,
    Line,
    length_bounds,
)
from paceline.lengths.experience import (
    HEAD_COST,
    MATCHED,
    RELAY,
    SHARED_MEMORY,
    SUFFIX,
    DepthRates,
    Members,
    Roster,
    crowd_of,
    crowded,
    experience_of,
)
from paceline.lengths.goodput import (
    CATCH_UP,
    HORIZON,
    UNLIKELY,
    Learnt,
)
from paceline.lengths.rest import Rest
from paceline.tree import is_chain
from paceline.types import Asked, Budget, Draft, Load, Need, Outcome, Pick, RoundCosts, StopRule

if TYPE_CHECKING:
    from paceline.knobs import Knobs
    from paceline.sampling import SamplingParams
    from paceline.view import SessionView

LEAST_GAIN = 1.03  # of tokens over the time that they cost: estimates are no more accurate
LEARNING_SHARE = 0.02  # of the time: drafts that are made only to be judged
MOST_CREDIT = 32  # rounds whose share may be saved up for a dear draft
MEMORY = 0.95  # decay of what one session has learnt, for each judged draft
UNKNOWN_COST = 0.2  # of a model's first draft, in rounds of AR
UNKNOWN_READ = 1.0 / 64.0  # of a token by a model, in rounds of AR
FIRST_COST = 0.5  # that it counts as at most, when it has been made
HOT = 2  # right tokens of a draft after which the next one is likelier to be right, too
PACE_ROUNDS = 4.0  # rounds of AR whose time other sessions' speed outweighs a session's own
FIRST_ASKS = 4  # rounds in which a new session asks every quick drafter
TRUSTED_DRAFTS = 4.0  # weight of the guess that lookups are right as often as in other sessions
WORTH_MEMORY = 0.9  # decay of what a quick drafter's drafts have saved, for each time it was asked
REACHED = 0.7  # probability that all tokens before a draft's next one are right
MOST_SURE = 0.9  # highest confidence that a draft must have to go on
PATIENCE_S = 0.08  # longest wait for a draft of another process
NOTHING, NO_PICK, NO_LOAD = Budget(0, 0), Pick(None, 0), Load(0, 0)
REPEATERS = frozenset({"prompt_lookup", "copyspec"})  # draft what the session's own text repeats
LONG_PROMPT = 512  # tokens: there is much to copy from


class _Pace:
    """Tokens and seconds of recent rounds."""

    def __init__(self, memory: float) -> None:
        self.tokens = self.seconds = 0.0
        self._memory = memory

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self._memory * self.tokens + tokens
        self.seconds = self._memory * self.seconds + seconds

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class _Known:
    """What the sessions of an engine know together: acceptance by kind of prompt, and costs."""

    def __init__(self, longest: int, context: LengthContext) -> None:
        self.longest = longest
        self._costs = context.costs if longest else None
        self.learnt = Learnt(longest, (longest,), self._costs)
        self.experience = experience_of(context)
        self._draft: dict[tuple[str, int], Line] = {}
        self._once: set[tuple[str, int]] = set()  # of these, one draft alone was timed
        self._read: dict[str, float] = {}  # seconds for each token that a drafter must read first
        self.ask: dict[str, float] = {}  # seconds of a quick drafter's draft
        self.look = 0.0  # seconds of a session's lookups and choice
        self._verify: tuple[Load | None, list[float]] = None, []
        self.pace = _Pace(SHARED_MEMORY)

    def acceptance(self, workload: str, drafter: str, kind: int) -> DepthRates:
        return self.experience.rates(self.longest, workload, drafter, kind)

    def verify(self, load: Load) -> list[float]:
        """Seconds of a round by the nodes it verifies, drafting left out.  # [longest + 1]

        In a batch, most rounds have drafts of one session or two. Where the first rows beyond AR's
        cost more than others (kernels take four together), such drafts cost more than their part
        of what drafts of all sessions would.
        """
        if self._verify[0] is not load:  # once for all sessions of a step
            batch, learnt = max(1, load.num_running), self.learnt
            seconds = [learnt.verify_seconds(n, load) for n in range(self.longest + 1)]
            if batch > 1:
                for n in range(1, self.longest + 1):
                    alone = seconds[0] + batch * learnt.row_seconds(n, load)
                    seconds[n] = max(seconds[n], alone)
            self._verify = load, seconds
        return self._verify[1]

    def draft(self, drafter: str, load: Load) -> tuple[float, float] | None:
        """Seconds of a model's draft: for any, and for each token; None: not known yet."""
        key = drafter, load.num_running.bit_length()
        line, costs = self._draft.get(key), self._measured(drafter)
        if line is None and costs is not None:
            line = self._draft[key] = Line()
            for depth in (1, 4):
                line.add(depth, costs.draft(depth, load.num_running))
        return None if line is None else line.fit(least_spread=2.0)

    def is_timed(self, drafter: str, load: Load) -> bool:
        """Whether the cost of a model's draft is known, and not from a single one."""
        key = drafter, load.num_running.bit_length()
        return self.draft(drafter, load) is not None and key not in self._once

    def _measured(self, drafter: str) -> RoundCosts | None:
        """The costs measured before the first round, if this drafter was among them."""
        known = self._costs is not None and drafter in self._costs.methods
        return self._costs if known else None

    def read(self, drafter: str, load: Load) -> float:
        """Seconds for a model to read a token that each session has, and it missed."""
        costs, seconds = self._measured(drafter), self._read.get(drafter)
        if seconds is None:
            seconds = UNKNOWN_READ * self.verify(load)[0] if costs is None else costs.read_seconds
        return load.num_running * seconds

    def timed(
        self, drafter: str, depth: int, behind: int, seconds: float, load: Load, together: int
    ) -> float:
        """Learn what a model's draft cost, for which it read ``behind`` tokens first.

        Args:
            together: as :attr:`paceline.types.Asked.together`.

        Returns:
            Seconds of a round if every session drafts like this one.
        """
        key = drafter, load.num_running.bit_length()
        line = self._draft.get(key)
        sessions = max(1.0, load.num_running / together) if together else 1.0
        took = seconds = seconds * sessions
        if line is None:  # the first draft may be disturbed: it must not look too dear to ask again
            seconds = min(seconds, FIRST_COST * self.verify(load)[0])
            self._once.add(key)
        else:
            self._once.discard(key)
        if line is None or behind <= CATCH_UP:  # too much is better than nothing: less corrects it
            self._draft.setdefault(key, Line()).add(depth, seconds)
        else:
            reading = max(0.0, seconds - line.at(depth)) / (behind * sessions)
            self._read[drafter] = 0.5 * (self._read.get(drafter, reading) + reading)
        return took

    def looked(self, seconds: float) -> None:
        """Learn what it cost a session to look for drafts."""
        before = self.look or seconds
        self.look = 0.9 * before + 0.1 * min(seconds, 4 * before)

    def asked(self, drafter: str, seconds: float) -> None:
        """Learn what a quick drafter's draft cost."""
        before = self.ask.get(drafter, seconds)
        self.ask[drafter] = 0.9 * before + 0.1 * min(seconds, 4 * before)


class _Unjudged:
    """A draft whose fate is not known yet.

    Attributes:
        start: committed tokens that it follows.
        kind: its class, as in :func:`_class_of`.
        asked: tokens that were wanted; those it lacks count as wrong.
        first: its first tokens are another drafter's: it is judged only if they are right.
        right: its tokens that were committed, so far.
    """

    __slots__ = ("asked", "drafter", "first", "kind", "right", "start", "tokens")

    def __init__(
        self, drafter: str, kind: int, start: int, tokens: list[int], asked: int, first: int
    ) -> None:
        self.drafter, self.kind, self.start, self.tokens = drafter, kind, start, tokens
        self.asked, self.first, self.right = asked, first, 0

    def settle(self, token_ids: list[int]) -> bool:
        """Count its right tokens as far as the text goes; whether its fate is known."""
        tokens, place, known = self.tokens, self.start + self.right, len(token_ids)
        while self.right < len(tokens) and place < known:
            if token_ids[place] != tokens[self.right]:
                return True
            self.right += 1
            place += 1
        return self.right == len(tokens)


class _Offer(NamedTuple):
    """A round that may come: its drafter (None: AR) and depth, expected tokens and seconds."""

    drafter: str | None
    depth: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def gain(self, speed: float) -> float:
        """Tokens beyond those that its seconds are worth at ``speed``."""
        return self.tokens - speed * self.seconds


class _Promise(NamedTuple):
    """What a round's drafters cost and the chosen one is expected to save, in AR's rounds; its
    expected tokens; and the tokens that a round of AR is worth."""

    workload: str
    costs: dict[str, float]
    chosen: str | None
    saved: float
    tokens: float
    worth: float

    def costing(self, more: float) -> _Promise:
        """As this one, where the draft has cost ``more`` rounds of AR than expected.

        A head that reads a prompt counts on many drafts. Where others draft the most, it has read
        for nothing.
        """
        return self._replace(saved=self.saved - more)

    def settle(self, roster: Roster, num_tokens: int) -> None:
        """Tell the roster what was saved, now that the round's tokens are known.

        The best of several estimates is too high on average. Without this correction a drafter that
        saves nothing would stay.
        """
        saved = 0.0
        if self.chosen is not None:
            saved = self.saved + (num_tokens - self.tokens) / self.worth
        roster.count(self.workload, self.costs, self.chosen, saved)


class _Trust:
    """How far a session's text repeats as others did: of the lookups' drafts that were expected to
    begin right, the share that has; 1 at most.

    Each class of drafts has rates of its own, and in a session few drafts. Where those of one class
    are wrong, so are the next ones of other classes.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._expected = self._came = 0.0
        self._known: list[DepthRates] = []

    def near(self, shared: DepthRates, kind: int) -> DepthRates:
        """A session's rates of a class of drafts, of which others have ``shared``."""
        if kind <= 1:  # a model's
            return DepthRates(self._longest, shared.rates, MEMORY)
        self._known.append(known := DepthRates(self._longest, lambda: self._part(shared), MEMORY))
        return known

    def _part(self, shared: DepthRates) -> list[float]:
        part = (self._came + TRUSTED_DRAFTS) / (self._expected + TRUSTED_DRAFTS)
        return [min(1.0, part) * rate for rate in shared.rates()]

    def settle(self, draft: _Unjudged, shared: DepthRates) -> None:
        """Learn from a draft whose fate is known; those of models tell nothing of the text."""
        if draft.kind > 1:
            self._expected = MEMORY * self._expected + shared.rates()[0]
            self._came = MEMORY * self._came + (draft.right > 0)
            for known in self._known:
                known.renew()


class _Candidate:
    """What a session knows of one drafter."""

    __slots__ = (
        "acceptance", "asks", "hot", "length", "num_accepted", "num_picked", "promised", "worth",
    )  # fmt: skip

    def __init__(self) -> None:
        self.acceptance: dict[int, DepthRates] = {}  # by class of the draft
        self.asks = 0
        self.hot = False  # its last draft was right for HOT tokens
        self.worth = 0.0  # seconds that asking saves
        self.length = 0  # tokens that it has read (a model)
        self.num_picked = self.num_accepted = 0
        self.promised = 0.0  # tokens per second, when last considered

    def told(self) -> dict[str, Any]:
        """How often it was chosen, what was accepted, its acceptance by depth, and the tokens per
        second that it promised when it was last considered."""
        return {
            "rounds": self.num_picked,
            "accepted": self.num_accepted,
            "acceptance": [round(rate, 3) for rate in self.usual()[:4]],
            "promised_tokens_per_second": round(self.promised, 1),
        }

    def has_saved(self, seconds: float) -> None:
        """Learn what asking it was worth."""
        self.worth = WORTH_MEMORY * self.worth + (1.0 - WORTH_MEMORY) * seconds

    def pass_over(self) -> None:
        """Count what is known less: drafts that are not made teach nothing."""
        for known in self.acceptance.values():
            known.fade()

    def usual(self) -> list[float]:
        """The acceptance of the class of drafts that it knows best."""
        known = max(self.acceptance.values(), key=lambda each: each.experience, default=None)
        return known.rates() if known is not None else []


class Auto:
    """One session's choice of drafter and length, and what it has learnt.

    ``budget`` allows the longest draft; the drafter then asks this object as the
    :class:`paceline.types.Portfolio` of the budget.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, bounds: LengthBounds, config: Knobs, context: LengthContext) -> None:
        self._longest = min(bounds.longest, bounds.nodes)
        names, self._num_sessions = getattr(config, "drafters", None) or (), context.num_sessions
        self._members = Members(names, self._num_sessions() + 1)
        self._known = context.shared(
            ("auto", self._longest), lambda: _Known(self._longest, context)
        )
        self._candidates: dict[str, _Candidate] = defaultdict(_Candidate)
        self._unjudged: list[_Unjudged] = []
        self._found: dict[str, Draft] = {}
        self._match: Draft | None = None  # suffix decoding's
        self._costs: dict[str, tuple[float, float, float]] = {}  # of models, in this round
        self._credit = 0.0  # seconds that may be spent on learning
        self._pace, self._rest, self._trust = _Pace(MEMORY), Rest(), _Trust(self._longest)
        self._stop = ConfidenceStop(1, 0.0)
        self.stop_rule: StopRule | None = self._stop
        self._promise: _Promise | None = None
        self._pick, self._workload, self._num_ar = NO_PICK, "", 0
        self._load = NO_LOAD

    # --- as a length controller ----------------------------------------------------------------

    def budget(self, session: SessionView, load: Load) -> Budget:
        """The longest draft that fits; :meth:`pick` then chooses within it."""
        if self._unjudged:
            self._judge(session.token_ids)
        self._step = step = self._known.learnt.step(load)
        self._session, self._load, self._pick, self._promise = session, load, NO_PICK, None
        step.first = step.first or session.session_id
        self._room = min(self._longest, session.remaining - 1) if self._members.names else 0
        crowd = crowd_of(load.num_running) > 0
        rests = self._room <= 0 or step.measures_ar
        if rests or self._rest.goes_on(session.token_ids, in_crowd=crowd):
            self._num_ar += 1
            step.asked.append(NOTHING)
            return NOTHING
        step.num_looking += 1
        self._found, self._costs, self._match = {}, {}, None
        return Budget(self._room, self._room, portfolio=self, patience_s=PATIENCE_S)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """As :meth:`paceline.lengths.base.LengthController.observe`."""
        step, known = self._step, self._known
        if not step.asked:  # the drafter failed before it asked
            step.asked.append(NOTHING)
        if not step.recorded:
            if step.num_looking and not step.more_than_looks:
                known.looked(draft_seconds / step.num_looking)
            known.learnt.record(step, outcome, draft_seconds, verify_seconds)
        seconds = draft_seconds + verify_seconds
        share = LEARNING_SHARE * seconds
        self._credit = min(self._credit + share, MOST_CREDIT * share)
        seconds += known.learnt.overhead
        known.pace.add(len(outcome.token_ids), seconds)
        self._pace.add(len(outcome.token_ids), seconds)
        if self._pick.drafter is not None:
            self._candidates[self._pick.drafter].num_accepted += outcome.num_accepted
        if self._promise is not None:
            self._promise.settle(self._known.experience.roster, len(outcome.token_ids))

    @property
    def drafter(self) -> str | None:
        """Which drafter drafted what the last round verified; None: none."""
        return self._pick.drafter

    # --- as a portfolio ------------------------------------------------------------------------

    def leaving(self, session: SessionView) -> Sequence[str]:
        """As :meth:`paceline.types.Portfolio.leaving`."""
        self._workload = self._workload or workload_of(
            session.prompt_length, bool(session.prediction), session.params
        )
        number = self._load.num_running or self._num_sessions()
        roster = self._known.experience.roster
        return () if session.prediction else self._members.leave(number, self._workload, roster)

    def asks(self, drafter: str) -> int:
        """As :meth:`paceline.types.Portfolio.asks`."""
        if drafter in REPEATERS and self._rest.in_vain:
            return 0
        candidate = self._candidates[drafter]
        price = self._load.num_running * self._known.ask.get(drafter, 0.0)
        cheap = price <= LEARNING_SHARE * self._known.verify(self._load)[0]
        if not (cheap and candidate.asks < FIRST_ASKS) and candidate.worth < price:
            if self._credit < price:
                return 0
            self._credit -= price
        candidate.asks += 1
        return self._room

    def found(self, drafter: str, draft: Draft, seconds: float) -> None:
        """As :meth:`paceline.types.Portfolio.found`."""
        if drafter == SUFFIX:
            self._match = draft
        if self._candidates[drafter].asks > 1:
            self._known.asked(drafter, seconds)
        else:  # it has read the prompt as well
            self._step.more_than_looks = True
        if draft.num_nodes and is_chain(draft.parent_indices):
            self._found[drafter] = draft
        else:
            self._candidates[drafter].has_saved(0.0)

    def pick(self, drafters: Sequence[str]) -> Pick:
        """As :meth:`paceline.types.Portfolio.pick`."""
        verify = self._known.verify(self._load)
        speed = self._speed(verify[0])
        offers = [_Offer(None, 0, 1.0, verify[0])]
        for name, draft in self._found.items():
            self._await(name, draft.token_ids.tolist(), draft.num_nodes)
            offers += self._offers(name, draft.num_nodes, (0.0, 0.0, 1.0), speed)
        for name in drafters:
            offers += self._offers(name, self._longest_of(name), self._cost(name), speed)
        # A higher speed than the best round's was luck, and estimates are not so accurate.
        speed = LEAST_GAIN * min(speed, max(offer.speed for offer in offers))
        chosen, depth, *_ = best = max(offers, key=lambda offer: offer.gain(speed))
        if best.speed * verify[0] <= LEAST_GAIN:
            chosen, depth = None, 0
        # Lookups often find the same: one of them, which is chosen then, has what all would save.
        rivals = (o for o in offers if o.drafter != chosen and o.drafter not in self._found)
        second = max((offer.gain(speed) for offer in rivals), default=best.gain(speed))
        lead = 0.0 if chosen is None else (best.gain(speed) - second) / speed
        for name in self._found:
            self._candidates[name].has_saved(lead if name == chosen else 0.0)
        saved = 0.0 if chosen is None else (best.gain(speed) - offers[0].gain(speed)) / speed
        self._rest.looked(saved, self._load.num_running * self._known.look, verify[0])
        if chosen is None:
            self._num_ar += 1
        else:
            self._candidates[chosen].num_picked += 1
            self._stop.threshold = self._least_sure(chosen, depth, speed)
        costs = dict.fromkeys(drafters, HEAD_COST)
        workload, worth = crowded(self._workload, self._load.num_running), speed * verify[0]
        self._promise = _Promise(workload, costs, chosen, lead / verify[0], best.tokens, worth)
        others = [name for name in drafters if name != chosen]
        for name in others:
            self._candidates[name].pass_over()
        probe = self._probe(others)
        self._step.asked.append(Budget(depth, depth))
        self._step.has_shadow |= probe is not None
        self._step.more_than_looks |= probe is not None or chosen in drafters
        self._pick = Pick(chosen, depth, probe)
        return self._pick

    def _least_sure(self, drafter: str, depth: int, speed: float) -> float:
        """Confidence below which one more token costs more than it promises."""
        if depth < 2 or drafter in self._found:
            return 0.0
        verify = self._known.verify(self._load)
        seconds = (verify[depth] - verify[1]) / (depth - 1) + self._cost(drafter)[1]
        return min(MOST_SURE, max(0.0, speed * seconds / REACHED))

    def drafted(self, drafter: str, draft: Draft, seconds: float, asked: Asked) -> int:
        """As :meth:`paceline.types.Portfolio.drafted`."""
        candidate, nodes = self._candidates[drafter], draft.num_nodes
        if seconds and nodes:
            behind = asked.length - candidate.length
            took = self._known.timed(drafter, nodes, behind, seconds, self._load, asked.together)
            if self._promise is not None and drafter == self._pick.drafter:
                first, slope, _ = self._costs[drafter]
                more = (took - first - slope * nodes) / self._known.verify(self._load)[0]
                self._promise = self._promise.costing(more)
        candidate.length = asked.length
        if not nodes or not is_chain(draft.parent_indices):
            return 0
        self._known.experience.went_on(drafter, nodes, asked.depth)
        self._await(drafter, draft.token_ids.tolist(), asked.depth, start=asked.length)
        return self._room - nodes if drafter == self._pick.drafter and nodes == asked.depth else 0

    def extended(self, draft: Draft, behind: list[int]) -> int:
        """As :meth:`paceline.types.Portfolio.extended`."""
        drafter = self._pick.drafter
        assert drafter is not None
        tokens, nodes = [*draft.token_ids.tolist(), *behind], draft.num_nodes
        self._await(RELAY, tokens, len(behind), first=nodes)
        verify, reached = self._known.verify(self._load), math.prod(self._rates(drafter)[:nodes])
        rates = self._rates(RELAY)[: len(behind)]
        return _best_addition(rates, reached, verify[nodes:], self._speed(verify[0]))

    # --- what it knows -------------------------------------------------------------------------

    def explain(self) -> dict[str, Any]:
        """What the session has chosen and why, with each drafter's :meth:`_Candidate.told`."""
        verify = self._known.verify(self._load) if self._workload else [0.0]
        return {
            "workload": self._workload,
            "ar_rounds": self._num_ar,
            "ar_round_ms": round(1e3 * verify[0], 3),
            "last": self._pick.drafter or "ar",
            "drafters": {name: each.told() for name, each in self._candidates.items()},
        }

    def _speed(self, ar: float) -> float:
        """Tokens per second that time is worth: the usual ones, but no fewer than AR's."""
        tokens, seconds = self._pace.tokens, self._pace.seconds
        if self._known.pace.tokens:
            usual = PACE_ROUNDS * ar
            tokens += usual * self._known.pace.speed
            seconds += usual
        return max(1.0 / ar, tokens / seconds if seconds else 0.0)

    def _class(self, drafter: str) -> int:
        hot = self._candidates[drafter].hot
        return _class_of(drafter, self._found.get(drafter), self._match, hot)

    def _rates(self, drafter: str) -> list[float]:
        return self._acceptance(drafter, self._class(drafter)).rates()

    def _acceptance(self, drafter: str, kind: int) -> DepthRates:
        known = self._candidates[drafter].acceptance
        if kind not in known:
            shared = self._known.acceptance(self._workload, drafter, kind)
            known[kind] = self._trust.near(shared, kind)
        return known[kind]

    def _longest_of(self, drafter: str) -> int:
        """Longest draft of a model; two short ones show what its drafts cost."""
        return min(self._room, self._room if self._known.is_timed(drafter, self._load) else 2)

    def _cost(self, drafter: str) -> tuple[float, float, float]:
        """What a model's draft takes, in this round.

        Returns:
            Seconds for any draft, with a share of what it must read; seconds for each token; and
            the probability that a draft goes on after a token.
        """
        if drafter in self._costs:
            return self._costs[drafter]
        unknown = UNKNOWN_COST * self._known.verify(self._load)[0], 0.0
        first, slope = self._known.draft(drafter, self._load) or unknown
        behind = self._session.length - self._candidates[drafter].length
        if behind > CATCH_UP:  # reading must pay within what is left, or within a while
            rounds = max(1.0, min(self._session.remaining, HORIZON) / 2.0)
            first += self._known.read(drafter, self._load) * behind / rounds
        cost = self._costs[drafter] = first, slope, self._known.experience.goes_on(drafter)
        return cost

    def _offers(
        self, drafter: str, longest: int, cost: tuple[float, float, float], speed: float
    ) -> list[_Offer]:
        """Of a drafter's depths, the one worth most where time is worth ``speed`` tokens per
        second, and the one with most tokens per second."""
        rates = self._rates(drafter)[: min(longest, self._room)]
        best, fastest = _best_depths(rates, self._known.verify(self._load), cost, speed)
        if best is None:
            return []
        self._candidates[drafter].promised = fastest[1] / fastest[2]
        return [_Offer(drafter, *best), _Offer(drafter, *fastest)]

    def _probe(self, drafters: Sequence[str]) -> tuple[str, int] | None:
        """A model that drafts beside the round, if there is time to learn something."""
        if not drafters:
            return None
        drafter = min(drafters, key=lambda name: self._candidates[name].length)
        depth = min(self._longest_of(drafter), 4)
        first, slope, _ = self._cost(drafter)
        behind = self._session.length - self._candidates[drafter].length
        price = first + slope * depth + self._known.read(drafter, self._load) * behind
        if self._credit < price:
            return None
        self._credit -= price
        return drafter, depth

    def _await(
        self, drafter: str, tokens: list[int], asked: int, first: int = 0, start: int | None = None
    ) -> None:
        """Have a draft judged, which follows ``start`` committed tokens (None: all)."""
        kind, start = self._class(drafter), self._session.length if start is None else start
        self._unjudged.append(_Unjudged(drafter, kind, start, tokens, asked, first))

    def _judge(self, token_ids: list[int]) -> None:
        """Compare drafts with what was committed after them."""
        going = []
        newest = max((draft.start for draft in self._unjudged), default=0)
        for draft in self._unjudged:
            if draft.settle(token_ids):
                right = draft.right - draft.first
                if right >= 0:
                    shared = self._known.acceptance(self._workload, draft.drafter, draft.kind)
                    self._trust.settle(draft, shared)
                    self._acceptance(draft.drafter, draft.kind).observe(draft.asked, right)
                    shared.observe(draft.asked, right)
            elif len(token_ids) >= draft.start:  # else the session was truncated
                going.append(draft)
            if draft.start == newest:
                hot = self._candidates[draft.drafter].hot = draft.right - draft.first >= HOT
                if hot:
                    self._rest.end()
        self._unjudged = going


def _class_of(drafter: str, draft: Draft | None, match: Draft | None, hot: bool) -> int:
    """What is known of a drafter's next draft, which has acceptance rates of its own.

    Args:
        draft: if it is there already. Longer ones are likelier to be right, except that a short
            match may give a long one: then the length of suffix decoding's counts, if it begins
            alike.
        match: suffix decoding's draft, which may be empty; None: it was not asked.
        hot: whether the drafter's last draft was right.
    """
    if draft is None:
        return int(hot)
    if match is None or drafter == SUFFIX:
        return 2 * min(draft.num_nodes.bit_length(), 4) + hot
    alike = match.num_nodes > 0 and match.token_ids[0] == draft.token_ids[0]
    return MATCHED + 2 * (min(match.num_nodes.bit_length(), 4) if alike else 0) + hot


_Depth = tuple[int, float, float]  # and its expected tokens and seconds


def _best_depths(
    rates: Sequence[float], verify: Sequence[float], cost: tuple[float, float, float], speed: float
) -> tuple[_Depth | None, _Depth]:
    """The depth worth most at ``speed`` tokens per second, if any; and the one with most of them.

    Args:
        rates: acceptance by depth.
        verify: seconds of a round by the nodes that it verifies.
        cost: as :meth:`Auto._cost`.
    """
    first, slope, goes_on = cost
    gain, pace = -math.inf, 0.0
    best: _Depth | None = None
    fastest = 0, 1.0, verify[0]
    tokens = reached = alive = 1.0
    nodes = 0.0
    # The loop of every round: it makes no object for a depth.
    for depth, rate in enumerate(rates, 1):
        reached *= rate
        if reached < UNLIKELY:
            break
        tokens += reached
        nodes += alive
        alive *= goes_on
        whole = int(nodes)
        seconds = verify[whole] + first + slope * nodes
        if nodes > whole:
            seconds += (nodes - whole) * (verify[whole + 1] - verify[whole])
        if tokens - speed * seconds > gain:
            gain = tokens - speed * seconds
            best = depth, tokens, seconds
        if tokens > pace * seconds:
            pace = tokens / seconds
            fastest = depth, tokens, seconds
    return best, fastest


def _best_addition(
    rates: Sequence[float], reached: float, verify: Sequence[float], speed: float
) -> int:
    """How many tokens to add to a draft, where time is worth ``speed`` tokens per second.

    Args:
        rates: acceptance of the tokens to add.
        reached: probability that all tokens of the draft are right.
        verify: seconds of a round by the nodes that it verifies beyond the draft.
    """
    best, chosen, more = 0.0, 0, 0.0
    for n, rate in enumerate(rates, 1):
        reached *= rate
        more += reached
        gain = more - speed * (verify[n] - verify[0])
        if gain > best:
            best, chosen = gain, n
    return chosen


def workload_of(prompt_length: int, has_prediction: bool, params: SamplingParams) -> str:
    """What a prompt looks like; nothing of its content is kept."""
    kind = "long" if prompt_length >= LONG_PROMPT else "short"
    if has_prediction:
        kind = "prediction"
    if params.constraint is not None:
        kind = f"{kind}, constrained"
    return kind if params.is_plain_argmax else f"{kind}, sampled"


AUTO = LengthPart(
    make=lambda knobs, context: Auto(length_bounds(knobs), knobs, context),
    knobs=(LENGTH_MIN, LENGTH_MAX),
    drafters=frozenset({"auto"}),
    why="chooses among several drafters",
    guarded=False,
)
