"""What rounds cost on this machine, family by family: the simulator's clock.

A round of a configuration costs what drafting, verifying and everything else take::

    seconds = draft(levels, expanded nodes) + verify * V(1 + nodes) + rest

``V`` is the target's own cost profile (:mod:`paceline.profile`). The other numbers are fitted to
short runs of the real engine, a few configurations of each family: in the loop, drafter and target
drive each other's weights out of the caches, which neither does when it is measured alone. Every
run has a run of AR before it and counts in units of AR's round, so that a machine that slows down
for a while slows both. All of them are medians.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.plan import Plan, resolve
from paceline.profile import NODES, CostProfile, measure
from paceline.sampling import SamplingParams
from paceline.shapes.kary import chain
from tuning.results import Results
from tuning.shapes import size_of
from tuning.traces import Family, is_ar, parts_of, why_not, with_budget

VERSION = 1
FILE = "costs.json"
REPETITIONS = 3
_TOKENS = 40  # generated for each prompt of a run
_GROUPS = 2  # of prompts in a run
_PICKS = 4  # configurations of a family that run
_AR = SpeculationConfig(method="ar")

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int, str], None]
"""Called with (runs done, runs in all, what comes next)."""


class RoundCosts(BaseModel):
    """Seconds of a round, all sessions that are decoded together.

    Attributes:
        draft: base, for each level, for each expanded node.
        verify: factor on the target's profile: below 1 where verification goes on from layers
            that drafting has computed.
        rest: acceptance, commit and bookkeeping.
        prefill: for each token of a prompt, the drafter's reading of it included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft: tuple[float, float, float] = (0.0, 0.0, 0.0)
    verify: float
    rest: float
    prefill: float

    def drafting(self, levels: int, expanded: int) -> float:
        """Seconds until a draft is there."""
        base, level, node = self.draft
        return base + level * levels + node * expanded


class Costs(BaseModel):
    """Measured costs of one machine.

    Attributes:
        key: what they hold for, as :func:`paceline.profile.profile_key` makes it.
        concurrency: sessions that were decoded together.
        profile: the target's forwards.
        ar: a round of AR.
        groups: by :func:`cost_group`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    key: dict[str, str]
    concurrency: int
    profile: CostProfile
    ar: RoundCosts
    groups: dict[str, RoundCosts]

    def save(self, results: Results, name: str = FILE) -> None:
        results.write(name, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def load(results: Results, key: Mapping[str, str], name: str = FILE) -> Costs:
        """Read the costs of a result folder.

        Raises:
            InvalidArgument: there are none, they are damaged or of another version, or they hold
                for another machine or other models than ``key`` says.
        """
        where = results.path(name)
        try:
            raw = json.loads(results.read(name))
            if raw["version"] != VERSION:
                raise InvalidArgument(
                    "costs", where, f"costs of version {VERSION}, not {raw['version']}"
                )
            costs = Costs.model_validate(raw)
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


def cost_group(family: Family, plan: Plan) -> str:
    """Configurations whose rounds cost alike: the same family, drafted by the same code."""
    if family.kind != "ranks":
        return family.cost_key
    return f"{family.cost_key} {'chain' if plan.shape == chain() else 'tree'}"


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pick:
    """A configuration that runs."""

    config: SpeculationConfig
    levels: int
    expanded: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Medians of a run: seconds of a round's parts, of a prompt's token, and nodes of a draft."""

    draft: float
    verify: float
    rest: float
    prefill: float
    factor: float  # verify over the profile's seconds

    @property
    def round(self) -> float:
        return self.draft + self.verify + self.rest

    def over(self, unit: float) -> _Sample:
        return _Sample(
            self.draft / unit, self.verify / unit, self.rest / unit, self.prefill / unit,
            self.factor / unit,
        )  # fmt: skip


