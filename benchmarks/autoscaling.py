"""The autoscaling policy on simulated load: ``python benchmarks/autoscaling.py`` draws the plots of
docs/kubernetes.md.

The policy is the real one, called with Serve's own contexts, and Serve's own delays apply to its
decisions; the code that spreads sessions over drafters is the real one, too. Only the clock, the
sessions and the times of rounds and drafts are simulated. What sessions wait that share a drafter
is that of benchmarks/drafter_pool.py, which compares it with measurements.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.drafter_pool import Costs
from benchmarks.drafter_pool import simulate as simulate_frames
from paceline.cluster.autoscaling import Policy
from paceline.rpc.drafter_places import REBALANCE_S, DrafterLoad, DrafterPlaces

# On an idle replica a round takes 40 ms, and 15 ms more for each session beside; a forward of a
# drafter takes 8 ms, and 4 ms more for each session in it.
ROUND_MS = (40.0, 15.0)
COSTS = Costs(draft_s=0.008, session_s=0.004, verify_s=0.15)
TOKENS_A_ROUND = 2.2
"""With drafts; without them rounds give one token, and sessions last so much longer."""
START_S = 45.0
"""Seconds from the decision until a new replica serves: starting a pod, Ray, the model."""
GOALS = {"sessions_per_target": 8.0, "round_ms": 200.0, "draft_ms": 30.0}
BOUNDS = {"target": (1, 10), "drafter": (1, 6)}
UP_S, DOWN_S, LOOK_BACK_S = 10.0, 300.0, 20.0
STEP_S = 1.0
SETTLED_S = 20.0
"""Seconds after which sessions no longer move if nothing else changes."""


@dataclass
class Role:
    """Replicas of one deployment, serving and starting."""

    wanted: int
    running: int
    starting: list[float] = field(default_factory=list)  # when they start to serve
    delays: dict[str, Any] = field(default_factory=dict)  # state of Serve's delay logic

    def move(self, wanted: int, now: float) -> None:
        """Change the number of replicas: new ones start, surplus ones stop at once."""
        self.starting = [at for at in self.starting if at > now]
        missing = wanted - self.running - len(self.starting)
        self.starting += [now + START_S] * max(0, missing)
        for _ in range(max(0, -missing)):
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1
        self.wanted = wanted

    def tick(self, now: float) -> None:
        """Let started replicas serve."""
        ready = [at for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.running += len(ready)


@cache
def draft_ms_of(sessions: int) -> float:
    """The wait of a frame at a drafter with so many sessions, of targets with up to four each."""
    targets = math.ceil(sessions / 4)
    return 1000 * simulate_frames(targets, math.ceil(sessions / targets), 1, COSTS, seconds=20.0)


class Pools:
    """The pools of all targets: which session drafts where."""

    def __init__(self) -> None:
        self._targets: list[tuple[DrafterPlaces, dict[str, DrafterLoad]]] = []
        self._num_opened = 0
        self._load: tuple[int, ...] = ()
        self._changed_at = 0.0
        self._wait_ms: float | None = None

    def _totals(self) -> Counter[str]:
        return Counter(a for places, _ in self._targets for a in places.of.values())

    def step(self, now: float, sessions: int, targets: int, drafters: int) -> float | None:
        """Let a second pass; returns the mean time that a session waits for a draft, in ms."""
        if self._load != (load := (sessions, targets, drafters)):
            self._load, self._changed_at = load, now
        if now - self._changed_at < SETTLED_S:
            self._wait_ms = self._step(now, sessions, targets, drafters)
        return self._wait_ms

    def _step(self, now: float, sessions: int, targets: int, drafters: int) -> float | None:
        while len(self._targets) < targets:
            self._targets.append((DrafterPlaces((0.618 * len(self._targets)) % 1), {}))
        del self._targets[targets:]
        by_load = [places for places, _ in self._targets]
        while sum(len(places.of) for places in by_load) > sessions:
            fullest = max(by_load, key=lambda places: len(places.of))
            del fullest.of[next(iter(fullest.of))]
        missing = sessions - sum(len(places.of) for places in by_load)
        for part in range(round(STEP_S / REBALANCE_S)):
            at = now + part * REBALANCE_S
            for places, loads in self._targets:
                for address in set(loads) - {str(d) for d in range(drafters)}:
                    del loads[address]
                for d in range(drafters):
                    loads.setdefault(str(d), DrafterLoad())
                for address, load in loads.items():
                    load.sessions = self._totals()[address]
                for name in list(places.of):
                    places.place(name, loads, at)
            for _ in range(missing):
                self._num_opened += 1
                places, loads = min(self._targets, key=lambda each: len(each[0].of))
                places.place(f"s{self._num_opened}", loads, at)
            missing = 0
            for places, loads in self._targets:
                places.rebalance(set(places.of), loads, at)
            totals = self._totals()
            for places, loads in self._targets:
                for address in set(places.of.values()):
                    loads[address].sessions = totals[address]
                    for _ in range(4):  # of the frames of half a second
                        loads[address].observe(draft_ms_of(totals[address]) / 1000, at)
        shared = self._totals()
        waits = [(draft_ms_of(count), count) for count in shared.values()]
        return sum(ms * count for ms, count in waits) / sessions if sessions else None


@dataclass(frozen=True)
class Moment:
    """One second of a simulation."""

    at: float
    sessions: float
    targets: int
    drafters: int
    targets_running: int
    drafters_running: int
    round_ms: float
    draft_ms: float | None


def simulate(
    offered: Callable[[float], float], seconds: float, stuck: Callable[[float], bool] | None = None
) -> list[Moment]:
    """Run the policy for a number of seconds.

    Args:
        offered: concurrent sessions at a given time if every round had a draft.
        stuck: whether all drafters fail to answer at a given time.
    """
    from ray.serve._private.common import DeploymentID, TimeStampedValue
    from ray.serve.autoscaling_policy import _apply_delay_logic
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    policy = Policy(**GOALS)
    roles = {name: Role(low, low) for name, (low, _) in BOUNDS.items()}
    keys = {name: DeploymentID(name, "paceline") for name in BOUNDS}
    configs = {
        name: AutoscalingConfig(
            min_replicas=low, max_replicas=high, upscale_delay_s=UP_S, downscale_delay_s=DOWN_S,
            look_back_period_s=LOOK_BACK_S,
        )
        for name, (low, high) in BOUNDS.items()
    }  # fmt: skip
    totals = dict.fromkeys(
        ("rounds", "verify_seconds", "draft_frames", "draft_wait_seconds", "drafts_lost"), 0.0
    )
    series: dict[str, list[Any]] = {name: [] for name in (*totals, "sessions")}
    moments = []
    pools = Pools()
    for step in range(int(seconds / STEP_S)):
        now = step * STEP_S
        for role in roles.values():
            role.tick(now)
        lost = stuck is not None and stuck(now)
        sessions = offered(now) * (TOKENS_A_ROUND if lost else 1.0)
        targets, drafters = roles["target"].running, roles["drafter"].running
        round_ms = ROUND_MS[0] + ROUND_MS[1] * sessions / targets
        draft_ms = pools.step(now, round(sessions), targets, drafters) or 0.0
        rounds = sessions * STEP_S * 1000 / (round_ms + (0 if lost else draft_ms))
        totals["rounds"] += rounds
        totals["verify_seconds"] += rounds * round_ms / 1000
        if lost:
            totals["drafts_lost"] += rounds
        else:
            totals["draft_frames"] += rounds
            totals["draft_wait_seconds"] += rounds * draft_ms / 1000
        for name, value in {**totals, "sessions": sessions}.items():
            series[name].append(TimeStampedValue(now, value))
            series[name] = [p for p in series[name] if p.timestamp > now - LOOK_BACK_S]
        contexts = {
            keys[name]: AutoscalingContext(
                deployment_id=keys[name], deployment_name=name, app_name="paceline",
                current_num_replicas=role.running, target_num_replicas=role.wanted,
                running_replicas=[], total_num_requests=sessions, total_queued_requests=0.0,
                aggregated_metrics=None,
                raw_metrics={n: {"all": s} for n, s in series.items()} if name == "target" else {},
                capacity_adjusted_min_replicas=BOUNDS[name][0],
                capacity_adjusted_max_replicas=BOUNDS[name][1],
                policy_state={}, last_scale_up_time=None, last_scale_down_time=None,
                current_time=now, config=configs[name],
            )
            for name, role in roles.items()
        }  # fmt: skip
        wanted, _ = policy(contexts)
        for name, role in roles.items():
            low, high = BOUNDS[name]
            number, role.delays = _apply_delay_logic(
                min(high, max(low, wanted[keys[name]])),
                role.wanted,
                configs[name],
                role.delays,
                now,
            )
            role.move(number, now)
        moments.append(
            Moment(
                now, sessions, roles["target"].wanted, roles["drafter"].wanted, targets, drafters,
                round_ms, None if lost or not sessions else draft_ms,
            )
        )  # fmt: skip
    return moments


def diurnal(t: float) -> float:
    """A day of six hours with its night, then no load at all."""
    return 0.0 if t > 6 * 3600 else 2 + 46 * math.sin(math.pi * t / (6 * 3600)) ** 2


def bursts(seed: int, seconds: float) -> list[float]:
    """When bursts of five minutes begin, at least twenty minutes apart."""
    chance = random.Random(seed)
    starts, t = [], 600.0
    while t < seconds - 1800:
        starts.append(t)
        t += 1200 + chance.uniform(0, 900)
    return starts


def bursty(starts: list[float]) -> Callable[[float], float]:
    """Six sessions, and forty in a burst."""
    return lambda t: 40.0 if any(start <= t < start + 300 for start in starts) else 6.0


STUCK = (1800.0, 3600.0)


def is_stuck(t: float) -> bool:
    return STUCK[0] <= t < STUCK[1]


def steady(t: float) -> float:
    """Twenty-four sessions for two hours, then none."""
    return 24.0 if t < 7200 else 0.0


def runs() -> dict[str, list[Moment]]:
    """All three."""
    return {
        "diurnal": simulate(diurnal, 7.5 * 3600),
        "bursty": simulate(bursty(bursts(1, 3 * 3600)), 3 * 3600),
        "stuck drafter": simulate(steady, 2.5 * 3600, is_stuck),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/autoscaling.png"))
    out: Path = parser.parse_args().out
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = runs()
    figure, axes = pyplot.subplots(3, len(found), figsize=(13, 7), sharex="col")
    for column, (name, moments) in enumerate(found.items()):
        hours = [m.at / 3600 for m in moments]
        load, replicas, times = axes[:, column]
        load.plot(hours, [m.sessions for m in moments], color="tab:gray")
        load.set_title(name)
        for role, colour in (("targets", "tab:blue"), ("drafters", "tab:orange")):
            replicas.step(hours, [getattr(m, role) for m in moments], color=colour, label=role)
        for key, colour in (("round_ms", "tab:blue"), ("draft_ms", "tab:orange")):
            times.plot(hours, [getattr(m, key) for m in moments], color=colour, label=key)
            times.axhline(GOALS[key], color=colour, linestyle=":")
        times.set_yscale("log")
        times.set_xlabel("hours")
        over = sum(m.round_ms > GOALS["round_ms"] for m in moments) / len(moments)
        print(
            f"{name}: rounds over {GOALS['round_ms']:g} ms in {over:.1%} of the time; targets at "
            f"most {max(m.targets for m in moments)}, mean "
            f"{sum(m.targets_running for m in moments) / len(moments):.1f}; drafters at most "
            f"{max(m.drafters for m in moments)}; in the end {moments[-1].targets} and "
            f"{moments[-1].drafters}"
        )
    for row, label in enumerate(("sessions", "replicas wanted", "ms")):
        axes[row, 0].set_ylabel(label)
    axes[1, 0].legend()
    axes[2, 0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=80)
    print(f"{out} written")


if __name__ == "__main__":
    main()
