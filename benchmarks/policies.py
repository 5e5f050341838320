"""Method auto beside other policies that choose a drafter and a length: same texts, same costs.

    python -m benchmarks.policies                                              # the demo pair
    python -m benchmarks.policies --target smollm2 --prompts spec_bench.jsonl --suite spec-bench

First the real models are recorded: the target's text for each prompt, and at every position of it
how much of each drafter's longest draft is right, as it drafted there (with ``draft_model``, also
what TapOut's stopping rules see). Then each policy decodes the recorded texts on a clock that the
measured costs move. ``auto`` is the code that serves; the time that its own decisions take counts,
the others decide for free. The rivals, each with every knob that its paper leaves open in its
favour:

- ``ucb``, ``exp3``: BanditSpec (2025, arXiv 2505.15141), over (drafter, length) and AR, once with
  the paper's reward, the accepted length, and once with tokens per second (``.. speed``);
- ``metasd``: MetaSD-UCB (2026, arXiv 2604.05417) over drafters of one length, with the block
  efficiency as reward (the block divergence needs distributions, which lookups have not);
- ``tapout``: TapOut (2025, arXiv 2511.02017) over stopping rules of the model's drafts;
- ``nightjar``: Nightjar (2025, arXiv 2512.22420): lengths of the model's drafts with 0 among them,
  by batch size, tried at random in bins and greedily between, with the reading of missed tokens as
  the cost of a switch;
- ``best fixed``: the (drafter, length) that is best over all prompts, and ``best of class``: over
  those of its category. Both know the recordings: nothing that learns can.

A bandit learns from request to request or begins anew with each, whichever is faster for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np

from paceline.bench.prompts import Prompt, builtin_prompts
from paceline.bench.suites import SUITES, read_prompts
from paceline.chat import conversation, encode_chat, encode_prompt, template_of
from paceline.config import SpeculationConfig
from paceline.drafters import auto as auto_drafter
from paceline.drafters.auto import AutoDrafter
from paceline.drafters.base import Drafter
from paceline.engine import Engine, EngineLimits
from paceline.exact_math import weights64
from paceline.lengths.base import LengthContext
from paceline.lengths.tapout import (
    CONFIDENCE,
    GAMMA,
    MARGIN,
    ROOT_ENTROPY,
    ROOT_ENTROPY_RISE,
    Arms,
    Bandit,
    root_entropy,
)
from paceline.loading import limit_threads, load_engine
from paceline.model_names import resolve_model
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tuning.recorders import right_path
from paceline.types import (
    Budget,
    Draft,
    DraftStep,
    Load,
    Outcome,
    RoundCosts,
    StopRule,
    Verification,
)

LONGEST = 16
LENGTHS = 1, 2, 4, 8, 16
QUICK = ("suffix", "copyspec", "prompt_lookup")
MODELS = ("draft_model", "eagle3", "eagle")
METHOD_OF = {"suffix": "suffix_decoding"}  # where a drafter's method has another name


# --- recording -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorded:
    """A prompt's text, and what each drafter would have drafted at each position of it.

    Attributes:
        right: tokens of the longest draft that the text continues with, by drafter.  # [positions]
        size: tokens of that draft.  # [positions]
        seen: highest probability, margin and root of the entropy after each token of the model's
            draft.  # [positions, LONGEST, 3]
    """

    category: str
    prompt: list[int]
    output: list[int]
    right: dict[str, np.ndarray] = field(default_factory=dict)
    size: dict[str, np.ndarray] = field(default_factory=dict)
    seen: np.ndarray | None = None


class _Watch(StopRule):
    """Stops no draft; keeps what TapOut's rules would have read."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []

    def stop_after(self, step: DraftStep) -> bool:
        weights, total = weights64(step.scores.astype(np.float64))
        p = weights / total
        second, first = np.partition(p, -2)[-2:]
        self.steps.append((float(first), float(first - second), root_entropy(p)))
        return False


