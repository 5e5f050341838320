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

Rows that learn from what was drafted and rejected, rules that accept by chance and rules that are
not lossless have no recording: :func:`why_not` says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from paceline.config import SpeculationConfig
from paceline.methods import METHODS, SHAPE_KNOBS, length_bounds
from paceline.plan import Plan, resolve
from paceline.sampling import SamplingParams
from paceline.shapes.kary import chain
from paceline.types import Budget

Kind: TypeAlias = Literal["ranks", "order", "drafts"]

# What one of these proposes after a token depends on the tokens before it, whether they are
# committed or drafted.
PREFIX_ONLY = frozenset({"draft_model", "early_exit", "s2d", "staged"})
_EXPANDING = PREFIX_ONLY | {"fewer_layers"}  # and every head that shapes expand
# Asking one of these twice gives the same draft, and nothing comes of a draft's rejection.
_LOOKUP = frozenset(
    {"prompt_lookup", "suffix", "sam", "copyspec", "aggressive", "predicted_outputs"}
)
_HYBRID = {  # lookups with a fallback: the methods that do either alone
    "suffix_or_draft_model": ("suffix_decoding", "draft_model"),
    "copyspec_or_draft_model": ("copyspec", "draft_model"),
    "predicted_outputs_or_draft_model": ("predicted_outputs", "draft_model"),
}
COMPOSITE = frozenset({"rasd", "combined"})  # models take part, so every question costs
REMEMBERING = frozenset({"suffix", "suffix_or_draft_model", "sam"}) | COMPOSITE
_DYNAMIC = frozenset({"confidence", "dyspec", "rsd_s"})

_LENGTH_KNOBS = frozenset(
    {"num_speculative_tokens", "node_budget", "length", "length_min", "length_max",
     "stop_threshold", "allow_lossy"}
)  # fmt: skip
SHAPING_KNOBS = frozenset({"shape", "branching"}.union(*SHAPE_KNOBS.values()))
_RULE_KNOBS = frozenset({"acceptance", "draft_support"})
# Beside the drafter's own code and the size of a draft, what makes a round cheap or dear.
_COST_KNOBS = frozenset(
    {"shape", "exit_layers", "exit_threshold", "speedup_ratio", "min_layers", "max_layers",
     "depth_decay", "drafters", "stage_tokens", "use_tree"}
)  # fmt: skip


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
    if plan.config.length not in ("fixed", "goodput"):
        return f"controller {plan.config.length!r} chooses lengths from what it sees"
    if plan.config.relay_tokens:
        return "what it copies behind a draft depends on where that ends"
    names = {part.drafter for part in plan.parts} | {method.drafter}
    replayable = _EXPANDING | _LOOKUP | _HYBRID.keys() | COMPOSITE
    if any(name not in replayable for name in names) and not _is_head(plan):
        return "what it drafts depends on what was drafted before"
    return None


def is_ar(plan: Plan) -> bool:
    """Whether a configuration never drafts."""
    return plan.method.drafter == "none" or plan.config.num_speculative_tokens == 0


def _is_head(plan: Plan) -> bool:
    """Whether a trained head drafts that a shape expands."""
    method = plan.method
    return method.head is not None and method.shape is not None


def parts_of(plan: Plan) -> list[FamilyPart]:
    """The drafts that a configuration may ask for.

    Those of its length; of each of its lengths for the controller ``goodput``.
    """
    config = plan.config
    budgets = [Budget(config.num_speculative_tokens or 0, config.node_budget or 0)]
    if config.length == "goodput":
        bounds = length_bounds(config)
        budgets = [bounds.budget(d) for d in range(max(1, bounds.shortest), bounds.longest + 1)]
        if config.shape == "dyspec":  # a recording for each depth would cost too much
            budgets = budgets[-1:]
    return [_part(plan, budget) for budget in budgets]


def _part(plan: Plan, budget: Budget) -> FamilyPart:
    drafter, config = plan.method.drafter, plan.config
    kind: Kind = "drafts"
    dropped = set(_LENGTH_KNOBS)
    if drafter in _HYBRID:
        dropped |= SHAPING_KNOBS | {"fallback_depth"}
    elif drafter in _EXPANDING or _is_head(plan):
        dropped |= SHAPING_KNOBS | _RULE_KNOBS
        kind = "order" if config.shape in _DYNAMIC else "ranks"
        if kind == "order":
            dropped -= {"shape", "branching"}
    knobs = config.overrides()
    del knobs["method"]
    kept = {name: value for name, value in sorted(knobs.items()) if name not in dropped}
    told = {"drafter": drafter, "policy": plan.method.depth_policy, **kept}
    if config.shape == "dyspec" and kind == "order":
        told["depth"] = budget.depth  # which nodes a smaller tree has instead is not recorded
    words = [f"{name}={json.dumps(value)}" for name, value in kept.items() if name != "acceptance"]
    family = Family(json.dumps(told), kind, " ".join([plan.method.name, *words]))
    if drafter in _HYBRID:
        return _hybrid(plan, budget, family)
    dear = {name: value for name, value in kept.items() if name in _COST_KNOBS}
    dear |= {"drafter": drafter, "own_exit": config.exit_layer is not None}  # or the default
    if kind == "ranks":
        dear["chain"] = plan.shape == chain()
    group = " ".join(f"{name}={json.dumps(value)}" for name, value in dear.items())
    return FamilyPart(family, plan, budget, plan, group)


def _hybrid(plan: Plan, budget: Budget, family: Family) -> FamilyPart:
    lookup, fallback = (METHODS[name] for name in _HYBRID[plan.method.drafter])
    knobs = with_budget(plan, budget).overrides()
    own = {name: knobs[name] for name in lookup.defaults.keys() & knobs.keys()}
    timed = resolve(SpeculationConfig.model_validate({"method": lookup.name, **own}))
    depth = min(budget.depth, plan.config.fallback_depth or budget.depth)
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
