"""From one YAML block to a Serve application: ``import_path: paceline.deployments.app:build``."""

from __future__ import annotations

import threading
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from paceline.deployments.config import (
    SESSION_POLICY,
    Autoscaling,
    DeploymentConfig,
    DrafterConfig,
    GatewayConfig,
    TargetConfig,
    parse_config,
)
from paceline.deployments.drafter import HEALTH_TIMEOUT_S, DrafterDeployment
from paceline.deployments.gateway import GatewayDeployment
from paceline.deployments.learner import LearnerDeployment
from paceline.deployments.target import TargetDeployment

TARGET, DRAFTER, GATEWAY, LEARNER = "target", "drafter", "gateway", "learner"
"""Names of the deployments in the application."""

# Every lease is a Serve request: do not log each one.
_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")

_COMMON: dict[str, Any] = {
    "logging_config": _LOGGING,
    # What fails at the start (a model file, a port) fails again: report it at once.
    "max_constructor_retry_count": 1,
    "health_check_period_s": 5,
    "graceful_shutdown_wait_loop_s": 0.1,
}

_ROUTER_LOCK = threading.Lock()
"""To pickle a router, Ray marks its module in a set of the process, and then removes the mark: of
two threads that build an application at once, one would find it gone."""


def build(args: dict[str, Any]) -> Application:
    """The Serve application that ``args`` describe.

    Serve may call this on a node without the models, so the replicas look for them.

    Raises:
        InvalidArgument: as :func:`paceline.deployments.config.parse_config`.
    """
    config = parse_config(args, models_here=False)
    learner = _learner(config) if config.online.enabled else None
    drafter = _drafter(config, learner) if config.topology == "actors" else None
    return GatewayDeployment.options(
        name=GATEWAY,
        **_num_replicas(config, config.gateway),
        max_replicas_per_node=1 if config.gateway.has_fixed_port else None,
        max_ongoing_requests=1000,
        # Serve does not see its calls: it drains by itself, then closes its ports and files.
        graceful_shutdown_timeout_s=config.gateway.drain_s + 5,
        ray_actor_options=config.gateway.actor_options(),
        **_COMMON,
    ).bind(config, _target(config, drafter, learner))


def _target(
    config: DeploymentConfig, drafter: Application | None, learner: Application | None
) -> Application:
    limits = config.target.limits
    # By its path: Serve pickles a class, and the controller has no need to load this one.
    router = "paceline.deployments.affinity:AffinityRouter"
    with _ROUTER_LOCK:
        router_config = RequestRouterConfig(
            request_router_class=router, request_router_kwargs={"standby": config.target.standby}
        )
    return TargetDeployment.options(
        name=TARGET,
        request_router_config=router_config,
        **_num_replicas(config, config.target),
        max_replicas_per_node=1 if config.direct.enabled and config.direct.port else None,
        # The engine refuses what exceeds its limits, with a reason; Serve would queue it. A full
        # queue is still open to tenants with less than their share of it.
        max_ongoing_requests=limits.max_sessions + 2 * limits.max_waiting + 16,
        graceful_shutdown_timeout_s=config.target.drain_s,
        ray_actor_options=config.target.actor_options(),
        **_COMMON,
    ).bind(config, drafter, learner)  # fmt: skip


def _learner(config: DeploymentConfig) -> Application:
    return LearnerDeployment.options(
        name=LEARNER,
        num_replicas=1,
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=1,
        ray_actor_options=config.online.actor_options(),
        **_COMMON,
    ).bind(config)


def _drafter(config: DeploymentConfig, learner: Application | None) -> Application:
    return DrafterDeployment.options(
        name=DRAFTER,
        **_num_replicas(config, config.drafter),
        max_ongoing_requests=1000,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        # Its leases live as long as the targets, and losing a drafter costs no tokens.
        graceful_shutdown_timeout_s=1,
        ray_actor_options=config.drafter.actor_options(),
        **_COMMON,
    ).bind(config, learner)  # fmt: skip


_Role = TargetConfig | DrafterConfig | GatewayConfig


def _num_replicas(config: DeploymentConfig, role: _Role) -> dict[str, Any]:
    scaling = role.autoscaling
    if scaling is None and (role is not config.target or config.drafter.autoscaling is None):
        return {"num_replicas": role.num_replicas}
    if scaling is None:  # the policy decides about drafters by what targets report
        scaling = Autoscaling(min_replicas=role.num_replicas, max_replicas=role.num_replicas)
    first = min(max(role.num_replicas, scaling.min_replicas), scaling.max_replicas)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            initial_replicas=first,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_period_s=scaling.look_back_s,
            target_ongoing_requests=scaling.target_sessions,
            policy=_policy(config, role, scaling),
        )
    }


def _policy(config: DeploymentConfig, role: _Role, scaling: Autoscaling) -> AutoscalingPolicy:
    """What decides if the application has no policy."""
    if role is config.target:
        return AutoscalingPolicy()
    return AutoscalingPolicy(
        policy_function=SESSION_POLICY, policy_kwargs={"sessions": scaling.target_sessions}
    )
