"""A loop without models: length controllers against acceptance rates and costs that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.config import SpeculationConfig
from paceline.lengths.base import LengthContext, LengthController
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Draft, Load, Outcome, Verification

NO_LOGITS = Verification(torch.empty(0, 0))


def new_session(context: LengthContext | None = None, **knobs: object) -> Session:
    """A session that could go on for ever, with the method and the knobs of ``knobs``."""
    config = SpeculationConfig.model_validate({"method": "draft_model", **knobs})
    params = SamplingParams(max_tokens=1_000_000)
    return Session("s", [1], params, resolve(config), length_context=context)


def outcome(drafted: int, accepted: int) -> Outcome:
    """What a round of a chain of ``drafted`` tokens did."""
    tokens = tuple(range(accepted + 1))
    return Outcome(Draft.chain(range(drafted)), tokens[:-1], accepted, tokens, accepted, NO_LOGITS)


def play(controller: LengthController, session: Session, accepted: Sequence[int]) -> list[int]:
    """Depths that a controller asks for, given the number of accepted tokens of each draft."""
    asked = []
    for most in accepted:
        depth = controller.budget(session, Load(1, 0)).depth
        asked.append(depth)
        controller.observe(outcome(depth, min(most, depth)), 0.001, 0.002)
    return asked


@dataclass
class Simulator:
    """Steps of a batch; the clock is a cost model and the acceptance a coin.

    Attributes:
        draft, verify: seconds for a depth, and for the nodes of a whole batch.
        noise: spread of the seconds, as a share of them.
    """

    draft: Callable[[int], float]
    verify: Callable[[int], float]
    noise: float = 0.0
    seed: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def run(self, sessions: Sequence[Session], rates: Sequence[float], steps: int) -> None:
        """``steps`` steps for all sessions, each with its own acceptance rate."""
        for _ in range(steps):
            load = Load(len(sessions), 0)
            depths = [s.length_controller.budget(s, load).depth for s in sessions]
            self.asked += depths
            draft_s = self._noisy(self.draft(max(depths)) if max(depths) else 0.0)
            verify_s = self._noisy(self.verify(sum(depths) + len(depths)))
            self.seconds += draft_s + verify_s
            for session, depth, rate in zip(sessions, depths, rates, strict=True):
                accepted = 0
                while accepted < depth and self._random.random() < rate:
                    accepted += 1
                self.num_tokens += accepted + 1
                session.length_controller.observe(outcome(depth, accepted), draft_s, verify_s)

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.seconds

    def best_goodput(self, rate: float, batch: int, longest: int) -> tuple[int, float]:
        """The best fixed depth and its goodput, 0 included."""
        values = []
        for depth in range(longest + 1):
            tokens = sum(rate**level for level in range(depth + 1)) * batch
            seconds = self.verify(batch * (depth + 1)) + (self.draft(depth) if depth else 0.0)
            values.append(tokens / seconds)
        best = int(np.argmax(values))
        return best, values[best]

    def _noisy(self, seconds: float) -> float:
        return seconds * (1.0 + self.noise * self._random.exponential())
