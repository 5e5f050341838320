"""TapOut: a bandit that chooses, draft by draft, which stopping rule ends the draft.

Sridhar et al. 2025 (arXiv 2511.02017). Rules that need no training decide after each token, from
the drafter's distribution p, whether to draft on; which of them works best depends on the models
and on the text. The sequence-level bandit chooses one arm (a rule) for each draft, and its reward
is what was accepted of the draft. Sessions of an engine with equal knobs learn together. With H as
the entropy of p in nats, the arms stop a draft when the following holds (the rules are the paper's,
the thresholds were chosen here):

- ``max_confidence``: the highest probability is below 0.8;
- ``logit_margin``: the two highest probabilities differ by less than 0.2;
- ``svip``: sqrt(H) is above 0.6 (Zhang et al. 2024, arXiv 2411.18462);
- ``svip_difference``: sqrt(H) has risen by more than 0.2 since the last token;
- ``adaedl``: 1 - sqrt(0.2 H), a bound of the acceptance rate, is below a threshold that follows the
  acceptance rate so far (Agrawal et al. 2024, arXiv 2410.18351).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from paceline.exact_math import log64, sum64, weights64
from paceline.knobs import Knob
from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    LengthBounds,
    LengthContext,
    LengthPart,
    length_bounds,
)
from paceline.types import Budget, DraftStep, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

Algorithm = Literal["ucb1", "ucb_tuned", "thompson"]

BANDIT = Knob[Algorithm](
    "bandit", Algorithm, "ucb1",
    "How `tapout` chooses among its stopping rules: by upper confidence bounds (`ucb1`, "
    "`ucb_tuned`) or by Thompson sampling (`thompson`).",
    search=("ucb1", "thompson"),
)  # fmt: skip
REWARD_BLEND = Knob[float](
    "reward_blend", float, 0.5,
    "Weight of the accepted length in the reward of `tapout`; the rest is the acceptance rate.",
    ge=0.0, le=1.0, search=(0.25, 0.5, 0.75),
)  # fmt: skip

CONFIDENCE = 0.8
MARGIN = 0.2
ROOT_ENTROPY = 0.6
ROOT_ENTROPY_RISE = 0.2
# AdaEDL's constants: weight of the entropy in its bound, target of the acceptance rate, step and
# memory of the threshold.
GAMMA, TARGET_RATE, STEP, MEMORY_RATE, MEMORY_THRESHOLD = 0.2, 0.9, 0.01, 0.5, 0.9


class Bandit:
    """A stochastic bandit with rewards in [0, 1].

    Args:
        num_arms: every arm is pulled once before any is chosen by its rewards.
        algorithm: UCB1 and UCB-tuned of Auer et al. 2002, or Thompson sampling from Beta posteriors
            (a reward counts as a success with its value as the weight).
    """

    def __init__(self, num_arms: int, algorithm: Algorithm) -> None:
        self.counts = [0] * num_arms
        self.sums = [0.0] * num_arms
        self._squares = [0.0] * num_arms
        self._algorithm = algorithm
        self._random = random.Random(0)

    def choose(self) -> int:
        """The arm to pull next."""
        for arm, count in enumerate(self.counts):
            if not count:
                return arm
        return max(range(len(self.counts)), key=self._index)

    def _index(self, arm: int) -> float:
        count, total = self.counts[arm], self.sums[arm]
        if self._algorithm == "thompson":
            return self._random.betavariate(1.0 + total, 1.0 + count - total)
        mean, spread = total / count, math.log(sum(self.counts)) / count
        if self._algorithm == "ucb1":
            return mean + math.sqrt(2.0 * spread)
        variance = self._squares[arm] / count - mean * mean + math.sqrt(2.0 * spread)
        return mean + math.sqrt(spread * min(0.25, variance))

    def learn(self, arm: int, reward: float) -> None:
        """Count a pull of ``arm`` and its reward, between 0 and 1."""
        self.counts[arm] += 1
        self.sums[arm] += reward
        self._squares[arm] += reward * reward


class Arms:
    """The stopping rules; they judge one draft, token by token, from :meth:`start` on."""

    def __init__(self) -> None:
        self._last_root = math.inf
        self._threshold = 0.0  # of AdaEDL, which starts by drafting everything
        self._rate = TARGET_RATE
        self.rules: dict[str, Callable[[np.ndarray], bool]] = {
            "max_confidence": lambda p: bool(p.max() < CONFIDENCE),
            "logit_margin": self._narrow,
            "svip": lambda p: root_entropy(p) > ROOT_ENTROPY,
            "svip_difference": self._rises,
            "adaedl": lambda p: 1.0 - math.sqrt(GAMMA) * root_entropy(p) < self._threshold,
        }

    def start(self) -> None:
        """Forget the last draft."""
        self._last_root = math.inf

    def learn(self, rate: float) -> None:
        """Move AdaEDL's threshold: up while too little is accepted, down otherwise."""
        self._rate = MEMORY_RATE * self._rate + (1.0 - MEMORY_RATE) * rate
        step = STEP if self._rate < TARGET_RATE else -STEP
        moved = self._threshold + step
        mixed = MEMORY_THRESHOLD * self._threshold + (1.0 - MEMORY_THRESHOLD) * moved
        self._threshold = min(1.0, max(0.0, mixed))

    def _narrow(self, p: np.ndarray) -> bool:
        best = np.partition(p, -2)[-2:] if len(p) > 1 else np.array([0.0, p[0]])
        return bool(best[1] - best[0] < MARGIN)

    def _rises(self, p: np.ndarray) -> bool:
        root, last = root_entropy(p), self._last_root
        self._last_root = root
        return root - last > ROOT_ENTROPY_RISE


