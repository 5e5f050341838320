"""What rounds cost on this machine, family by family: the simulator's clock.

The time of a round is that of drafting, verifying and the rest::

    seconds = draft(levels, expanded nodes, exit layer) + verify(exit layer) * V(1 + nodes) + rest

``V`` is the target's own cost profile (:mod:`paceline.profile`). The other numbers are fitted to
short runs of the real engine with a few configurations of each group: in the loop, drafter and
target evict each other's weights from the caches, which a measurement of one alone would not show.
Each run follows a run of AR and is measured in units of AR's round, so that a machine that is slow
for a while slows both. All numbers are medians.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.profile import CostProfile, measure
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tuning.families import FamilyPart, is_ar, parts_of, why_not, with_budget
from paceline.tuning.results import Results
from paceline.tuning.shapes import size_of

VERSION = 1
FILE = "costs.json"
REPETITIONS = 3
LIMIT_S = 90.0  # no run begins after this time
_TOKENS = 40  # that a run generates for each prompt
_GROUPS = 2  # of prompts in each run
_AR = SpeculationConfig(method="ar")

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int, str], None]
"""Called with the number of runs done, the number of all runs, and a name of the next one."""


class SimulatedRound(BaseModel):
    """Coefficients of the seconds of a round, for all sessions that are decoded together.

    Attributes:
        draft: of 1, levels, levels times exit layer, expanded nodes, and expanded nodes times exit
            layer.
        verify: a factor on the target's profile, and what each exit layer adds to it. It is below 1
            if verification goes on from layers that drafting has computed.
        rest: acceptance, commit and bookkeeping.
        prefill: for each token of a prompt, by target and drafter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    verify: tuple[float, float] = (1.0, 0.0)
    rest: float
    prefill: float

    def drafting(self, size: Size) -> float:
        """Seconds to make a draft."""
        return float(np.dot(self.draft, _features(size)))

    def verify_factor(self, exit_layer: int) -> float:
        return max(0.0, self.verify[0] + self.verify[1] * exit_layer)


class Size(NamedTuple):
    """What the cost of a draft depends on.

    Attributes:
        exit_layer: 0: none, or the target's default.
    """

    exit_layer: int
    levels: int
    expanded: int


def draft_size(part: FamilyPart) -> Size:
    """The size of a part's full drafts."""
    return Size(part.timed.config.exit_layer or 0, *size_of(part.timed.shape, part.budget))


def _features(size: Size) -> tuple[int, int, int, int, int]:
    layer, levels, expanded = size
    return 1, levels, levels * layer, expanded, expanded * layer


