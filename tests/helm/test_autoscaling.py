"""The autoscaling policy: what it asks for, and the result under simulated load."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.autoscaling import (
    BOUNDS,
    DOWN_S,
    GOALS,
    LOOK_BACK_S,
    START_S,
    STUCK,
    UP_S,
    Moment,
    bursts,
    bursty,
    diurnal,
    is_stuck,
    simulate,
    steady,
)
from paceline.cluster.autoscaling import (
    PoolLoad,
    Replicas,
    SessionPolicy,
    drafters_wanted,
    load_of,
    targets_wanted,
)

# Ray's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
REACTION_S = LOOK_BACK_S + UP_S + START_S + 5
"""Until more replicas serve after the load has risen."""
ROUND_MS = GOALS["round_ms"]


def changes(moments: list[Moment], role: str) -> list[tuple[float, int]]:
    """When the number changed, and by how much."""
    pairs = itertools.pairwise(moments)
    steps = [(b.at, getattr(b, role) - getattr(a, role)) for a, b in pairs]
    return [(at, step) for at, step in steps if step]


def never_flaps(moments: list[Moment]) -> bool:
    """No step back sooner than its own delay after a step."""
    for role in ("targets", "drafters"):
        for (before, first), (after, second) in itertools.pairwise(changes(moments, role)):
            if first * second < 0 and after - before < (DOWN_S if second < 0 else UP_S):
                return False
    return True


def test_targets_follow_sessions_and_the_time_of_rounds() -> None:
    def wanted(sessions: float, now: Replicas, round_ms: float | None = None) -> int:
        load = PoolLoad(sessions=sessions, round_ms=round_ms)
        return targets_wanted(load, now, sessions_per_target=8, round_ms=200)

    assert wanted(17, Replicas(1, 1)) == 3
    assert wanted(16, Replicas(2, 2), 400) == 4  # rounds take twice as long as they should
    assert wanted(16, Replicas(2, 2), 100_000) == 4  # at most twice as many for that
    assert wanted(16, Replicas(2, 1), 400) == 2  # until the second one has started
    assert wanted(15, Replicas(3, 3)) == 3  # 2 would do, but at 94 %
    assert wanted(12, Replicas(3, 3)) == 2
    assert wanted(0, Replicas(5, 5)) == 1


def test_drafters_follow_what_targets_wait() -> None:
    def wanted(draft_ms: float | None, now: Replicas, lost: float = 0.0) -> int:
        load = PoolLoad(sessions=9, draft_ms=draft_ms, lost=lost)
        return drafters_wanted(load, now, draft_ms=30)

    assert wanted(31, Replicas(2, 2)) == 3
    assert wanted(500, Replicas(2, 2)) == 4
    assert wanted(500, Replicas(4, 2)) == 4  # until the others have started
    assert wanted(25, Replicas(3, 3)) == 3
    assert wanted(10, Replicas(3, 3)) == 2
    assert wanted(1, Replicas(1, 1)) == 1
    assert wanted(None, Replicas(4, 4)) == 1  # no session drafts
    assert wanted(None, Replicas(4, 4), lost=1.0) == 4  # no drafter answers
    assert wanted(2000, Replicas(2, 2), lost=0.6) == 2


def test_the_load_is_what_counters_grew_by() -> None:
    from ray.serve._private.common import TimeStampedValue as At

    def series(*values: float) -> list[At]:
        return [At(float(i), value) for i, value in enumerate(values)]

    load = load_of(
        {
            "sessions": {"a": series(2, 4), "b": series(1, 1)},
            "rounds": {"a": series(100, 150), "b": series(0, 50)},
            "verify_seconds": {"a": series(10, 15), "b": series(0, 5)},
            "draft_frames": {"a": series(5, 15)},
            "draft_wait_seconds": {"a": series(1, 1.2)},
            "drafts_lost": {"a": series(0, 30)},
        }
    )
    assert (load.sessions, load.round_ms, load.lost) == (4, 100, 0.75)
    assert load.draft_ms == pytest.approx(20)
    assert load_of({}) == PoolLoad(sessions=0)


def test_serve_loads_the_policy_by_its_name() -> None:
    """As the controller does: imported, pickled, made with its arguments, wrapped, and called."""
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve._private.common import DeploymentID, TimeStampedValue
    from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

    named = AutoscalingPolicy(
        policy_function="paceline.cluster.autoscaling:Policy", policy_kwargs=GOALS
    )
    policy = _apply_app_level_autoscaling_config(_resolve_policy_callable(named))
    config = AutoscalingConfig(max_replicas=8, upscale_delay_s=0)

    def context(name: str, sessions: float) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=DeploymentID(name, "paceline"), deployment_name=name,
            app_name="paceline", current_num_replicas=1, target_num_replicas=1,
            running_replicas=[], total_num_requests=0, total_queued_requests=0,
            aggregated_metrics=None,
            raw_metrics={"sessions": {"a": [TimeStampedValue(1.0, sessions)]}},
            capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8, policy_state={},
            last_scale_up_time=None, last_scale_down_time=None, current_time=1.0, config=config,
        )  # fmt: skip

    def wanted(**sessions: float) -> dict[str, int]:
        contexts = [context(name, number) for name, number in sessions.items()]
        decisions, _ = policy({each.deployment_id: each for each in contexts})
        return {key.name: number for key, number in decisions.items()}

    assert wanted(target=30.0) == {"target": 4}
    assert wanted(target=30.0, gateway=130.0) == {"target": 4, "gateway": 3}
    assert wanted(gateway=130.0) == {"gateway": 3}


def test_drafters_follow_their_sessions_without_a_policy_of_the_application() -> None:
    """Serve calls it for the drafters alone, with what they record themselves."""
    from ray.serve._private.common import DeploymentID, TimeStampedValue
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    def wanted(now: int, *sessions: float) -> int:
        recorded = {str(i): [TimeStampedValue(1.0, count)] for i, count in enumerate(sessions)}
        context = AutoscalingContext(
            deployment_id=DeploymentID("drafter", "paceline"), deployment_name="drafter",
            app_name="paceline", current_num_replicas=now, target_num_replicas=now,
            running_replicas=[], total_num_requests=80.0, total_queued_requests=0,
            aggregated_metrics=None, raw_metrics={"sessions": recorded},
            capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8, policy_state={},
            last_scale_up_time=None, last_scale_down_time=None, current_time=1.0,
            config=AutoscalingConfig(max_replicas=8),
        )  # fmt: skip
        decision, _ = SessionPolicy(sessions=8)(context)
        return decision

    assert wanted(1, 40.0) == 5
    assert wanted(5, 8.0, 8.0, 8.0, 8.0, 8.0) == 5
    assert wanted(5, 8.0, 8.0, 8.0, 7.0, 0.0) == 5  # 4 would do, but at 97 %
    assert wanted(5, 6.0, 6.0, 0.0, 0.0, 0.0) == 2
    assert wanted(5) == 1


@pytest.mark.slow
def test_a_day() -> None:
    moments = simulate(diurnal, 7.5 * 3600)
    assert all(m.round_ms <= ROUND_MS for m in moments)
    assert all(m.draft_ms is None or m.draft_ms <= GOALS["draft_ms"] * 1.1 for m in moments)
    assert never_flaps(moments)
    assert max(m.targets for m in moments) >= 6
    assert (moments[-1].targets, moments[-1].drafters) == (
        BOUNDS["target"][0],
        BOUNDS["drafter"][0],
    )


@pytest.mark.parametrize("seed", range(3))
def test_bursts(seed: int) -> None:
    seconds = 2 * 3600.0
    starts = bursts(seed, seconds)
    moments = simulate(bursty(starts), seconds)
    late = [
        m
        for m in moments
        if m.round_ms > ROUND_MS and not any(s <= m.at < s + REACTION_S for s in starts)
    ]
    assert late == []
    assert max(m.targets for m in moments) <= 6  # 5 would do
    assert never_flaps(moments)
    assert moments[-1].targets == BOUNDS["target"][0]


def test_a_stuck_drafter() -> None:
    moments = simulate(steady, 2.5 * 3600, is_stuck)
    begin, end = STUCK
    slow = [m for m in moments if m.round_ms > ROUND_MS]
    # Sessions that go on as AR last longer, and targets are added for them; once at the beginning,
    # once when drafts fail.
    assert all(m.at < REACTION_S or begin <= m.at < begin + REACTION_S for m in slow)
    meanwhile = [m.drafters for m in moments if begin + LOOK_BACK_S < m.at < end]
    assert len(set(meanwhile)) == 1, "more drafters do not help, and fewer would be missed later"
    assert never_flaps(moments)
    assert (moments[-1].targets, moments[-1].drafters) == (1, 1)
