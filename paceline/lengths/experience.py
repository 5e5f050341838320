"""What the sessions of an engine learn together: a prior for later sessions.

That is what method ``auto`` knows of its drafters, by kind of prompt, and how often the candidates
of each rank are right, from which the shape ``sequoia`` builds its trees. It holds numbers only,
nothing of any text. As a document it outlives the engine and goes to others
(:meth:`Experience.document`, :meth:`Experience.merge`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.shapes.sequoia import FIRST_RATES
from paceline.tree import children
from paceline.types import Draft

VERSION = 2
SHARED_MEMORY = 0.995  # decay of what sessions have learnt together, for each judged draft
PRIOR_DRAFTS = 8.0  # weight of the other sessions' experience, in drafts
# Acceptance of a drafter that no session has seen draft: of models so high that they are tried, and
# of quick drafters so low that they are not, since their drafts are judged in any case.
FIRST_OF_MODEL, FIRST_OF_QUICK = 0.85, 0.6
FIRST_OF_PREDICTION = 0.8  # the request says that the answer is like it
SUFFIX = "suffix"  # drafts the more tokens the longer its match is
MATCHED = 16  # added to the class of another lookup's draft where that match tells how sure it is
# By the bits of the number of tokens that suffix decoding drafts, which grows with its match: long
# ones were as often right in SmolLM2's answers to questions, edits and second turns. (Short ones
# less often than FIRST_OF_QUICK; but what promises less is not asked again, and not known.)
FIRST_BY_MATCH = 0.6, 0.6, 0.6, 0.8, 0.9
FIRST_OF_FORCED = 0.95  # what a constraint forces is wrong only where tokens are cut otherwise
RELAY = "relay"  # what is looked up behind a model's draft
TRIAL_ROUNDS = 64.0  # rounds of sessions with a drafter, until it is known whether it pays
# What a draft saves in one round varies by about so many rounds of AR, and what n rounds save by
# sqrt(n) times as many. A lone session is refused a drafter only where it lacks more than that; in
# a crowd, where all sessions wait for a trial, without that allowance.
DOUBT = 0.5
TRIAL_SESSIONS = 2  # of a crowd that try a drafter of which nothing is known
# Drafters that read and draft only when they are asked: what that costs, the session sees itself.
LOOKUPS = frozenset({"forced", "predicted_outputs", SUFFIX, "copyspec", "prompt_lookup"})
HEAD_COST = 0.04  # rounds of AR in each round: a head reads the prompt and all that is committed
CROWD = 4  # sessions, from which on drafters are judged by the number of sessions
# Sessions, of which one has a drafter that did not pay for others: in a crowd, where all wait for
# its trials; and alone, at first and after some trials, each of which doubles the number.
TRY_AGAIN, TRY_SOON, TRY_LATER = 16, 2, 8
MOST_WEIGHT = 1.0 / (1.0 - SHARED_MEMORY)  # that decaying counts reach
RANK_MEMORY = 0.9995  # decay of what is known of a rank, for each time that it was offered


class DepthRates:
    """Moving acceptance rate of each depth, near a prior of each depth while little is known.

    Args:
        prior: rates to expect while nothing is known; or one rate, to which a depth without
            experience prefers the mean of the others.  # [longest]
        memory: decay for each draft.
    """

    __slots__ = ("_hit", "_known", "_memory", "_prior", "_tried", "_weight")

    def __init__(
        self, longest: int, prior: Callable[[], list[float]] | float, memory: float
    ) -> None:
        self._prior = prior
        self._memory = memory
        self._tried, self._hit = [0.0] * longest, [0.0] * longest
        self._weight = 1.0  # of the next draft: growing weights are cheaper than decaying sums
        self._known: list[float] | None = None

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a draft of ``drafted`` tokens, of which the first ``accepted`` were right."""
        tried, hit = self._tried, self._hit
        self._weight /= self._memory
        weight, self._known = self._weight, None
        for level in range(min(accepted, len(tried))):
            tried[level] += weight
            hit[level] += weight
        if accepted < min(drafted, len(tried)):
            tried[accepted] += weight
        if weight > 1e12:
            self._tried = [value / weight for value in tried]
            self._hit = [value / weight for value in hit]
            self._weight = 1.0

    def fade(self) -> None:
        """Count what it knows less, as if it had seen another draft, where none was made.

        A model that is not chosen hardly drafts: a session would keep what it once saw of it.
        """
        self._weight /= self._memory
        self.renew()

    def renew(self) -> None:
        """Compute the rates again, since what is expected has changed."""
        self._known = None

    @property
    def experience(self) -> float:
        """Recent drafts that it knows."""
        return self._tried[0] / self._weight

    def rates(self) -> list[float]:
        """Probability that a depth is right, given that those before it are.  # [longest]"""
        if self._known is None:
            known = PRIOR_DRAFTS * self._weight
            if callable(self._prior):
                priors = self._prior()
            else:
                mean = (sum(self._hit) + known * self._prior) / (sum(self._tried) + known)
                priors = [mean] * len(self._hit)
            self._known = [
                (hit + known * prior) / (tried + known)
                for hit, tried, prior in zip(self._hit, self._tried, priors, strict=True)
            ]
        return self._known

    @property
    def seen(self) -> tuple[list[float], list[float]]:
        """Drafts that reached each depth, and those that were right there; old ones count less."""
        weight = self._weight
        return [value / weight for value in self._tried], [value / weight for value in self._hit]

    def add(self, tried: Sequence[float], hit: Sequence[float]) -> None:
        """Add what another one has :attr:`seen`; together it counts as recent drafts do at most."""
        known_tried, known_hit = self.seen
        together = [a + b for a, b in zip(known_tried, tried, strict=True)]
        scale = min(1.0, 1.0 / ((1.0 - self._memory) * max(*together, 1e-9)))
        self._tried = [scale * value for value in together]
        self._hit = [scale * (a + b) for a, b in zip(known_hit, hit, strict=True)]
        self._weight, self._known = 1.0, None