def record(engine: Engine, prompts: Sequence[tuple[str, list[int]]], tokens: int) -> list[Recorded]:
    """Record prompts, one after another, as one engine would meet them."""
    params = SamplingParams(max_tokens=tokens)
    sibling = engine.sibling()
    found = []
    for category, prompt in prompts:
        (session,) = sibling.generate([prompt], params, SpeculationConfig(method="ar"))
        found.append(Recorded(category, list(prompt), session.output_ids))
    for name in (*QUICK, *MODELS):
        method = METHOD_OF.get(name, name)
        if method not in engine.catalogue or engine.refusal(engine.catalogue[method]) is not None:
            continue
        fresh = engine.sibling()
        for each in found:
            _record(fresh, name, method, each, params)
    return found


def _record(engine: Engine, name: str, method: str, each: Recorded, params: SamplingParams) -> None:
    """Follow a text and ask a drafter at each position for its longest draft."""
    watched = name == MODELS[0]
    config = SpeculationConfig(
        method=method, length="tapout" if watched else "fixed",
        **({"length_max": LONGEST} if watched else {"num_speculative_tokens": LONGEST}),
    )  # fmt: skip
    session = engine.submit(Request(each.prompt, params, config))
    drafter = engine.drafters[session.drafter]
    right, size = np.zeros(len(each.output), int), np.zeros(len(each.output), int)
    seen = np.zeros((len(each.output), LONGEST, 3))
    asked = engine.drafters[session.drafter] = _Asking(drafter)
    while not session.finished:
        before = session.length - session.prompt_length
        watch = _Watch()
        if watched:
            session.length_controller.stop_rule = watch
        asked.forget()
        engine.step()
        for place, draft in asked.drafts:
            right[place] = len(right_path(draft, each.output[place:]))
            size[place] = draft.num_nodes
            for depth, step in enumerate(watch.steps[:LONGEST]):
                seen[place, depth] = step
        assert session.length - session.prompt_length - before <= 1
    engine.drafters[session.drafter] = drafter
    assert session.output_ids == each.output
    each.right[name], each.size[name] = right, size
    if watched:
        each.seen = seen


