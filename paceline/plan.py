"""Resolves a SpeculationConfig into the parts that it names, and checks their combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.acceptance.base import AcceptanceRule, knobs_of, with_knobs
from paceline.config import MAX_NODES, SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext, LengthController
from paceline.methods import (
    ACCEPTANCE_RULES,
    COMMON_KNOBS,
    DEPTH_POLICIES,
    LENGTH_KNOBS,
    LENGTHS,
    METHODS,
    SHAPE_KNOBS,
    SHAPES,
    UNGUARDED,
    VLLM_METHODS,
    Method,
    template_paths,
    while_pays,
)
from paceline.shapes.base import Shape
from paceline.shapes.rsd_c import BranchingVector
from paceline.types import DepthPolicy, Need

# Wide enough to lose little acceptance, narrow enough to send over a network; any width is exact.
DRAFT_SUPPORT = 64


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
        return DEPTH_POLICIES[name](self.config) if name else None

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

    def new_length_controller(self, context: LengthContext | None = None) -> LengthController:
        """A controller for one session; ``context`` is shared by all sessions of an engine.

        Raises:
            InvalidArgument: a trained controller has no weights, or none that fit.
        """
        name = self.config.length or self.method.length
        context = context or LengthContext()
        controller = LENGTHS[name](self.config, context)
        if not self.guarded:
            return controller
        return while_pays(controller, self.config, context)


def resolve(config: SpeculationConfig, catalogue: Mapping[str, Method] = METHODS) -> Plan:
    """Fill in a method's defaults and check that the combination can work.

    Raises:
        InvalidArgument: the method, shape, rule or controller is unknown; the method lacks the
            knob; or the combination cannot be exact (the message says what works instead).
    """
    method = catalogue.get(config.method)
    if method is None:
        allowed = f"one of {', '.join(sorted(catalogue))}"
        if config.method in VLLM_METHODS:
            allowed += f" ({config.method} runs in a deployment with engine: vllm)"
        raise InvalidArgument("method", config.method, allowed)
    given = config.overrides()
    parts = _parts(method, given, catalogue)
    # A method made of others has their knobs as well; its own defaults override theirs.
    defaults = {key: value for each in (*parts, method) for key, value in each.defaults.items()}
    length = given.get("length", method.length)
    _one_of("length", length, LENGTHS)
    if length == "del" and method.drafter != "early_exit":
        exits = sorted(m.name for m in catalogue.values() if m.drafter == "early_exit")
        raise InvalidArgument(
            "length",
            length,
            f"{', '.join(sorted(LENGTHS.keys() - {'del'}))}; 'del' chooses the exit layer of a "
            f"target that drafts for itself: {', '.join(exits)}",
        )
    acceptance = given.get("acceptance", method.acceptance)
    _one_of("acceptance", acceptance, ACCEPTANCE_RULES)
    rule = ACCEPTANCE_RULES[acceptance]
    rule_knobs = _rule_knobs(rule, method)
    shape_name = given.get("shape", method.shape)
    if method.shape is not None:
        _one_of("shape", shape_name, SHAPES)
    # A method without a shape refuses the knob ``shape`` below, whatever its value.
    shape_knobs = SHAPE_KNOBS.get(shape_name, {}) if shape_name else {}
    known = _known_knobs(method, defaults, length, rule_knobs, shape_knobs)
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
        **{key: value for key, value in LENGTH_KNOBS[length].items() if value is not None},
        **shape_knobs,
        **rule_knobs,
        **{key: value for key, value in defaults.items() if value is not None},
        **given,
    }
    rule = with_knobs(rule, values)
    _check_rule(rule, values, method, parts)
    if "ngram_min" in values and values["ngram_min"] > values["ngram_max"]:
        raise InvalidArgument(
            "ngram_min", values["ngram_min"], f"<= ngram_max ({values['ngram_max']})"
        )
    if "window_size" in values:
        _fit_lookahead(values)
    if shape_name:
        _fit_shape(values, given, method)
    longest = _set_length_bounds(values, LENGTH_KNOBS[length])
    values.setdefault("node_budget", _default_nodes(values, longest))
    resolved = SpeculationConfig.model_validate(values)
    shape = SHAPES[shape_name](resolved) if shape_name else None
    if shape is not None and rule.draws not in shape.draws:
        fitting = [n for n, make in SHAPES.items() if rule.draws in make(resolved).draws]
        raise InvalidArgument(
            "shape",
            shape_name,
            f"a shape that rule {rule.name!r} ({rule.draws.value}) can verify: "
            + ", ".join(sorted(fitting)),
        )
    chosen = not {"length", "length_min"}.isdisjoint(given)
    guarded = method.lossless and length not in UNGUARDED and not chosen
    return Plan(resolved, method, shape, rule, parts, guarded)


def _rule_knobs(rule: AcceptanceRule, method: Method) -> dict[str, Any]:
    knobs = knobs_of(rule)
    if rule.draws.needs_q and method.shape is not None:
        knobs["draft_support"] = DRAFT_SUPPORT
    return knobs


def _known_knobs(
    method: Method,
    defaults: Mapping[str, Any],
    length: str,
    rule_knobs: Mapping[str, Any],
    shape_knobs: Mapping[str, Any],
) -> frozenset[str]:
    known = COMMON_KNOBS | LENGTH_KNOBS[length].keys() | rule_knobs.keys() | defaults.keys()
    if method.shape is not None:
        known |= {"shape", "branching"} | shape_knobs.keys()
    return frozenset(known)


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
    parts = _parts(method, given, catalogue)
    defaults = {key: value for each in (*parts, method) for key, value in each.defaults.items()}
    rule = ACCEPTANCE_RULES.get(given.get("acceptance", method.acceptance))
    length = given.get("length", method.length)
    shape = given.get("shape", method.shape)
    return _known_knobs(
        method,
        defaults,
        length if length in LENGTH_KNOBS else "fixed",
        _rule_knobs(rule, method) if rule is not None else {},
        SHAPE_KNOBS.get(shape, {}) if shape else {},
    )


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
    """The methods of the drafters that a method merges; () for a method without the knob."""
    if "drafters" not in method.defaults:
        return ()
    names = tuple(given.get("drafters", method.defaults["drafters"]))
    by_drafter: dict[str, Method] = {}
    for each in catalogue.values():  # a drafter's first method says which knobs it has
        # A head reads the states of its own draft, so it cannot be part of another one.
        if (
            each.drafter not in ("none", "client")
            and "drafters" not in each.defaults
            and not each.head
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


def _fit_shape(values: dict[str, Any], given: Mapping[str, Any], method: Method) -> None:
    """Drop the method's values for other shapes than the chosen one; set a fixed tree's depth."""
    shape = values["shape"]
    if shape != method.shape:
        for knob in {"node_budget", "branching"} - given.keys():
            values.pop(knob, None)
        values |= {k: v for k, v in SHAPE_KNOBS[shape].items() if k not in given}
    for knob in set().union(*SHAPE_KNOBS.values()) - SHAPE_KNOBS[shape].keys():
        values.pop(knob, None)
    # If only a fallback uses the shape, the method's depth is that of its copies.
    if "num_speculative_tokens" not in given and "fallback_depth" not in values:
        if shape == "rsd_c":
            values["num_speculative_tokens"] = len(values["branching_vector"])
        if shape == "template":
            values["num_speculative_tokens"] = max(map(len, template_paths(values["template"])))


def _default_nodes(values: Mapping[str, Any], depth: int) -> int:
    """Default node budget of a draft that is ``depth`` deep."""
    shape, width = values["shape"], values.get("branching", 1)
    if depth == 0:
        return 0
    if shape == "kary":
        return int(min(64, sum(width**level for level in range(1, depth + 1))))
    if shape == "template":
        nodes = sum(len(path) <= depth for path in template_paths(values["template"]))
    elif shape == "rsd_c":
        nodes = BranchingVector(values["branching_vector"][:depth]).num_nodes
    elif shape in ("rsd_s", "iid"):
        nodes = width * depth
    elif shape in ("confidence", "dyspec", "sequoia"):
        nodes = 3 * depth
    else:
        nodes = depth
    return int(min(MAX_NODES, nodes))


def _set_length_bounds(values: dict[str, Any], knobs: Mapping[str, Any]) -> int:
    """Fill in the bounds between which the controller chooses; returns the upper one."""
    depth: int = values.get("num_speculative_tokens") or 0
    if "length_max" not in knobs:
        return depth
    if depth == 0:  # AR, whatever the controller
        values["length_min"] = values["length_max"] = 0
    longest: int = values.setdefault("length_max", depth)
    shortest = values["length_min"]
    if shortest > longest:
        raise InvalidArgument("length_min", shortest, f"<= length_max ({longest})")
    return longest


def _fit_lookahead(values: dict[str, Any]) -> None:
    """Set the depth and nodes that lookahead decoding needs for its window and pool."""
    window, size, guesses = (values[k] for k in ("window_size", "ngram_size", "pool_guesses"))
    nodes = (window + guesses) * (size - 1)
    if nodes > MAX_NODES:
        raise InvalidArgument(
            "window_size",
            window,
            f"(window_size + pool_guesses) * (ngram_size - 1) <= {MAX_NODES}, got {nodes}",
        )
    values.setdefault("num_speculative_tokens", window + size - 2)
    values.setdefault("node_budget", nodes)


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