class RankRates:
    """How likely each of a drafter's candidates for a token is right, the best one first.

    Chen et al. 2024, Sequoia (arXiv 2402.12374), measures this before trees are built. Here the
    sessions count: of the candidates offered behind an accepted token, which one was taken?
    :data:`FIRST_RATES` counts as :data:`PRIOR_DRAFTS` offers of each rank.
    """

    def __init__(self) -> None:
        self._ranks = [
            DepthRates(1, lambda first=first: [first], RANK_MEMORY)  # type: ignore[misc]
            for first in FIRST_RATES
        ]

    def observe(self, draft: Draft, path: Sequence[int]) -> None:
        """Learn from a draft with siblings in the order of their ranks.

        Args:
            path: its accepted nodes, from the root down.
        """
        following = children(draft.parent_indices)
        for node, taken in zip([-1, *path], [*path, None], strict=True):
            for rates, offered in zip(self._ranks, following[node], strict=False):
                rates.observe(1, int(offered == taken))

    def rates(self) -> tuple[float, ...]:
        """Probability that the candidate of each rank is right, in hundredths.

        No rank is likelier than the one before: counts that say otherwise are noise, and a tree cut
        to fewer nodes would leave out the better candidate.
        """
        left = highest = 1.0
        rates = []
        for each in self._ranks:
            highest = min(highest, left, each.rates()[0])  # one candidate at most is right
            left -= highest
            rates.append(round(highest, 2))
        return tuple(rates)

    @property
    def seen(self) -> tuple[list[float], list[float]]:
        """Offers of each rank, and those that were right; old ones count less."""
        counts = [each.seen for each in self._ranks]
        return [tried for (tried,), _ in counts], [right for _, (right,) in counts]

    def add(self, offered: Sequence[float], right: Sequence[float]) -> None:
        """Add what another one has :attr:`seen`, as :meth:`DepthRates.add` does."""
        for each, one, other in zip(self._ranks, offered, right, strict=True):
            each.add([one], [other])