class _Asking(Drafter):
    """Asks a drafter for its longest draft in every round, and verifies none of it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter: Any = drafter
        self.quick, self.needs, self.elsewhere = drafter.quick, drafter.needs, False
        self.drafts: list[tuple[int, Draft]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def forget(self) -> None:
        self.drafts = []

    def open(self, session: Any) -> None:
        self._drafter.open(session)

    def close(self, session: Any) -> None:
        self._drafter.close(session)

    def read_prompt(self, session: Any, read: Verification) -> None:
        self._drafter.read_prompt(session, read)

    def observe(self, sessions: Any, outcomes: Any) -> None:
        self._drafter.observe(sessions, outcomes)

    def propose(self, sessions: Any, budgets: Any) -> list[Draft | Future[Draft]]:
        (session,) = sessions
        room = min(LONGEST, session.remaining - 1)
        if room > 0:
            (draft,) = self._drafter.propose(sessions, [Budget(room, room)])
            self.drafts.append((session.length - session.prompt_length, draft))
        return [Draft.chain([])]


class DraftCost(NamedTuple):
    """Seconds of a draft: of any, and for each token."""

    first: float
    token: float


def draft_costs(
    engine: Engine, found: Sequence[Recorded], names: Sequence[str]
) -> dict[str, DraftCost]:
    """What drafts take, from rounds of the real engine with drafts of two lengths."""
    costs = {}
    for name in names:
        seconds = {}
        for depth in (1, 6):
            config = SpeculationConfig(
                method=METHOD_OF.get(name, name), length="fixed", num_speculative_tokens=depth
            )
            sibling, spent = engine.sibling(), []
            sibling.intake.prepare(config)
            drafter = sibling.drafters[resolve(config).method.drafter]
            propose = drafter.propose

            def timed(*arguments: Any, spent: list[float] = spent, propose: Any = propose) -> Any:
                started = time.perf_counter()
                drafts = propose(*arguments)
                spent.append(time.perf_counter() - started)
                return drafts

            drafter.propose = timed  # type: ignore[method-assign]
            for each in found[:4]:
                sibling.generate([each.prompt], SamplingParams(max_tokens=24), config)
            seconds[depth] = statistics.median(spent)
        slope = max(0.0, (seconds[6] - seconds[1]) / 5)
        if name in QUICK:
            costs[name] = DraftCost(statistics.median(seconds.values()), 0.0)
        else:
            costs[name] = DraftCost(max(0.0, seconds[1] - slope), slope)
    return costs


# --- decoding a recorded text --------------------------------------------------------------------

Arm = tuple[str, int]  # a drafter and the length of its draft; ("ar", 0)
AR: Arm = ("ar", 0)


@dataclass(slots=True)
class World:
    """What rounds cost: verification by nodes and batch size, drafts by drafter."""

    verify: RoundCosts
    drafts: dict[str, DraftCost]
    batch: int

    def round(self, drafter: str, nodes: int) -> float:
        """Seconds of a round that verifies ``nodes`` drafted tokens in each session."""
        seconds = self.verify.verify(1 + nodes, self.batch)
        if drafter != "ar":
            cost = self.drafts[drafter]
            seconds += cost.first + cost.token * nodes
        return seconds


class Policy(Protocol):
    """Chooses for each round of a request, and hears what came of it."""

    def start(self, text: Recorded) -> None: ...

    def choose(self, place: int) -> Arm: ...

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None: ...


class Spent(NamedTuple):
    """What a text took."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def decode(text: Recorded, policy: Policy, world: World) -> Spent:
    """Decode a recorded text with a policy."""
    place, seconds, end = 0, 0.0, len(text.output)
    policy.start(text)
    behind: dict[str, int] = defaultdict(int)
    while place < end:
        arm = policy.choose(place)
        drafter, depth = arm
        nodes = accepted = 0
        if drafter != "ar":
            nodes = min(depth, int(text.size[drafter][place]), end - place - 1)
            accepted = min(nodes, int(text.right[drafter][place]))
        spent = world.round(drafter, nodes)
        if drafter in MODELS:  # tokens that other rounds committed must be read first
            missed = place - behind[drafter]
            spent += world.verify.read_seconds * max(0, missed - LONGEST)
            behind[drafter] = place
        policy.learn(arm, accepted, accepted + 1, spent)
        place += accepted + 1
        seconds += spent
    return Spent(end, seconds)


