"""Resolves a SpeculationConfig into the parts that it names, and checks their combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.acceptance.base import AcceptanceRule, with_knobs
from paceline.acceptance.judge import Judge
from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.knobs import MAX_NODES, Knob, Knobs
from paceline.lengths.base import (
    LENGTH_MAX,
    LengthContext,
    LengthController,
    LengthPart,
    length_bounds,
)
from paceline.lengths.goodput import WhilePays
from paceline.methods import (
    ACCEPTANCE_RULES,
    COMMON_KNOBS,
    DEPTH_POLICIES,
    DIFFUSION_METHODS,
    DRAFTER_PARTS,
    LENGTHS,
    METHODS,
    SHAPES,
    SIZE_KNOBS,
    VLLM_METHODS,
    Method,
)
from paceline.shapes.base import BRANCHING, DRAFT_SUPPORT, Shape, ShapePart
from paceline.shapes.sequoia import RANK_ACCEPTANCE
from paceline.types import DepthPolicy, Need


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated SpeculationConfig with its parts. Each session has one.

    Attributes:
        config: every knob of the method, filled in.
        parts: the methods of the drafters that the knob ``drafters`` names, if the method has it.
        guarded: the length controller is the method's default, not the request's choice, so it is
            asked only while drafts pay.
    """

    config: SpeculationConfig
    method: Method
    shape: Shape | None
    rule: AcceptanceRule
    parts: tuple[Method, ...] = ()
    guarded: bool = False

    @property
    def depth_policy(self) -> DepthPolicy | None:
        """Which of the target's layers compute a token; None unless the method has a policy."""
        name = self.method.depth_policy
        return DEPTH_POLICIES[name].make(self.config) if name else None

    @property
    def target_depth(self) -> DepthPolicy | None:
        """The policy if the target itself decodes with it, which is lossy; else None."""
        return self.depth_policy if self.method.drafter == "none" else None

    @property
    def drafters(self) -> tuple[str, ...]:
        """Every drafter that takes part, the method's own first."""
        chosen = tuple(name for part in self.parts for name in (part.drafter, *part.uses))
        return (self.method.drafter, *(chosen or self.method.uses))

    @property
    def reads_prediction(self) -> bool:
        """Whether a drafter uses the prediction that comes with a request."""
        return any(method.reads_prediction for method in (self.method, *self.parts))

    @property
    def needs(self) -> frozenset[Need]:
        """What all drafters together need from the target."""
        return self.method.needs.union(*(part.needs for part in self.parts))

    @property
    def measures_ranks(self) -> bool:
        """Whether the tree follows what was counted of its drafter's candidates."""
        return self.config.shape == "sequoia" and self.config[RANK_ACCEPTANCE] is None

    def with_ranks(self, rates: tuple[float, ...]) -> Plan:
        """The same plan with the tree that is best for ``rates``."""
        config = self.config.model_copy(update={RANK_ACCEPTANCE.name: rates})
        return replace(self, config=config, shape=SHAPES["sequoia"].make(config))

    def without(self, drafters: Sequence[str]) -> Plan:
        """The same plan, without some of its parts."""
        parts = tuple(part for part in self.parts if part.drafter not in drafters)
        names = tuple(part.drafter for part in parts) or None
        config = self.config.model_copy(update={"drafters": names})
        return replace(self, config=config, parts=parts)

    def new_length_controller(self, context: LengthContext | None = None) -> LengthController:
        """A controller for one session; ``context`` is shared by all sessions of an engine.

        Raises:
            InvalidArgument: a trained controller has no weights, or none that fit.
        """
        name = self.config.length or self.method.length
        context = context or LengthContext()
        # Sessions with equal configs share what they learn; rates that are counted differ a little.
        config = self.config.model_copy(update={RANK_ACCEPTANCE.name: None})
        controller = LENGTHS[name].make(config, context)
        if not self.guarded:
            return controller
        return WhilePays(controller, length_bounds(config), config, context)


