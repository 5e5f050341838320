"""Which methods an engine of vLLM runs.

A deployment starts vLLM in one of two ways, by its own ``speculation.method``: with Paceline's
drafters, and then each request may choose a method; or with one of vLLM's own methods
(``VLLM_METHODS``), which then drafts for all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config import SpeculationConfig
from paceline.deployments.vllm_plan import chain_plan
from paceline.errors import InvalidArgument
from paceline.methods import DRAFTERS, METHODS, VLLM_METHODS, Method
from paceline.plan import Plan, resolve
from paceline.rpc.mirrors import served_with

if TYPE_CHECKING:
    from paceline.deployments.config import DeploymentConfig


class VllmMethods:
    """The methods of a deployment with ``engine: vllm``.

    Args:
        replicas: whether drafter replicas serve the draft model.

    Attributes:
        catalogue: Paceline's methods and vLLM's own, by name.
        own: vLLM's own method that drafts for all requests; None with Paceline's drafters.
    """

    def __init__(self, config: DeploymentConfig, *, replicas: bool) -> None:
        self.catalogue: Mapping[str, Method] = {**METHODS, **VLLM_METHODS}
        self.own = VLLM_METHODS.get(config.speculation.method)
        self._speculation = config.speculation
        self._max_depth = config.vllm.max_speculative_tokens
        self._replicas = replicas
        self._has_drafter = replicas or config.drafter_folder is not None

    @property
    def drafters(self) -> set[str]:
        """Names of all drafters of the catalogue."""
        names = {n for method in self.catalogue.values() for n in (method.drafter, *method.uses)}
        return names - {"none"}

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a method; None if it can."""
        if self.own is not None:
            if method.name == self.own.name:
                return None
            return f"vLLM drafts for all requests by {self.own.name}"
        if method.engine == "vllm":
            return "the deployment's own `speculation` chooses it for all requests"
        try:
            self.plan(SpeculationConfig(method=method.name, allow_lossy=not method.lossless))
        except InvalidArgument as error:
            return str(error)
        return None

    def plan(self, config: SpeculationConfig) -> Plan:
        """The method, parts and knobs of a configuration.

        Raises:
            InvalidArgument: this engine cannot run it.
        """
        if self.own is not None:
            if config != self._speculation:
                raise InvalidArgument(
                    "speculation", config.method, f"the deployment's own, {self.own.name}: vLLM "
                    "drafts by it for all requests",
                )  # fmt: skip
            return resolve(config, VLLM_METHODS)
        if config.method in VLLM_METHODS:
            raise InvalidArgument(
                "method", config.method, "a method of Paceline's: this deployment started vLLM "
                f"with Paceline's drafters (speculation.method: {config.method} starts it with "
                "its own)",
            )  # fmt: skip
        plan = chain_plan(config, self._max_depth)
        given = {"none", *(["draft_model"] if self._has_drafter else [])}
        missing = [n for n in plan.drafters if n not in given and n not in DRAFTERS]
        if self._replicas and served_with(plan.method, "draft_model"):
            missing = []
        if missing:
            raise InvalidArgument(
                "method", config.method, "a method whose drafters are loaded here "
                f"({', '.join(missing)} is not)",
            )  # fmt: skip
        return plan