class Fixed:
    """Always the same arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def start(self, text: Recorded) -> None: ...

    def choose(self, place: int) -> Arm:
        return self.arm

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None: ...


class Ucb:
    """UCB1 over arms.

    Args:
        reward: of a round, from accepted tokens, committed tokens and seconds; scaled to [0, 1] by
            the highest one so far.
        keeps: whether it learns from request to request.
    """

    def __init__(
        self, arms: Sequence[Arm], reward: Callable[[Arm, int, int, float], float], keeps: bool
    ) -> None:
        self._arms, self._reward, self._keeps = list(arms), reward, keeps
        self._reset()

    def _reset(self) -> None:
        self._counts = [0] * len(self._arms)
        self._sums = [0.0] * len(self._arms)
        self._highest = 1e-12

    def start(self, text: Recorded) -> None:
        if not self._keeps:
            self._reset()

    def choose(self, place: int) -> Arm:
        total = sum(self._counts)
        for i, count in enumerate(self._counts):
            if not count:
                return self._arms[i]

        def index(i: int) -> float:
            mean = self._sums[i] / self._counts[i] / self._highest
            return mean + math.sqrt(2.0 * math.log(total) / self._counts[i])

        return self._arms[max(range(len(self._arms)), key=index)]

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None:
        i, reward = self._arms.index(arm), self._reward(arm, accepted, tokens, seconds)
        self._counts[i] += 1
        self._sums[i] += reward
        self._highest = max(self._highest, reward)


class Exp3:
    """EXP3 over arms, with the step that decreases as sqrt(log K / (K t))."""

    def __init__(
        self, arms: Sequence[Arm], reward: Callable[[Arm, int, int, float], float], keeps: bool
    ) -> None:
        self._arms, self._reward, self._keeps = list(arms), reward, keeps
        self._random = random.Random(0)
        self._reset()

    def _reset(self) -> None:
        self._gains = np.zeros(len(self._arms))
        self._rounds = 0
        self._highest = 1e-12

    def start(self, text: Recorded) -> None:
        if not self._keeps:
            self._reset()

    def choose(self, place: int) -> Arm:
        self._rounds += 1
        count = len(self._arms)
        step = math.sqrt(math.log(count) / (count * self._rounds))
        weights = np.exp(step * (self._gains - self._gains.max()))
        self._p = weights / weights.sum()
        (chosen,) = self._random.choices(range(count), self._p.tolist())
        return self._arms[chosen]

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None:
        i, reward = self._arms.index(arm), self._reward(arm, accepted, tokens, seconds)
        self._highest = max(self._highest, reward)
        self._gains[i] += reward / self._highest / max(float(self._p[i]), 1e-9)


class TapOutPolicy:
    """TapOut's bandit over its stopping rules, on the recorded distributions."""

    def __init__(self, drafter: str, keeps: bool) -> None:
        self._drafter, self._keeps = drafter, keeps
        self._reset()

    def _reset(self) -> None:
        self._arms = Arms()
        self._bandit = Bandit(len(self._arms.rules), "ucb1")

    def start(self, text: Recorded) -> None:
        self._text = text
        if not self._keeps:
            self._reset()

    def choose(self, place: int) -> Arm:
        assert self._text.seen is not None
        self._arm, before = self._bandit.choose(), math.inf
        name = list(self._arms.rules)[self._arm]
        for depth in range(LONGEST):
            best, margin, root = self._text.seen[place, depth]
            stops = {
                "max_confidence": best < CONFIDENCE,
                "logit_margin": margin < MARGIN,
                "svip": root > ROOT_ENTROPY,
                "svip_difference": root - before > ROOT_ENTROPY_RISE,
                "adaedl": 1.0 - math.sqrt(GAMMA) * root < self._arms._threshold,
            }[name]
            before = root
            if stops:
                return self._drafter, depth + 1
        return self._drafter, LONGEST

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None:
        rate = accepted / arm[1]
        self._bandit.learn(self._arm, 0.5 * accepted / LONGEST + 0.5 * rate)
        self._arms.learn(rate)


class Nightjar:
    """Lengths of one drafter, 0 among them: bins of rounds that try at random, or are greedy."""

    BIN = 8  # rounds

    def __init__(self, drafter: str, keeps: bool) -> None:
        self._arms: list[Arm] = [AR, *((drafter, length) for length in LENGTHS)]
        self._keeps, self._random = keeps, random.Random(0)
        self._reset()

    def _reset(self) -> None:
        self._tokens = [0.0] * len(self._arms)
        self._seconds = [0.0] * len(self._arms)
        self._round = self._bin = 0
        self._now = 0

    def start(self, text: Recorded) -> None:
        if not self._keeps:
            self._reset()

    def choose(self, place: int) -> Arm:
        if self._round % self.BIN == 0:
            self._bin += 1
            untried = [i for i, seconds in enumerate(self._seconds) if not seconds]
            if untried:
                self._now = untried[0]
            elif self._random.random() < 1.0 / math.sqrt(self._bin):
                self._now = self._random.randrange(len(self._arms))
            else:
                speeds = [t / s for t, s in zip(self._tokens, self._seconds, strict=True)]
                self._now = int(np.argmax(speeds))
        self._round += 1
        return self._arms[self._now]

    def learn(self, arm: Arm, accepted: int, tokens: int, seconds: float) -> None:
        i = self._arms.index(arm)
        self._tokens[i] += tokens
        self._seconds[i] += seconds


