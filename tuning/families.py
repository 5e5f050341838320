"""Which configurations one recording serves, and which cannot be simulated at all.

A *family* is a drafter with the knobs that decide what it proposes, whatever the length, the node
budget and the static shape of the draft. There are three kinds of recordings:

``ranks``
    For drafters that any shape expands. What follows a node depends on its ancestors alone, so
    the place of the right token among the candidates, level by level along the right path, gives
    the accepted length of every static tree. Of drafters whose candidates depend on the prefix
    alone, however much of it is drafted, one level is recorded and serves for all.
``order``
    For trees whose nodes compete (``confidence``, ``dyspec``, ``rsd_s``): one tree of the largest
    size, and the order in which smaller ones take its nodes.
``drafts``
    For drafters that make whole drafts: they are asked for a draft of every budget. Where another
    drafter drafts when they find nothing, its own recording says what.

Which kind a drafter has, and which knobs change what a round costs, is declared beside the drafter
(:class:`paceline.drafters.base.DrafterPart`, :class:`paceline.knobs.Knob`). Methods that learn from
what was drafted and rejected, rules that accept by chance and rules that are not lossless have no
recording: :func:`why_not` says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from paceline.config import SpeculationConfig
from paceline.drafters.base import FALLBACK_DEPTH, RELAY_TOKENS
from paceline.knobs import Knobs
from paceline.lengths.base import length_bounds
from paceline.methods import (
    ACCEPTANCE_RULES,
    DRAFTER_PARTS,
    KNOBS,
    LENGTHS,
    METHODS,
    SHAPES,
    SIZE_KNOBS,
)
from paceline.models.exits import EXIT_LAYER
from paceline.plan import Plan, resolve
from paceline.sampling import SamplingParams
from paceline.shapes.base import BRANCHING, DRAFT_SUPPORT
from paceline.shapes.kary import chain
from paceline.types import Budget

Kind: TypeAlias = Literal["ranks", "order", "drafts"]

PREFIX_ONLY = frozenset(n for n, part in DRAFTER_PARTS.items() if part.replay == "prefix")
COMPOSITE = frozenset(n for n, part in DRAFTER_PARTS.items() if part.replay == "composite")
REMEMBERING = frozenset(n for n, part in DRAFTER_PARTS.items() if part.remembers)

_DRAFTER_KNOBS = frozenset(knob.name for part in DRAFTER_PARTS.values() for knob in part.knobs)
_LENGTH_KNOBS = (
    SIZE_KNOBS
    | {"length", "allow_lossy"}
    | {knob.name for part in LENGTHS.values() for knob in part.knobs}
) - _DRAFTER_KNOBS
SHAPING_KNOBS = frozenset({"shape", BRANCHING.name}).union(
    knob.name for part in SHAPES.values() for knob in part.knobs
)
_RULE_KNOBS = frozenset({"acceptance", DRAFT_SUPPORT.name}).union(
    knob.name for rule in ACCEPTANCE_RULES.values() for knob in rule.knobs
)
# Beside the drafter's own code and the size of a draft, what makes a round cheap or dear.
_COST_KNOBS = frozenset({"shape"}).union(name for name, knob in KNOBS.items() if knob.costs)


@dataclass(frozen=True, slots=True)
class Family:
    """What one recording serves.

    Attributes:
        key: equal for configurations whose drafts come from the same recording.
        kind: of the recording.
        label: for people.
    """

    key: str
    kind: Kind
    label: str


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """The drafts of one budget.

    Attributes:
        family: where they are recorded.
        plan: makes them.
        budget: of a whole draft.
        timed: makes drafts that cost as much: those of a hybrid's lookup are another method's.
        cost_group: equal for parts whose drafts are made by the same code. The exit layer, of
            which costs are a function, does not count.
        fallback: what drafts where the lookup of a hybrid finds nothing.
    """

    family: Family
    plan: Plan
    budget: Budget
    timed: Plan
    cost_group: str
    fallback: FamilyPart | None = None

    def everything(self) -> tuple[FamilyPart, ...]:
        """The part itself and its fallback."""
        return (self,) if self.fallback is None else (self, self.fallback)


def why_not(plan: Plan, params: SamplingParams) -> str | None:
    """Why a configuration cannot be simulated; None where it can."""
    method, rule = plan.method, plan.rule
    if not (method.lossless and rule.lossless):
        return "its output is not the target's"
    if is_ar(plan):
        return None
    if params.temperature > 0 and rule.name != "coupled":
        return f"rule {rule.name!r} accepts by chance above temperature 0"
    if not LENGTHS[str(plan.config.length)].replayable:
        return f"controller {plan.config.length!r} chooses lengths from what it sees"
    if plan.config[RELAY_TOKENS]:
        return "what it copies behind a draft depends on where that ends"
    drafters = [DRAFTER_PARTS[m.drafter] for m in (method, *plan.parts)]
    if any(part.replay is None and part.halves is None for part in drafters):
        return "what it drafts depends on what was drafted before"
    return None


def is_ar(plan: Plan) -> bool:
    """Whether a configuration never drafts."""
    return plan.method.drafter == "none" or plan.config.num_speculative_tokens == 0


def parts_of(plan: Plan) -> list[FamilyPart]:
    """The drafts that a configuration may ask for.

    Those of its length; of each of its lengths for the controller ``goodput``.
    """
    config = plan.config
    budgets = [Budget(config.num_speculative_tokens or 0, config.node_budget or 0)]
    if config.length == "goodput":
        bounds = length_bounds(config)
        budgets = [bounds.budget(d) for d in range(max(1, bounds.shortest), bounds.longest + 1)]
        if _depth_changes_nodes(config):  # a recording for each depth would cost too much
            budgets = budgets[-1:]
    return [_part(plan, budget) for budget in budgets]


def _depth_changes_nodes(config: Knobs) -> bool:
    return config.shape is not None and SHAPES[config.shape].depth_changes_nodes


def _part(plan: Plan, budget: Budget) -> FamilyPart:
    drafter, config = plan.method.drafter, plan.config
    kind: Kind = "drafts"
    dropped = set(_LENGTH_KNOBS)
    part = DRAFTER_PARTS[drafter]
    if part.halves is not None:
        dropped |= SHAPING_KNOBS | {FALLBACK_DEPTH.name}
    elif part.replay in ("prefix", "tree"):
        dropped |= SHAPING_KNOBS | _RULE_KNOBS
        kind = "order" if SHAPES[str(config.shape)].nodes_compete else "ranks"
        if kind == "order":
            dropped -= {"shape", "branching"}
    knobs = config.overrides()
    del knobs["method"]
    kept = {name: value for name, value in sorted(knobs.items()) if name not in dropped}
    told = {"drafter": drafter, "policy": plan.method.depth_policy, **kept}
    if _depth_changes_nodes(config) and kind == "order":
        told["depth"] = budget.depth
    words = [f"{name}={json.dumps(value)}" for name, value in kept.items() if name != "acceptance"]
    family = Family(json.dumps(told), kind, " ".join([plan.method.name, *words]))
    if part.halves is not None:
        return _hybrid(plan, budget, part.halves, family)
    dear = {name: value for name, value in kept.items() if name in _COST_KNOBS}
    dear |= {"drafter": drafter, "own_exit": config[EXIT_LAYER] is not None}  # or the default
    if kind == "ranks":
        dear["chain"] = plan.shape == chain()
    group = " ".join(f"{name}={json.dumps(value)}" for name, value in dear.items())
    return FamilyPart(family, plan, budget, plan, group)


def _hybrid(plan: Plan, budget: Budget, halves: tuple[str, str], family: Family) -> FamilyPart:
    lookup, fallback = (METHODS[name] for name in halves)
    knobs = with_budget(plan, budget).overrides()
    read = SIZE_KNOBS | lookup.knob_defaults.keys()
    own = {name: knobs[name] for name in read & knobs.keys()}
    timed = resolve(SpeculationConfig.model_validate({"method": lookup.name, **own}))
    depth = min(budget.depth, plan.config[FALLBACK_DEPTH] or budget.depth)
    shaped = {name: value for name, value in knobs.items() if name in SHAPING_KNOBS}
    other = SpeculationConfig(
        method=fallback.name, length="fixed", num_speculative_tokens=depth,
        node_budget=budget.nodes, **shaped,
    )  # fmt: skip
    return replace(
        _part(timed, budget), family=family, plan=plan, timed=timed,
        fallback=_part(resolve(other), Budget(depth, budget.nodes)),
    )  # fmt: skip


def with_budget(plan: Plan, budget: Budget, **changes: Any) -> SpeculationConfig:
    """The configuration with drafts of a constant budget, and other changes."""
    knobs = plan.config.overrides()
    for name in ("length_min", "length_max", "stop_threshold"):
        knobs.pop(name, None)
    knobs |= {"length": "fixed", "num_speculative_tokens": budget.depth}
    return SpeculationConfig.model_validate(knobs | {"node_budget": budget.nodes} | changes)