def measure_costs(
    engine: Engine,
    configs: Iterable[SpeculationConfig],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key: Mapping[str, str],
    concurrency: int = 1,
    repetitions: int = REPETITIONS,
    progress: Progress = lambda done, total, what: None,
) -> Costs:
    """Measure what the rounds of the given configurations cost.

    Args:
        engine: is idle; siblings of it run.
        prompts: the first ``2 * concurrency`` of them are decoded.
        key: see :func:`paceline.profile.profile_key`.
        concurrency: sessions decoded together.

    Raises:
        InvalidArgument: no prompts, or more sessions than KV memory has room for.
    """
    if not prompts:
        raise InvalidArgument("prompts", [], "at least one prompt")
    if concurrency < 1:
        raise InvalidArgument("concurrency", concurrency, "at least 1")
    picks, largest = _choose(engine, configs, params)
    groups = [
        [prompts[(start + i) % len(prompts)] for i in range(concurrency)]
        for start in range(0, min(len(prompts), _GROUPS * concurrency), concurrency)
    ]
    params = replace(params, max_tokens=min(params.max_tokens, _TOKENS))
    total = repetitions * (len(picks) + sum(map(len, picks.values())))
    progress(0, total, "target forwards")
    profile = _profile(engine, dict(key), largest, concurrency)
    _run(engine, _AR, groups, params, profile)  # the first run allocates and reads pages
    done = 0
    ars: list[_Sample] = []
    samples: dict[tuple[str, int], list[_Sample]] = defaultdict(list)
    for _ in range(repetitions):
        for group, members in picks.items():
            progress(done, total, "AR")
            ar = _run(engine, _AR, groups, params, profile)
            assert ar is not None  # it drafts nothing that could leave no full rounds
            ars.append(ar)
            done += 1
            for number, pick in enumerate(members):
                progress(done, total, pick.config.method)
                sample = _run(engine, pick.config, groups, params, profile)
                done += 1
                if sample is not None:
                    samples[group, number].append(sample.over(ar.round))
    if not ars:
        ars = [ar for ar in [_run(engine, _AR, groups, params, profile)] if ar is not None]
    progress(total, total, "done")
    base = _medians(ars)
    return Costs(
        key=dict(key),
        concurrency=concurrency,
        profile=profile,
        ar=RoundCosts(
            draft=(base.draft, 0.0, 0.0), verify=base.factor, rest=base.rest, prefill=base.prefill
        ),
        groups={
            group: _fit(
                [
                    (pick, _medians(samples[group, number]).over(1 / base.round))
                    for number, pick in enumerate(members)
                    if (group, number) in samples
                ]
            )
            for group, members in picks.items()
            if any((group, number) in samples for number in range(len(members)))
        },
    )


def _choose(
    engine: Engine, configs: Iterable[SpeculationConfig], params: SamplingParams
) -> tuple[dict[str, list[_Pick]], int]:
    """A few configurations of each group, far apart, and the largest number of nodes of all."""
    known: dict[str, dict[tuple[int, int, int], _Pick]] = defaultdict(dict)
    for config in configs:
        plan = resolve(config)
        if is_ar(plan) or why_not(plan, params) or engine.refusal(plan.method):
            continue
        for family, budget in parts_of(plan):
            levels, expanded = size_of(plan.shape, budget)
            size = levels, expanded, budget.nodes
            pick = _Pick(with_budget(plan, budget), levels, expanded)
            known[cost_group(family, plan)].setdefault(size, pick)
    picks = {}
    for group, sizes in known.items():
        chosen = {min(sizes), max(sizes), max(sizes, key=lambda size: size[1:])}
        left = sorted(sizes.keys() - chosen)
        chosen |= set(left[len(left) // 2 :][: max(0, _PICKS - len(chosen))][:1])
        picks[group] = [sizes[size] for size in sorted(chosen)]
    return picks, max((nodes for sizes in known.values() for _, _, nodes in sizes), default=1)


def _profile(engine: Engine, key: dict[str, str], largest: int, concurrency: int) -> CostProfile:
    nodes, batches = list(NODES), [1]
    while nodes[-1] <= largest:
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
    """Decode groups of prompts; None where the engine refuses or no round had a full draft."""
    sibling = engine.sibling()
    depth = config.num_speculative_tokens or 0
    rounds: list[tuple[float, float, float, float]] = []
    prefills: list[tuple[float, int]] = []
    for prompts in groups:
        started = time.perf_counter()
        try:
            sessions = [sibling.submit(prompt, params, config) for prompt in prompts]
        except InvalidArgument:
            return None
        first = 0.0
        while not all(session.finished for session in sessions):
            stats = sessions[0].stats
            draft, verify = stats.draft_seconds, stats.verify_seconds
            nodes = sum(session.stats.num_draft_nodes for session in sessions)
            # Not the steps with prefill in them, and not the last rounds, whose drafts are cut.
            plain = all(s.stats.num_rounds and s.remaining > depth for s in sessions)
            step_started = time.perf_counter()
            sibling.step()
            elapsed = time.perf_counter() - step_started
            draft, verify = stats.draft_seconds - draft, stats.verify_seconds - verify
            if plain:
                nodes = sum(session.stats.num_draft_nodes for session in sessions) - nodes
                expected = profile.verify(1 + nodes / len(sessions), len(sessions))
                rounds.append((draft, verify, elapsed - draft - verify, verify / expected))
            if not first and all(session.stats.num_rounds for session in sessions):
                first = time.perf_counter() - started
        prefills.append((first, sum(map(len, prompts))))
    if not rounds:
        return None
    draft, verify, rest, factor = (median(part) for part in zip(*rounds, strict=True))
    whole = median(sum(parts[:3]) for parts in rounds)
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


def _fit(samples: Sequence[tuple[_Pick, _Sample]]) -> RoundCosts:
    """Least squares of the relative error, no cost below 0."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    sizes: Floats = np.array([(1, pick.levels, pick.expanded) for pick, _ in samples], np.float64)
    seconds: Floats = np.array([sample.draft for _, sample in samples])
    seconds = np.maximum(seconds, 1e-9)
    draft, _ = nnls(sizes / seconds[:, None], np.ones(len(seconds)))
    return RoundCosts(
        draft=(float(draft[0]), float(draft[1]), float(draft[2])),
        verify=median(sample.factor for _, sample in samples),
        rest=median(sample.rest for _, sample in samples),
        prefill=median(sample.prefill for _, sample in samples),
    )