class Balance(NamedTuple):
    """What sessions had of a drafter: rounds, and what it has saved and has cost in AR's rounds."""

    rounds: float = 0.0
    saved: float = 0.0
    cost: float = 0.0

    def plus(self, rounds: float, saved: float, cost: float) -> Balance:
        return Balance(self.rounds + rounds, self.saved + saved, self.cost + cost)

    def scaled(self, factor: float) -> Balance:
        return Balance(factor * self.rounds, factor * self.saved, factor * self.cost)


class Roster:
    """Which drafters a new session has, where having one costs time though it is not chosen.

    A head reads all committed tokens, and its session cannot begin with all entries of the prefix
    cache. In a crowd all sessions wait for what a model reads for one of them.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], Balance] = {}  # by kind of prompt, and drafter
        self._tried: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], tuple[int, int]] = {}  # in a row, of how many

    def joins(self, drafter: str, workload: str, num_sessions: int) -> bool:
        """Whether a new session of that kind of prompt has the drafter, as one of so many sessions.

        Lookups always. Where that many sessions are new, the nearest number that is known counts.
        """
        if drafter in LOOKUPS:
            return True
        in_crowd = num_sessions >= CROWD
        for kind in _crowds(workload, num_sessions):
            key = kind, drafter
            known = self.seen.get(key, Balance())
            if known.rounds >= TRIAL_ROUNDS:
                doubt = 0.0 if in_crowd else DOUBT * math.sqrt(known.rounds)
                pays = known.saved + doubt >= known.cost
                break
        else:  # all of a crowd would wait for what each of them tries
            key = crowded(workload, num_sessions), drafter
            self._tried[key] = tried = self._tried.get(key, 0) + 1
            pays = not in_crowd or tried <= TRIAL_SESSIONS
        if pays:
            self._refused.pop(key, None)
            return True
        refused, until = self._refused.get(key, (0, TRY_AGAIN if in_crowd else TRY_SOON))
        refused += 1
        if again := refused == until:
            refused, until = 0, until if in_crowd else min(2 * until, TRY_LATER)
        self._refused[key] = refused, until
        return again

    def count(
        self, workload: str, costs: Mapping[str, float], chosen: str | None, saved: float
    ) -> None:
        """Learn from a round of a session, with all times in AR's rounds.

        Args:
            costs: what having each of its drafters takes.
            chosen: the one that drafts; None: none does.
            saved: what that has saved; less than 0: it has cost more.
        """
        for drafter, cost in costs.items():
            known = self.seen.get((workload, drafter), Balance()).scaled(SHARED_MEMORY)
            gain = saved if drafter == chosen else 0.0
            self.seen[workload, drafter] = known.plus(1.0, gain, cost)


class Members:
    """A session's drafters, which the roster judges again when the session gets into a crowd.

    The first requests of a crowd come while few sessions run, and have drafters that pay alone.

    Args:
        num_sessions: sessions, itself included, for which it got them.

    Attributes:
        names: the drafters that it has.
    """

    __slots__ = ("_asked", "names")

    def __init__(self, names: Sequence[str], num_sessions: int) -> None:
        self.names = names
        self._asked = {0, crowd_of(num_sessions)}  # each crowd is asked for once

    def leave(self, num_sessions: int, workload: str, roster: Roster) -> Sequence[str]:
        """Those that are to leave, now that so many sessions run."""
        crowd = crowd_of(num_sessions)
        if crowd in self._asked:
            return ()
        self._asked.add(crowd)
        before = self.names
        self.names = [name for name in before if roster.joins(name, workload, num_sessions)]
        return [name for name in before if name not in self.names]


class Experience:
    """Acceptance by kind of prompt, drafter and class of its draft; where drafts end; the roster;
    and acceptance by rank.

    Attributes:
        roster: which drafters a new session has.
    """

    def __init__(self) -> None:
        self.roster = Roster()
        self._rates: dict[tuple[int, str, str, int], DepthRates] = {}
        self._goes_on: dict[str, tuple[float, float]] = {}
        self._ranks: dict[tuple[str, str, str], RankRates] = {}

    def ranks(self, drafter: str, weights: str, draws: str) -> RankRates:
        """Acceptance by rank.

        Args:
            weights: tells the drafter's weights from others of that name; "" where it has none.
            draws: how candidates are chosen, which changes how likely they are right.
        """
        return self._ranks.setdefault((drafter, weights, draws), RankRates())

    def rates(self, longest: int, workload: str, drafter: str, kind: int) -> DepthRates:
        """Acceptance of drafts of at most ``longest`` tokens, of a class of drafts."""
        key = longest, workload, drafter, kind
        if key not in self._rates:
            self._rates[key] = DepthRates(longest, _first_rate(drafter, kind), SHARED_MEMORY)
        return self._rates[key]

    def goes_on(self, drafter: str) -> float:
        """Probability that a model's draft goes on after a token, as far as it was asked to."""
        went, could = self._goes_on.get(drafter, (0.0, 0.0))
        return (went + PRIOR_DRAFTS) / (could + PRIOR_DRAFTS)

    def went_on(self, drafter: str, nodes: int, asked: int) -> None:
        """Learn where a draft ended of which ``asked`` tokens were wanted."""
        went, could = self._goes_on.get(drafter, (0.0, 0.0))
        ended = nodes < asked
        self._goes_on[drafter] = (
            SHARED_MEMORY * went + nodes - 1,
            SHARED_MEMORY * could + nodes - 1 + ended,
        )

    # --- for later engines, and others ---------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        return {
            "version": VERSION,
            "rates": [[*key, *rates.seen] for key, rates in sorted(self._rates.items())],
            "goes_on": [[name, *pair] for name, pair in sorted(self._goes_on.items())],
            "roster": [
                [*key, each.rounds, max(0.0, each.saved), each.cost]
                for key, each in sorted(self.roster.seen.items())
            ],
            "ranks": [[*key, *ranks.seen] for key, ranks in sorted(self._ranks.items())],
        }

    def merge(self, document: Any) -> None:
        """Add what others know; what both know counts by its number of drafts.

        Raises:
            InvalidArgument: it is no document of this version; then nothing is added.
        """
        rates, goes_on, roster, ranks = _checked(document)
        for (longest, workload, drafter, kind), (tried, hit) in rates.items():
            self.rates(longest, workload, drafter, kind).add(tried, hit)
        for name, pair in goes_on.items():
            self._goes_on[name] = _together(self._goes_on.get(name, (0.0, 0.0)), pair)
        for key, balance in roster.items():
            known = self.roster.seen.get(key, Balance()).plus(*balance)
            self.roster.seen[key] = known.scaled(min(1.0, MOST_WEIGHT / max(known.rounds, 1e-9)))
        for drafter_key, counts in ranks.items():
            self.ranks(*drafter_key).add(*counts)


