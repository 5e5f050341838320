"""From a SpeculationConfig to the parts that it names, with every combination checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.acceptance.base import AcceptanceRule
from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthController
from paceline.methods import ACCEPTANCE_RULES, COMMON_KNOBS, LENGTHS, METHODS, SHAPES, Method
from paceline.shapes.base import Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated SpeculationConfig with its parts: what a session carries.

    ``config`` has every knob of the row filled in.
    """

    config: SpeculationConfig
    method: Method
    shape: Shape | None
    rule: AcceptanceRule

    @property
    def drafters(self) -> tuple[str, ...]:
        """Every drafter that takes part, the row's own first."""
        return (self.method.drafter, *self.method.uses)

    def new_length_controller(self) -> LengthController:
        return LENGTHS[self.config.length or self.method.length](self.config)


def resolve(config: SpeculationConfig, catalogue: Mapping[str, Method] = METHODS) -> Plan:
    """Fill in a row's defaults and check that the combination can work.

    Raises:
        InvalidArgument: unknown method, shape, rule or controller; a knob that the method does
            not have; a combination that cannot be exact, with what would work instead.
    """
    method = catalogue.get(config.method)
    if method is None:
        raise InvalidArgument("method", config.method, f"one of {', '.join(sorted(catalogue))}")
    given = config.overrides()
    has_shape = method.shape is not None
    known = COMMON_KNOBS | method.defaults.keys() | ({"shape", "branching"} if has_shape else set())
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
        **{key: value for key, value in method.defaults.items() if value is not None},
        **given,
    }
    _one_of("shape", values["shape"], SHAPES if has_shape else {None: None})
    _one_of("acceptance", values["acceptance"], ACCEPTANCE_RULES)
    _one_of("length", values["length"], LENGTHS)
    rule = ACCEPTANCE_RULES[values["acceptance"]]
    if not rule.lossless and not values.get("allow_lossy"):
        raise InvalidArgument("acceptance", rule.name, "a lossless rule, or allow_lossy: true")
    if rule.chain_only and values["shape"] not in (None, "chain"):
        raise InvalidArgument(
            "acceptance",
            rule.name,
            f"a rule that verifies trees ('coupled', 'greedy') with shape {values['shape']!r}, "
            "or shape 'chain'",
        )
    if "ngram_min" in values and values["ngram_min"] > values["ngram_max"]:
        raise InvalidArgument(
            "ngram_min", values["ngram_min"], f"<= ngram_max ({values['ngram_max']})"
        )
    if values.get("shape") != "kary":
        values.pop("branching", None)
        values.setdefault("node_budget", values["num_speculative_tokens"])
    else:
        values.setdefault("branching", 2)
        values.setdefault("node_budget", _kary_nodes(values))
    resolved = SpeculationConfig.model_validate(values)
    shape = SHAPES[values["shape"]](resolved) if has_shape else None
    return Plan(resolved, method, shape, rule)


def _kary_nodes(values: Mapping[str, Any]) -> int:
    width, depth = values["branching"], values["num_speculative_tokens"]
    return int(min(64, sum(width**level for level in range(1, depth + 1))))


def _one_of(field_name: str, value: Any, known: Mapping[Any, Any]) -> None:
    if value not in known:
        allowed = ", ".join(sorted(map(str, known)))
        raise InvalidArgument(field_name, value, f"one of {allowed}")


AR_PLAN = resolve(SpeculationConfig(method="ar"))

# Not in the catalogue: users do not choose it, the verify service does.
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