# --- method auto, as it serves -------------------------------------------------------------------


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Replay(Drafter):
    """Drafts what was recorded: right tokens as far as they were, then a wrong one."""

    def __init__(self, name: str, world: World, clock: _Clock) -> None:
        self.quick = name in QUICK
        self._name, self._world, self._clock = name, world, clock
        self.text: Recorded

    def propose(self, sessions: Any, budgets: Any) -> list[Draft | Future[Draft]]:
        drafts: list[Draft | Future[Draft]] = []
        for session, budget in zip(sessions, budgets, strict=True):
            place = session.length - session.prompt_length
            size = min(budget.depth, int(self.text.size[self._name][place]))
            right = min(size, int(self.text.right[self._name][place]))
            tokens = [*self.text.output[place : place + right], *[-2] * (size - right)]
            cost = self._world.drafts[self._name]
            self._clock.now += cost.first + cost.token * size
            drafts.append(Draft.chain(tokens))
        return drafts


def auto(texts: Sequence[Recorded], names: Sequence[str], world: World) -> list[Spent]:
    """Decode texts with method auto, one request after another."""
    clock = _Clock()
    parts = {name: _Replay(name, world, clock) for name in names}
    context = LengthContext(profile=world.verify)
    config = SpeculationConfig(method="auto", drafters=tuple(names))
    plan = resolve(config)
    spent = []
    with patch.object(auto_drafter, "time", clock):
        for number, text in enumerate(texts):
            for part in parts.values():
                part.text = text
            spent.append(_auto(f"s{number}", text, plan, parts, context, world, clock))
    return spent


def _auto(
    name: str, text: Recorded, plan: Any, parts: dict[str, _Replay], context: LengthContext,
    world: World, clock: _Clock,
) -> Spent:  # fmt: skip
    session: Any = Session(
        name, text.prompt, SamplingParams(max_tokens=len(text.output)), plan,
        length_context=context,
    )  # fmt: skip
    controller, drafter = session.length_controller, AutoDrafter(parts.__getitem__, {})
    drafter.open(session)
    load = Load(world.batch, 0)
    begun = clock.now
    while not session.finished:
        before, thinking = clock.now, time.thread_time()
        budget = controller.budget(session, load)
        (found,) = drafter.propose([session], [budget])
        clock.now += time.thread_time() - thinking
        draft, drafted, place = found, clock.now, session.length - session.prompt_length
        assert isinstance(draft, Draft)
        clock.now += world.verify.verify(1 + draft.num_nodes, world.batch)
        pairs = zip(draft.token_ids.tolist(), text.output[place:], strict=False)
        accepted = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        accepted = min(accepted, len(text.output) - place - 1)
        committed = session.commit(text.output[place : place + accepted + 1])
        outcome = Outcome(
            draft=draft, path=tuple(range(accepted)), next_token=committed[-1],
            token_ids=committed, num_accepted=accepted,
            verification=Verification(None),  # type: ignore[arg-type]
        )  # fmt: skip
        verified, thinking = clock.now, time.thread_time()
        controller.observe(outcome, drafted - before, verified - drafted)
        drafter.observe([session], [outcome])
        clock.now += time.thread_time() - thinking
    drafter.close(session)
    return Spent(len(text.output), clock.now - begun)


# --- comparison ----------------------------------------------------------------------------------


def accepted_share(arm: Arm, accepted: int, tokens: int, seconds: float) -> float:
    """The reward of BanditSpec: what was accepted of the longest draft."""
    return accepted / LONGEST


def block_efficiency(arm: Arm, accepted: int, tokens: int, seconds: float) -> float:
    """The reward of MetaSD that needs no distributions."""
    return accepted / max(1, arm[1])


def pace(arm: Arm, accepted: int, tokens: int, seconds: float) -> float:
    """Tokens per second."""
    return tokens / seconds