def trained_rule(rule: AcceptanceRule, context: LengthContext) -> AcceptanceRule:
    """A rule with its weights, if it has some.

    Raises:
        InvalidArgument: there are no weights, or none that fit.
    """
    return rule.trained(context) if isinstance(rule, Judge) else rule


def resolve(config: SpeculationConfig, catalogue: Mapping[str, Method] = METHODS) -> Plan:
    """Fill in a method's defaults and check that the combination can work.

    Raises:
        InvalidArgument: the method, shape, rule or controller is unknown; the method lacks the
            knob; or the combination cannot be exact (the message says what works instead).
    """
    method = catalogue.get(config.method)
    if method is None:
        allowed = f"one of {', '.join(sorted(catalogue))}"
        other = {**VLLM_METHODS, **DIFFUSION_METHODS}.get(config.method)
        if other is not None:
            allowed += f" ({config.method} runs in a deployment with engine: {other.engine})"
        raise InvalidArgument("method", config.method, allowed)
    given = config.overrides()
    parts = _parts(method, given, catalogue)
    defaults = _defaults(method, parts)
    length = given.get("length", method.length)
    _one_of("length", length, LENGTHS)
    _check_drafter(length, method, catalogue)
    acceptance = given.get("acceptance", method.acceptance)
    _one_of("acceptance", acceptance, ACCEPTANCE_RULES)
    rule = ACCEPTANCE_RULES[acceptance]
    shape_name = given.get("shape", method.shape)
    shape_part = None
    if shape_name is not None and method.shape is not None:
        _one_of("shape", shape_name, SHAPES)
        shape_part = SHAPES[shape_name]
    knobs = _part_knobs(method, LENGTHS[length], rule, shape_part)
    known = _known_knobs(method, defaults, LENGTHS[length], knobs)
    for key in given:
        if key not in known:
            raise InvalidArgument(
                key,
                given[key],
                f"a knob of method {method.name!r}: " + ", ".join(sorted(known - {"method"})),
            )
    values = {
        "shape": method.shape,
        "acceptance": method.acceptance,
        "length": method.length,
        **{knob.name: knob.default for knob in knobs if knob.default is not None},
        **{key: value for key, value in defaults.items() if value is not None and key in known},
        **given,
    }
    rule = with_knobs(rule, values)
    _check_rule(rule, values, method, parts)
    for each in (*parts, method):
        part = DRAFTER_PARTS.get(each.drafter)
        if part is not None and part.fit is not None:
            part.fit(values)
    if shape_part is not None:
        _fit_shape(values, given, method, shape_part)
    longest = _set_length_bounds(values, LENGTHS[length])
    values.setdefault("node_budget", _default_nodes(values, longest, shape_part))
    resolved = SpeculationConfig.model_validate(values)
    shape = shape_part.make(resolved) if shape_part is not None else None
    if shape is not None and rule.draws not in shape.draws:
        fitting = [n for n, part in SHAPES.items() if rule.draws in part.make(resolved).draws]
        raise InvalidArgument(
            "shape",
            shape_name,
            f"a shape that rule {rule.name!r} ({rule.draws.value}) can verify: "
            + ", ".join(sorted(fitting)),
        )
    chosen = not {"length", "length_min"}.isdisjoint(given)
    guarded = method.lossless and LENGTHS[length].guarded and not chosen
    return Plan(resolved, method, shape, rule, parts, guarded)


def _defaults(method: Method, parts: Sequence[Method]) -> dict[str, Any]:
    """The knobs of a method's drafters, with defaults.

    A method made of others has their knobs as well; its own defaults override theirs.
    """
    return {key: value for m in (*parts, method) for key, value in m.knob_defaults.items()}


