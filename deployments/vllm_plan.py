"""How an engine of vLLM runs a method: with chains, by vLLM's own acceptance rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.acceptance.exact_match import Coupled
from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.methods import METHODS, Method
from paceline.plan import Plan, resolve
from paceline.shapes.kary import chain


class ChainRule(Coupled):
    """The engine's own rule, as drafters see it: chains only, and no distribution is read."""

    chain_only = True


def chain_plan(
    config: SpeculationConfig, max_depth: int, catalogue: Mapping[str, Method] = METHODS
) -> Plan:
    """The plan of a configuration for an engine that verifies chains by a rule of its own.

    A method that drafts a tree gets a chain instead, unless the configuration names a shape.

    Raises:
        InvalidArgument: as :func:`paceline.plan.resolve`; a shape or an acceptance rule that vLLM
            does not have; a drafter that needs more than tokens; a draft deeper than ``max_depth``.
    """
    plan = resolve(config, catalogue)
    if plan.shape is not None and plan.shape != chain():
        if config.shape is not None:
            raise InvalidArgument("shape", config.shape, "'chain': vLLM verifies no trees")
        plan = resolve(config.model_copy(update={"shape": "chain"}), catalogue)
    if plan.rule.name not in ("coupled", "greedy"):
        raise InvalidArgument(
            "acceptance", plan.rule.name, "'coupled': vLLM accepts by a rule of its own"
        )
    lacking = needs_beyond_tokens(plan)
    if lacking:
        raise InvalidArgument(
            "method", config.method, f"a method that drafts from tokens alone: vLLM gives its "
            f"drafters no {', '.join(lacking)}",
        )  # fmt: skip
    depth = plan.config.num_speculative_tokens or 0
    if depth > max_depth and config.num_speculative_tokens is not None:
        raise InvalidArgument(
            "num_speculative_tokens", depth, f"at most {max_depth}, which this engine was started "
            "with (vllm.max_speculative_tokens)",
        )  # fmt: skip
    return replace(plan, rule=ChainRule())


def needs_beyond_tokens(plan: Plan) -> list[str]:
    """What the method of a plan, or one of its parts, needs of the target beside tokens."""
    methods = (plan.method, *plan.parts)
    return sorted({n.value for method in methods for n in method.needs - method.optional_needs})