def compare(texts: Sequence[Recorded], world: World) -> dict[str, list[Spent]]:
    """What each policy spends on each text."""
    names = list(texts[0].right)
    models = [name for name in MODELS if name in names]
    arms: list[Arm] = [AR, *itertools.product(names, LENGTHS)]
    fixed = {arm: [decode(text, Fixed(arm), world) for text in texts] for arm in arms}
    found = {"ar": fixed[AR], "auto": auto(texts, names, world)}
    found["best fixed"] = max(fixed.values(), key=_speed)
    of_class: dict[int, Spent] = {}
    for members in _classes(texts).values():
        best = max(fixed.values(), key=lambda spent: _speed([spent[i] for i in members]))
        of_class |= {i: best[i] for i in members}
    found["best of class"] = [of_class[i] for i in range(len(texts))]
    rivals: dict[str, Callable[[bool], Policy]] = {
        "ucb": lambda keeps: Ucb(arms, accepted_share, keeps),
        "ucb speed": lambda keeps: Ucb(arms, pace, keeps),
        "exp3": lambda keeps: Exp3(arms, accepted_share, keeps),
        "exp3 speed": lambda keeps: Exp3(arms, pace, keeps),
    }
    for length in (4, 8):
        some = [(name, length) for name in names]
        rivals[f"metasd {length}"] = lambda keeps, some=some: Ucb(some, block_efficiency, keeps)  # type: ignore[misc]
    if models:
        model = models[0]
        rivals["nightjar"] = lambda keeps: Nightjar(model, keeps)
        if texts[0].seen is not None:
            rivals["tapout"] = lambda keeps: TapOutPolicy(model, keeps)
    for name, make in rivals.items():
        tries = []
        for keeps in (False, True):
            policy = make(keeps)
            tries.append([decode(text, policy, world) for text in texts])
        found[name] = max(tries, key=_speed)
    return found


def _speed(spent: Sequence[Spent]) -> float:
    return sum(each.tokens for each in spent) / sum(each.seconds for each in spent)