def _check_drafter(length: str, method: Method, catalogue: Mapping[str, Method]) -> None:
    """Check that the controller works with the method's drafter."""
    drafters = LENGTHS[length].drafters
    if drafters is None or method.drafter in drafters:
        return
    others = (n for n, p in LENGTHS.items() if p.drafters is None or method.drafter in p.drafters)
    methods = sorted(m.name for m in catalogue.values() if m.drafter in drafters)
    raise InvalidArgument(
        "length",
        length,
        f"{', '.join(sorted(others))}; {length!r} {LENGTHS[length].why}: {', '.join(methods)}",
    )


def _part_knobs(
    method: Method, length: LengthPart, rule: AcceptanceRule, shape: ShapePart | None
) -> tuple[Knob[Any], ...]:
    """The knobs of a method's parts other than its drafter."""
    drawn = (DRAFT_SUPPORT,) if rule.draws.needs_q and method.shape is not None else ()
    return (*length.knobs, *(shape.knobs if shape is not None else ()), *rule.knobs, *drawn)


def _known_knobs(
    method: Method, defaults: Mapping[str, Any], length: LengthPart, knobs: Sequence[Knob[Any]]
) -> frozenset[str]:
    known = COMMON_KNOBS | SIZE_KNOBS | defaults.keys() | {knob.name for knob in knobs}
    if method.shape is not None:
        known |= {"shape", BRANCHING.name}  # a shape without branching ignores it
    return frozenset(known - {knob.name for knob in length.decides})


def known_knobs(
    given: Mapping[str, Any], catalogue: Mapping[str, Method] = METHODS
) -> frozenset[str]:
    """The knobs of a method with the shape, rule and controller in ``given``.

    Args:
        given: knobs of a request, ``method`` included; :func:`resolve` refuses unknown names, not
            this function.
    """
    method = catalogue.get(given["method"])
    if method is None:
        return frozenset()
    length = LENGTHS.get(given.get("length", method.length), LENGTHS["fixed"])
    rule = ACCEPTANCE_RULES.get(given.get("acceptance", method.acceptance))
    shape = SHAPES.get(given.get("shape", method.shape)) if method.shape is not None else None
    knobs = _part_knobs(method, length, rule or ACCEPTANCE_RULES[method.acceptance], shape)
    defaults = _defaults(method, _parts(method, given, catalogue))
    return _known_knobs(method, defaults, length, knobs)


def _check_rule(
    rule: AcceptanceRule, values: Mapping[str, Any], method: Method, parts: Sequence[Method]
) -> None:
    """Check that the request allows what is lossy, and that a rule for chains gets chains."""
    rules = ACCEPTANCE_RULES.values()
    if not method.lossless and rule.lossless and not values.get("allow_lossy"):
        raise InvalidArgument(
            "method", method.name, "a lossless method, or allow_lossy: true: this one leaves out "
            "layers of the target",
        )  # fmt: skip
    if not rule.lossless and not values.get("allow_lossy"):
        lossless = ", ".join(sorted(other.name for other in rules if other.lossless))
        raise InvalidArgument(
            "acceptance", rule.name, f"a lossless rule ({lossless}), or allow_lossy: true"
        )
    if not rule.chain_only:
        return
    for_trees = ", ".join(
        sorted(r.name for r in rules if not r.chain_only and (r.lossless or not rule.lossless))
    )
    if values["shape"] not in (None, "chain"):
        raise InvalidArgument(
            "acceptance",
            rule.name,
            f"a rule that verifies trees ({for_trees}) with shape {values['shape']!r}; this one "
            "verifies chains only: shape 'chain'",
        )
    trees = [each.name for each in (method, *parts) if each.makes_trees]
    if trees:
        raise InvalidArgument(
            "acceptance",
            rule.name,
            f"a rule that verifies trees ({for_trees}) with {trees[0]}, whose drafts are trees; "
            "this one verifies chains only",
        )


