"""A policy for Serve's autoscaler: how many targets, drafters and gateways should run.

A Serve config file names it for the whole application, because the number of drafters follows from
measurements of the targets::

    autoscaling_policy:
      policy_function: paceline.cluster.autoscaling:Policy
      policy_kwargs: {sessions_per_target: 8, round_ms: 200, draft_ms: 50}

It returns how many replicas are wanted now. Serve keeps within ``min_replicas`` and
``max_replicas``, and acts once more (fewer) replicas were wanted for ``upscale_delay_s``
(``downscale_delay_s``) without a break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_SPARE = 0.8
"""Fewer replicas are wanted only if they would then be used to at most this share. Otherwise a load
on the verge of one more replica would start and stop it again and again."""
_MOST_GROWTH = 2.0
"""Slow rounds or drafts at most double the replicas: time is only a symptom of load."""
_STUCK = 0.5
"""If this share of the drafts is lost, the number of drafters stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What all targets together measured in the look-back period.

    Attributes:
        sessions: running and waiting ones.
        round_ms: mean time of a verification; None if there was none.
        draft_ms: mean time that a target waited for a draft; None if there was none.
        lost: share of drafts that came too late, or for which no drafter could be asked.
    """

    sessions: float
    round_ms: float | None = None
    draft_ms: float | None = None
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas a deployment should have, and how many run; the others are starting."""

    wanted: int
    running: int


def targets_wanted(
    load: PoolLoad, now: Replicas, *, sessions_per_target: float, round_ms: float
) -> int:
    """How many targets the sessions need, so that a round takes ``round_ms``.

    ``sessions_per_target`` is the expected number of sessions that a target verifies in that time.
    If rounds take longer than the number of sessions explains, the function assumes fewer, in
    proportion.
    """
    wanted = load.sessions / sessions_per_target
    if load.round_ms is not None:
        crowded = max(1.0, wanted / max(1, now.running))
        slow = load.round_ms / round_ms / crowded
        wanted *= min(max(1.0, slow), _MOST_GROWTH)
    if math.ceil(wanted) >= now.wanted:
        return math.ceil(wanted)
    return min(now.wanted, max(1, math.ceil(wanted / _SPARE)))


def drafters_wanted(load: PoolLoad, now: Replicas, *, draft_ms: float) -> int:
    """How many drafters are needed, so that targets wait ``draft_ms`` for a draft.

    A lost draft says nothing about load: with more drafters it would be lost as well, and its
    session goes on as AR. So while most drafts are lost, the number stays.
    """
    if load.lost >= _STUCK:
        return now.wanted
    if load.draft_ms is None:
        return 1
    if load.draft_ms > draft_ms:  # replicas that are starting have not helped yet
        more = math.ceil(now.running * min(load.draft_ms / draft_ms, _MOST_GROWTH))
        return max(now.wanted, more)
    # At worst all of the time is load, which the remaining drafters share.
    fewer = now.wanted - 1
    if fewer > 0 and load.draft_ms * now.running / fewer <= draft_ms * _SPARE:
        return fewer
    return now.wanted


class Policy:
    """The policy: Serve's controller calls it with what the targets have recorded.

    Args:
        sessions_per_target, round_ms: see :func:`targets_wanted`.
        draft_ms: see :func:`drafters_wanted`.
        sessions_per_gateway: that a gateway carries.
    """

    def __init__(
        self,
        *,
        sessions_per_target: float = 8.0,
        round_ms: float = 200.0,
        draft_ms: float = 50.0,
        sessions_per_gateway: float = 64.0,
    ) -> None:
        self._targets = {"sessions_per_target": sessions_per_target, "round_ms": round_ms}
        self._draft_ms = draft_ms
        self._gateways = SessionPolicy(sessions=sessions_per_gateway)

    def __call__(
        self, contexts: Mapping[Any, AutoscalingContext]
    ) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """The number of replicas wanted, by deployment, and the policy's state, which is empty."""
        named = {context.deployment_name: (key, context) for key, context in contexts.items()}
        wanted: dict[Any, int] = {}
        if "gateway" in named:
            key, context = named["gateway"]
            wanted[key], _ = self._gateways(context)
        if "target" not in named:
            return wanted, {}
        key, context = named["target"]
        load = load_of(context.raw_metrics or {})
        wanted[key] = targets_wanted(load, _replicas(context), **self._targets)
        if "drafter" in named:
            key, context = named["drafter"]
            wanted[key] = drafters_wanted(load, _replicas(context), draft_ms=self._draft_ms)
        return wanted, {}


class SessionPolicy:
    """The policy of drafters in an application that has none, and of gateways: sessions decide.

    Serve's own would count leases, of which each target has one on every drafter, and knows of no
    call of a gateway.

    Args:
        sessions: of a replica, at most.
    """

    def __init__(self, *, sessions: float = 8.0) -> None:
        self._sessions = sessions

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, and the policy's state, which is empty."""
        sessions = load_of(context.raw_metrics or {}).sessions
        wanted = sessions / self._sessions
        now = _replicas(context).wanted
        if math.ceil(wanted) < now:
            wanted = min(now, wanted / _SPARE)
        return max(1, math.ceil(wanted)), {}


def _replicas(context: AutoscalingContext) -> Replicas:
    return Replicas(context.target_num_replicas, context.current_num_replicas)


def load_of(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> PoolLoad:
    """The load that replicas recorded.

    Args:
        metrics: time series of ``record_autoscaling_stats``, by name and replica.
    """

    def series(name: str) -> Iterable[list[float]]:
        return ([point.value for point in s] for s in metrics.get(name, {}).values() if s)

    def grown(name: str) -> float:
        return sum(values[-1] - values[0] for values in series(name))

    def mean_ms(seconds: str, count: str) -> float | None:
        number = grown(count)
        return 1000 * grown(seconds) / number if number > 0 else None

    answered, lost = grown("draft_frames"), grown("drafts_lost")
    return PoolLoad(
        sessions=sum(sum(values) / len(values) for values in series("sessions")),
        round_ms=mean_ms("verify_seconds", "rounds"),
        draft_ms=mean_ms("draft_wait_seconds", "draft_frames"),
        lost=lost / (answered + lost) if lost else 0.0,
    )