def root_entropy(p: np.ndarray) -> float:
    """The square root of the entropy, in nats, of a distribution.  # [k]"""
    return math.sqrt(max(0.0, -sum64(p * log64(np.where(p > 0.0, p, 1.0)))))


class TapOutStop(StopRule):
    """Ends each draft with the rule that the bandit has chosen for it.

    It learns in the process that drafts, where the tokens' distributions are.

    Args:
        longest: drafts have at most this many tokens; the accepted length counts as a share of it.
    """

    def __init__(self, bandit: Bandit, shortest: int, longest: int, blend: float) -> None:
        self._bandit = bandit
        self._arms = Arms()
        self._rules = list(self._arms.rules.values())
        self._shortest, self._longest, self._blend = shortest, longest, blend
        self._arm: int | None = None  # of the draft whose outcome has not come
        self._is_ahead = False  # the same arm ends a draft that follows it on a guess

    def stop_after(self, step: DraftStep) -> bool:
        if step.depth == 1 or self._arm is None:
            self._arms.start()
            self._is_ahead = self._arm is not None
            if self._arm is None:
                self._arm = self._bandit.choose()
        weights, total = weights64(step.scores.astype(np.float64))
        stops = self._rules[self._arm](weights / total)
        return stops and step.depth >= self._shortest

    def observe(self, outcome: Outcome) -> None:
        drafted, arm = outcome.draft.num_nodes, self._arm
        if arm is None or not drafted:
            return
        if not (self._is_ahead and outcome.num_accepted == drafted):
            self._arm = None
        self._is_ahead = False
        rate = outcome.num_accepted / drafted
        length = outcome.num_accepted / self._longest
        self._bandit.learn(arm, self._blend * length + (1.0 - self._blend) * rate)
        self._arms.learn(rate)


class TapOut:
    """Always asks for the longest draft, which :class:`TapOutStop` ends early.

    Only chains can stop after a single token; other drafts keep their full depth.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self, bounds: LengthBounds, bandit: Algorithm, blend: float, context: LengthContext
    ) -> None:
        self._budget = bounds.budget(bounds.longest)
        shared = context.shared(
            ("tapout", bounds, bandit, blend), lambda: Bandit(len(Arms().rules), bandit)
        )
        self.stop_rule: StopRule | None = TapOutStop(
            shared, bounds.shortest, max(1, bounds.longest), blend
        )

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        assert self.stop_rule is not None
        self.stop_rule.observe(outcome)


TAPOUT = LengthPart(
    make=lambda knobs, context: TapOut(
        length_bounds(knobs), knobs[BANDIT], knobs[REWARD_BLEND], context
    ),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(20), BANDIT, REWARD_BLEND),
)