def _parts(
    method: Method, given: Mapping[str, Any], catalogue: Mapping[str, Method]
) -> tuple[Method, ...]:
    """The methods of the drafters that a method consists of; () for a method without the knob."""
    defaults = method.knob_defaults
    if "drafters" not in defaults:
        return ()
    names = tuple(given.get("drafters") or defaults["drafters"] or ())
    takes_heads = DRAFTER_PARTS[method.drafter].passes_on
    by_drafter: dict[str, Method] = {}
    for each in catalogue.values():  # a drafter's first method says which knobs it has
        # A head reads the states of its own draft, so it cannot be part of a merged one.
        if (
            each.drafter not in ("none", "client")
            and "drafters" not in each.knob_defaults
            and (not each.makes_trees if takes_heads else not each.head)
        ):
            by_drafter.setdefault(each.drafter, each)
    for i, name in enumerate(names):
        _one_of(f"drafters[{i}]", name, by_drafter)
    parts = tuple(by_drafter[name] for name in names)
    seen: set[str] = set()
    for i, part in enumerate(parts):
        twice = sorted(seen.intersection((part.drafter, *part.uses)))
        if twice:
            raise InvalidArgument(
                f"drafters[{i}]", part.drafter,
                f"a drafter that does not use {twice[0]!r}, which an earlier one uses",
            )  # fmt: skip
        seen.update((part.drafter, *part.uses))
    return parts


def _fit_shape(
    values: dict[str, Any], given: Mapping[str, Any], method: Method, shape: ShapePart
) -> None:
    """Drop the method's values for other shapes than the chosen one; set a fixed tree's depth."""
    own = {knob.name for knob in shape.knobs}
    if values["shape"] != method.shape:
        for name in {"node_budget", BRANCHING.name} - given.keys():
            values.pop(name, None)
        values |= {knob.name: knob.default for knob in shape.knobs if knob.name not in given}
    for part in SHAPES.values():
        for knob in part.knobs:
            if knob.name not in own:
                values.pop(knob.name, None)
    # If only a fallback uses the shape, the method's depth is that of its copies.
    if shape.depth and "num_speculative_tokens" not in given and "fallback_depth" not in values:
        values["num_speculative_tokens"] = shape.depth(_unchecked(values))


def _default_nodes(values: Mapping[str, Any], depth: int, shape: ShapePart | None) -> int:
    """Default node budget of a draft that is ``depth`` deep."""
    if depth == 0 or shape is None:
        return depth
    return min(MAX_NODES, shape.nodes(_unchecked(values), depth))


def _unchecked(values: Mapping[str, Any]) -> Knobs:
    """Values of which each was checked alone, for parts that complete them."""
    return SpeculationConfig.model_construct(None, **values)


def _set_length_bounds(values: dict[str, Any], length: LengthPart) -> int:
    """Fill in the bounds between which the controller chooses; returns the upper one."""
    depth: int = values.get("num_speculative_tokens") or 0
    if LENGTH_MAX.name not in {knob.name for knob in length.knobs}:
        return depth
    if depth == 0:  # AR, whatever the controller
        values["length_min"] = values["length_max"] = 0
    longest: int = values.setdefault("length_max", depth)
    shortest = values["length_min"]
    if shortest > longest:
        raise InvalidArgument("length_min", shortest, f"<= length_max ({longest})")
    return longest


def _one_of(field_name: str, value: Any, known: Mapping[Any, Any]) -> None:
    if value not in known:
        allowed = ", ".join(sorted(map(str, known)))
        raise InvalidArgument(field_name, value, f"one of {allowed}")


AR_PLAN = resolve(SpeculationConfig(method="ar"))

# Not in the catalogue: only the verify service chooses it, never a user.
CLIENT_METHOD = Method(
    name="client",
    paper="",
    summary="Drafts come from the client, round by round.",
    drafter="client",
    shape=None,
    acceptance="coupled",
    length="fixed",
    defaults={"num_speculative_tokens": 64, "node_budget": 256},
)