class MeasuredCosts(BaseModel):
    """Measured costs of one machine.

    Attributes:
        key: machine and models that they hold for, see :func:`paceline.profile.profile_key`.
        concurrency: sessions that were decoded together.
        profile: the target's forwards.
        ar: a round of AR.
        groups: by :attr:`Part.cost_group`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    key: dict[str, str]
    concurrency: int
    profile: CostProfile
    ar: SimulatedRound
    groups: dict[str, SimulatedRound]

    def save(self, results: Results, name: str = FILE) -> None:
        results.write(name, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def load(results: Results, key: Mapping[str, str], name: str = FILE) -> MeasuredCosts:
        """Read the costs of a result folder.

        Raises:
            InvalidArgument: the folder has no costs, or they are damaged, of another version, or
                of another machine or other models than ``key``.
        """
        where = results.path(name)
        try:
            raw = json.loads(results.read(name))
            if raw["version"] != VERSION:
                raise InvalidArgument(
                    "costs", where, f"costs of version {VERSION}, not {raw['version']}"
                )
            costs = MeasuredCosts.model_validate(raw)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            reason = str(error).splitlines()[0]
            raise InvalidArgument("costs", where, f"a file of costs ({reason})") from error
        for part, wanted in key.items():
            if costs.key.get(part) != wanted:
                allowed = f"costs whose {part} is {wanted}, not {costs.key.get(part)}"
                raise InvalidArgument("costs", where, allowed)
        return costs


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sample:
    """Medians of a run: seconds of the parts of a round, and of a prompt's token.

    Attributes:
        factor: seconds of verification over the profile's for the same number of nodes.
    """

    draft: float
    verify: float
    rest: float
    prefill: float
    factor: float

    @property
    def round(self) -> float:
        return self.draft + self.verify + self.rest

    def over(self, unit: float) -> _Sample:
        return _Sample(
            self.draft / unit, self.verify / unit, self.rest / unit, self.prefill / unit,
            self.factor / unit,
        )  # fmt: skip


_Picks: TypeAlias = dict[str, dict[Size, SpeculationConfig]]  # by group


def measure_costs(
    engine: Engine,
    configs: Iterable[SpeculationConfig],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key: Mapping[str, str],
    concurrency: int = 1,
    repetitions: int = REPETITIONS,
    limit_s: float = LIMIT_S,
    progress: Progress = lambda done, total, what: None,
) -> MeasuredCosts:
    """Measure what the rounds of the given configurations cost.

    Args:
        engine: must be idle; the runs use siblings of it.
        prompts: the runs decode the first ``2 * concurrency``.
        key: see :func:`paceline.profile.profile_key`.
        concurrency: sessions decoded together.
        limit_s: no run begins after so many seconds. Groups with many configurations come first;
            groups for which no time is left get no costs.

    Raises:
        InvalidArgument: there are no prompts, ``limit_s`` is too short for a run of AR, or the KV
            memory has no room for ``concurrency`` sessions.
    """
    if not prompts:
        raise InvalidArgument("prompts", [], "at least one prompt")
    for name, value in (("concurrency", concurrency), ("repetitions", repetitions)):
        if value < 1:
            raise InvalidArgument(name, value, "at least 1")
    picks, largest = _choose(engine, configs, params)
    groups = [
        [prompts[(start + i) % len(prompts)] for i in range(concurrency)]
        for start in range(0, min(len(prompts), _GROUPS * concurrency), concurrency)
    ]
    runs = [(group, *pick) for group, members in picks.items() for pick in members.items()]
    total = repetitions * len(runs)
    progress(0, total, "target forwards")
    started = time.monotonic()
    profile = _profile(engine, dict(key), largest, concurrency)
    _run(
        engine, _AR, groups, params, profile
    )  # unmeasured: the first run allocates and reads pages
    ars: list[_Sample] = []
    samples: dict[tuple[str, Size], list[_Sample]] = defaultdict(list)
    for done, (group, size, config) in enumerate(runs * repetitions):
        if time.monotonic() - started > limit_s:
            break
        progress(done, total, config.method)
        ar = _run(engine, _AR, groups, params, profile)
        assert ar is not None  # every engine runs AR
        ars.append(ar)
        sample = _run(engine, config, groups, params, profile)
        if sample is not None:
            samples[group, size].append(sample.over(ar.round))
    progress(total, total, "done")
    if not ars:
        raise InvalidArgument("limit_s", limit_s, "time for a run of AR at least")
    base = _medians(ars)
    fitted: dict[str, list[tuple[Size, _Sample]]] = defaultdict(list)
    for (group, size), found in samples.items():
        fitted[group].append((size, _medians(found).over(1 / base.round)))
    return MeasuredCosts(
        key=dict(key),
        concurrency=concurrency,
        profile=profile,
        ar=SimulatedRound(
            draft=(base.draft, 0.0, 0.0, 0.0, 0.0), verify=(base.factor, 0.0), rest=base.rest,
            prefill=base.prefill,
        ),
        groups={group: _fit(members) for group, members in fitted.items()},
    )  # fmt: skip


def _choose(
    engine: Engine, configs: Iterable[SpeculationConfig], params: SamplingParams
) -> tuple[_Picks, int]:
    """A few configurations of each group, far apart in size, and the largest number of nodes."""
    known: dict[str, dict[Size, FamilyPart]] = defaultdict(dict)
    count: dict[str, int] = defaultdict(int)
    largest = 1
    for config in configs:
        plan = resolve(config)
        if is_ar(plan) or why_not(plan, params) or engine.refusal(plan.method):
            continue
        for part in (each for whole in parts_of(plan) for each in whole.everything()):
            known[part.cost_group].setdefault(draft_size(part), part)
            count[part.cost_group] += 1
            largest = max(largest, part.budget.nodes)
    picks: _Picks = {}
    for group in sorted(known, key=lambda group: -count[group]):
        sizes = known[group]
        chosen: set[Size] = set()
        layers = sorted({size.exit_layer for size in sizes})
        for layer in dict.fromkeys((layers[0], layers[-1])):
            members = sorted(size for size in sizes if size.exit_layer == layer)
            chosen.update(members[i] for i in (0, len(members) // 2, -1))
            chosen.add(max(members, key=lambda size: (size.expanded, size.levels)))
        picks[group] = {
            size: with_budget(sizes[size].timed, sizes[size].budget) for size in sorted(chosen)
        }
    return picks, largest


def _profile(engine: Engine, key: dict[str, str], largest: int, concurrency: int) -> CostProfile:
    nodes, batches = [1, 2, 3, 5], [1]
    room = engine.target.context_length // 2  # beyond its last one, the profile extrapolates
    while nodes[-1] <= largest and 2 * nodes[-1] <= room:
        nodes.append(2 * nodes[-1] - 1)
    while batches[-1] < concurrency:
        batches.append(min(2 * batches[-1], concurrency))
    return measure(engine, key, batches=batches, nodes=nodes, depths=(1,), repetitions=15)


def _run(
    engine: Engine,
    config: SpeculationConfig,
    groups: Sequence[Sequence[Sequence[int]]],
    params: SamplingParams,
    profile: CostProfile,
) -> _Sample | None:
    """Decode groups of prompts with a configuration; None if the engine refuses it."""
    sibling = engine.sibling()
    depth = config.num_speculative_tokens or 0
    params = replace(params, max_tokens=min(params.max_tokens, max(_TOKENS, 4 * depth)))
    # Rounds with full drafts, after the prefill and before the last tokens, are the best samples.
    # If outputs are too short for such rounds, take others.
    rounds: dict[tuple[bool, bool], list[tuple[float, float, float, float]]] = defaultdict(list)
    prefills: list[tuple[float, int]] = []
    for prompts in groups:
        started = time.perf_counter()
        try:
            sessions = [sibling.submit(Request(prompt, params, config)) for prompt in prompts]
        except InvalidArgument:
            return None
        first = 0.0
        while not all(session.finished for session in sessions):
            stats = sessions[0].stats
            draft, verify = stats.draft_seconds, stats.verify_seconds
            nodes = sum(session.stats.num_draft_nodes for session in sessions)
            early = not all(session.stats.num_rounds for session in sessions)
            late = any(session.remaining <= depth for session in sessions)
            step_started = time.perf_counter()
            sibling.step()
            elapsed = time.perf_counter() - step_started
            draft, verify = stats.draft_seconds - draft, stats.verify_seconds - verify
            nodes = sum(session.stats.num_draft_nodes for session in sessions) - nodes
            if verify:  # not a step that only reads prompts
                expected = profile.verify(1 + nodes / len(sessions), len(sessions))
                parts = draft, verify, elapsed - draft - verify, verify / expected
                rounds[early, late].append(parts)
            if not first and all(session.stats.num_rounds for session in sessions):
                first = time.perf_counter() - started
        prefills.append((first, sum(map(len, prompts))))
        for session in sessions:
            if session.error is not None:
                raise session.error
    best = rounds[min(rounds)]
    draft, verify, rest, factor = (median(part) for part in zip(*best, strict=True))
    whole = median(sum(parts[:3]) for parts in best)
    prefill = median(max(0.0, first - whole) / count for first, count in prefills)
    return _Sample(draft, verify, rest, prefill, factor)


def _medians(samples: Sequence[_Sample]) -> _Sample:
    return _Sample(
        median(s.draft for s in samples),
        median(s.verify for s in samples),
        median(s.rest for s in samples),
        median(s.prefill for s in samples),
        median(s.factor for s in samples),
    )


def _fit(samples: Sequence[tuple[Size, _Sample]]) -> SimulatedRound:
    """Fit by least squares of the relative error; no coefficient of drafting is below 0."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    features: Floats = np.array([_features(size) for size, _ in samples], np.float64)
    seconds: Floats = np.maximum([sample.draft for _, sample in samples], 1e-9)
    draft, _ = nnls(features / seconds[:, None], np.ones(len(seconds)))
    layers: Floats = np.array([size.exit_layer for size, _ in samples], np.float64)
    factors: Floats = np.array([sample.factor for _, sample in samples])
    slope, first = np.polyfit(layers, factors, 1) if np.ptp(layers) else (0.0, np.median(factors))
    return SimulatedRound(
        draft=tuple(draft.tolist()),
        verify=(float(first), float(slope)),
        rest=median(sample.rest for _, sample in samples),
        prefill=median(sample.prefill for _, sample in samples),
    )