def _first_rate(drafter: str, kind: int) -> float:
    """Acceptance to expect of drafts of a class of which nothing is known.

    Args:
        kind: the class; 0 and 1 are those of drafts that are not there yet, a model's.
    """
    if drafter == "forced":
        return FIRST_OF_FORCED
    if kind >= MATCHED or (drafter == SUFFIX and kind > 1):
        return FIRST_BY_MATCH[min(kind % MATCHED // 2, len(FIRST_BY_MATCH) - 1)]
    if drafter == "predicted_outputs":
        return FIRST_OF_PREDICTION
    return FIRST_OF_QUICK if kind > 1 or drafter == RELAY else FIRST_OF_MODEL


def check_document(text: str) -> None:
    """Look at a document of :meth:`Experience.document`.

    Raises:
        InvalidArgument: it is none of this version.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidArgument("experience", str(error), "a JSON document") from None
    _checked(document)


def crowd_of(num_sessions: int) -> int:
    """The class of a number of sessions, its power of two; 0: too few for a crowd."""
    return 0 if num_sessions < CROWD else num_sessions.bit_length()


def crowded(workload: str, num_sessions: int) -> str:
    """A kind of prompt in a batch: drafts pay in small ones, where more rows cost little."""
    crowd = crowd_of(num_sessions)
    return f"{workload}, {1 << crowd}" if crowd else workload


def _crowds(workload: str, num_sessions: int) -> Iterator[str]:
    """As :func:`crowded`, and then with other numbers of sessions that form a crowd, nearest first.

    What pays alone says nothing of a batch, and the other way round.
    """
    yield crowded(workload, num_sessions)
    if num_sessions >= CROWD:
        for factor in (2**n for n in range(1, 9)):
            yield crowded(workload, num_sessions * factor)
            if num_sessions // factor >= CROWD:
                yield crowded(workload, num_sessions // factor)


def experience_of(context: LengthContext) -> Experience:
    """What the sessions of an engine have learnt together."""
    return context.shared(("auto", "experience"), Experience)


def _together(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    first, second = one[0] + other[0], one[1] + other[1]
    scale = min(1.0, MOST_WEIGHT / max(first, second, 1e-9))
    return scale * first, scale * second


_Counts = tuple[list[float], list[float]]
_Rates = Mapping[tuple[int, str, str, int], _Counts]
_Ranks = Mapping[tuple[str, str, str], _Counts]


def _checked(
    document: Any,
) -> tuple[_Rates, dict[str, tuple[float, float]], dict[tuple[str, str], Balance], _Ranks]:
    """The parts of a document.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}")
        rates = {}
        for longest, workload, drafter, kind, tried, hit in document["rates"]:
            if not 0 < longest == len(tried) == len(hit) <= 1024:
                raise ValueError(f"{len(tried)} rates for drafts of {longest} tokens")
            key = int(longest), str(workload), str(drafter), int(kind)
            rates[key] = _counts(tried, hit)
        goes_on = {str(name): _pair(*pair) for name, *pair in document["goes_on"]}
        roster = {
            (str(workload), str(name)): Balance(*map(_count, sums))
            for workload, name, *sums in document["roster"]
        }
        ranks = {}
        for drafter, weights, draws, offered, right in document.get("ranks", ()):
            if len(offered) != len(FIRST_RATES):
                raise ValueError(f"{len(offered)} ranks")
            ranks[str(drafter), str(weights), str(draws)] = _counts(offered, right)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            "experience", str(error), f"a document of version {VERSION}, as it was written"
        ) from error
    return rates, goes_on, roster, ranks


def _counts(tried: Sequence[Any], hit: Sequence[Any]) -> _Counts:
    """As :attr:`DepthRates.seen`.

    Raises:
        ValueError: they are no counts and parts of these.
    """
    pairs = [_pair(right, reached) for reached, right in zip(tried, hit, strict=True)]
    return [reached for _, reached in pairs], [right for right, _ in pairs]


def _count(value: Any) -> float:
    """A number of rounds.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not 0.0 <= number <= 1e6:
        raise ValueError(f"{number} rounds")
    return number


def _pair(part: Any, whole: Any) -> tuple[float, float]:
    """Two counts of which the first one is a part of the second.

    Raises:
        ValueError: they are not.
    """
    part, whole = float(part), float(whole)
    if not 0.0 <= part <= whole * (1.0 + 1e-9) <= 2.0 * MOST_WEIGHT * 1024:
        raise ValueError(f"{part} of {whole}")
    return part, whole