def _classes(texts: Sequence[Recorded]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        found[text.category].append(i)
    return found


def interval(
    ours: Sequence[Spent], theirs: Sequence[Spent], seed: int = 0
) -> tuple[float, float, float]:
    """Our speed over theirs, with the 95 % interval of a bootstrap over prompts."""
    chance, places = np.random.default_rng(seed), len(ours)
    ratios = []
    for _ in range(1000):
        chosen = chance.integers(0, places, places)
        ratios.append(_speed([ours[i] for i in chosen]) / _speed([theirs[i] for i in chosen]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return _speed(ours) / _speed(theirs), float(low), float(high)


def table(texts: Sequence[Recorded], found: dict[str, list[Spent]]) -> Iterator[str]:
    """Lines of a Markdown table: auto over each policy, and by category over the best."""
    yield "| policy | × AR | `auto` over it, 95 % interval |"
    yield "|---|---:|---:|"
    order = sorted(found, key=lambda name: -_speed(found[name]))
    for name in order:
        ratio, low, high = interval(found["auto"], found[name])
        shown = "" if name == "auto" else f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        yield f"| {name} | {_speed(found[name]) / _speed(found['ar']):.2f} | {shown} |"
    yield ""
    yield "| category | prompts | best single of the category | `auto` | share, 95 % interval |"
    yield "|---|---:|---:|---:|---:|"
    for category, members in _classes(texts).items():
        part = {name: [spent[i] for i in members] for name, spent in found.items()}
        ratio, low, high = interval(part["auto"], part["best of class"])
        ar = _speed(part["ar"])
        yield (
            f"| {category} | {len(members)} | {_speed(part['best of class']) / ar:.2f} "
            f"| {_speed(part['auto']) / ar:.2f} | {ratio:.3f} ({low:.3f} to {high:.3f}) |"
        )
    slow = [a.speed / b.speed for a, b in zip(found["auto"], found["ar"], strict=True)]
    yield ""
    yield (
        f"Requests at 0.98 × AR or above: {sum(r >= 0.98 for r in slow)} of {len(slow)}; "
        f"slowest {min(slow):.3f} × AR."
    )


def draw(file: Path, title: str, texts: Sequence[Recorded], found: dict[str, list[Spent]]) -> None:
    """A picture of the table: speed over AR by policy, auto in another colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    order = sorted((n for n in found if n != "ar"), key=lambda name: _speed(found[name]))
    bounds = [interval(found[name], found["ar"]) for name in order]
    figure, axes = plt.subplots(figsize=(7.2, 0.36 * len(order) + 1.2))
    colours = [
        "#c2410c" if name == "auto" else "#94a3b8" if name.startswith("best") else "#1d4ed8"
        for name in order
    ]
    places = range(len(order))
    axes.barh(places, [b[0] for b in bounds], color=colours)
    axes.errorbar(
        [b[0] for b in bounds], places,
        xerr=[[b[0] - b[1] for b in bounds], [b[2] - b[0] for b in bounds]],
        fmt="none", ecolor="black", capsize=2, linewidth=1,
    )  # fmt: skip
    axes.set_yticks(places, order)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("tokens per second over AR (95 % interval over prompts)")
    axes.set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def prompts_of(
    engine: Engine, target: str | None, files: Sequence[str], suites: Sequence[str], limit: int
) -> list[tuple[str, list[int]]]:
    """Prompts by category, in turns, as a server would meet them."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    template = None if target is None else template_of(resolve_model(target), None)
    groups: dict[str, list[list[int]]] = defaultdict(list)
    for file, suite in zip(files, suites, strict=True):
        for prompt in read_prompts(file, suite):
            if len(groups[prompt.category]) < limit:
                turns = conversation(prompt.turns[:1])
                ids = (
                    encode_chat(tokenizer, template, turns)
                    if template is not None
                    else encode_prompt(tokenizer, None, prompt.text)
                )
                groups[prompt.category].append(ids)
    code: Sequence[Prompt] = builtin_prompts()
    for prompt in code:
        if len(groups[prompt.category]) < limit:
            groups[prompt.category].append(tokenizer.encode(prompt.text))
    chance = random.Random(0)
    for _ in range(limit):
        words = [chance.randrange(engine.target.vocab_size) for _ in range(64)]
        groups["random tokens"].append(words)
    turns_of = itertools.zip_longest(*([(c, p) for p in ps] for c, ps in groups.items()))
    return [pair for turn in turns_of for pair in turn if pair is not None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", help="default: the demo pair")
    parser.add_argument("--dtype", default=None, help="default: auto with a target, else float32")
    parser.add_argument("--prompts", nargs="*", default=[], help="files of questions")
    parser.add_argument(
        "--suite", nargs="*", default=[], choices=list(SUITES), help="their formats"
    )
    parser.add_argument("--limit", type=int, default=8, help="prompts of each category")
    parser.add_argument("--longest", type=int, default=900, help="leave longer prompts out")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--out", type=Path, help="folder for the tables, the numbers and pictures")
    options = parser.parse_args()
    limit_threads(1)
    engine = load_engine(
        options.target,
        dtype=options.dtype or ("auto" if options.target else "float32"),
        limits=EngineLimits(prefix_cache=False),
    )
    prompts = prompts_of(engine, options.target, options.prompts, options.suite, options.limit)
    prompts = [(c, prompt) for c, prompt in prompts if len(prompt) < options.longest]
    started = time.monotonic()
    texts = record(engine, prompts, options.max_tokens)
    print(f"recorded {len(texts)} texts in {time.monotonic() - started:.0f} s", flush=True)
    costs = engine.length_context.costs
    assert costs is not None
    drafts = draft_costs(engine, texts, list(texts[0].right))
    for name, cost in drafts.items():
        print(f"a draft of {name}: {1e3 * cost.first:.3f} ms + {1e3 * cost.token:.3f} ms a token")
    shown = ", ".join(f"{n}: {1e3 * costs.verify(n, 1):.2f}" for n in (1, 2, 5, 9, 17))
    print(f"verifying, ms by tokens: {shown}")
    numbers: dict[str, Any] = {}
    for batch in options.batch:
        world = World(costs, drafts, batch)
        found = compare(texts, world)
        lines = list(table(texts, found))
        print(f"\nbatch {batch}\n\n" + "\n".join(lines), flush=True)
        numbers[str(batch)] = {name: [list(s) for s in spent] for name, spent in found.items()}
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"batch{batch}.md").write_text("\n".join(lines) + "\n")
            title = f"{options.target or 'demo pair'}, batch {batch}: {len(texts)} texts"
            draw(options.out / f"batch{batch}.png", title, texts, found)
    if options.out:
        (options.out / "policies.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
