"""Chooses the exit layer and the speculation length of a self-drafting target, round by round.

DEL, Entezari Zarch, Gao, Jiang, Annavaram 2025 (arXiv 2504.05598). Verification computes every
layer of the drafted tokens anyway. The shared norm and head turn the states after a layer into its
*shadow token*, the token that an exit there would have drafted. How often it equals the target's
token is the layer's acceptance rate. From these rates, the next round takes the exit layer and the
length with the most tokens per loaded layer (TPL). The draft ends early when the exit layer is
unsure of a token (dynamic draft exiting).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    ConfidenceStop,
    LengthBounds,
    LengthContext,
    LengthPart,
    length_bounds,
)
from paceline.models.exits import EXIT_LAYER, EXIT_LAYERS
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

DECAY = 0.9  # weight of a watched round (one whose shadow tokens are computed) relative to the next
COMMON_DECAY = 0.99  # the same, for the rates that all sessions of an engine share
DEEPEST_EXIT = 0.6  # share of the layers
NUM_EXITS = 6  # each runs the head for every verified token, so not all layers are watched
# Shadow tokens run the head for each exit: the first WATCH_ALL rounds are watched, and then one of
# WATCH_EVERY.
WATCH_ALL, WATCH_EVERY = 4, 4
COST_MEMORY = 0.99  # factor by which the weight of older seconds shrinks in each round
PRIOR_WEIGHT = 1.0  # weight of the first guess of an acceptance rate, in tokens

Floats = npt.NDArray[np.float64]


def tokens_per_layer(
    acceptance: npt.ArrayLike,
    exit_layers: Sequence[int],
    num_layers: float,
    longest: int,
    head_layers: float = 0.0,
) -> Floats:
    """TPL(l, d) = (1 - a^(d+1)) / (1 - a) / (d l + L) for every exit l and length d = 0, 1, ...

    Args:
        acceptance: rate a of each exit, in [0, 1].  # [num_exits]
        num_layers: L, the layers that a verification loads.
        head_layers: size of the output layer, counted in layers; every exit loads it as well. The
            paper leaves it out, but in a small model it is most of a shallow exit's cost.

    Returns:
        # [longest + 1, num_exits] tokens for each loaded layer
    """
    depth = np.arange(longest + 1)[:, None]
    tokens = np.cumsum(np.asarray(acceptance, np.float64) ** depth, axis=0)
    loaded = depth * (np.asarray(exit_layers) + head_layers) + num_layers
    values: Floats = tokens / loaded
    return values


def best_exit(
    acceptance: npt.ArrayLike,
    exit_layers: Sequence[int],
    num_layers: float,
    shortest: int,
    longest: int,
    head_layers: float = 0.0,
) -> tuple[int, int]:
    """The exit and the length in [shortest, longest] with the highest TPL.

    Among equals, the shortest draft wins, then the first exit.
    """
    values = tokens_per_layer(acceptance, exit_layers, num_layers, longest, head_layers)[shortest:]
    depth, place = np.unravel_index(int(values.argmax()), values.shape)
    return exit_layers[int(place)], shortest + int(depth)


def evenly_spread(num_layers: int, count: int = NUM_EXITS) -> tuple[int, ...]:
    """Up to ``count`` exits at even distances in the first part of the model.

    With a later exit, each drafted token would cost most of a verification.
    """
    places = {round(i * DEEPEST_EXIT * num_layers / count) for i in range(1, count + 1)}
    return tuple(sorted(place for place in places if 1 <= place < num_layers))


class Rates:
    """Decayed sums of how often the exits were right.

    Args:
        guess: first guess of each exit's acceptance rate, weighing ``PRIOR_WEIGHT`` tokens.
            # [num_exits]
    """

    def __init__(self, guess: Floats, decay: float) -> None:
        self._decay = decay
        self._weight = PRIOR_WEIGHT
        self._accepted = PRIOR_WEIGHT * guess

    def observe(self, right: Floats, count: int) -> None:
        """Learn that ``right`` of ``count`` shadow tokens were right.  # right: [num_exits]"""
        self._weight = self._decay * self._weight + count
        self._accepted = self._decay * self._accepted + right

    @property
    def values(self) -> Floats:
        """# [num_exits]"""
        rates: Floats = self._accepted / self._weight
        return rates


class LayerCosts:
    """The cost of a verification in drafting layers, measured over all sessions of an engine.

    Args:
        layers: the first guess, which is the paper's number: all layers of the model.
    """

    def __init__(self, layers: float) -> None:
        self._guess = layers
        # Decayed sums over rounds: drafting layers and their seconds, verifications and theirs.
        self._sums = np.zeros(4)

    @property
    def verification(self) -> float:
        """Cost of a verification, in drafting layers."""
        layers, draft, count, verify = self._sums
        return float((verify / count) / (draft / layers)) if draft and verify else self._guess

    def observe(self, layers: float, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round whose drafting ran ``layers`` layers in all."""
        known_layers, draft, count, verify = self._sums
        if count:  # far above the average: another process had the machine
            draft_seconds = min(draft_seconds, 3 * layers * draft / known_layers)
            verify_seconds = min(verify_seconds, 3 * verify / count)
        new = np.array([layers, draft_seconds, 1.0, verify_seconds])
        self._sums = COST_MEMORY * self._sums + new


class Del:
    """Takes the exit layer and the length with the most tokens per layer for this session's text.

    If the target's layers cannot run one by one, it has no exits, and every round is AR.

    Args:
        exit_layers: the exit layers to choose from; None: evenly spread ones.

    Attributes:
        exit_layers: the exit layers that it watches.
    """

    def __init__(
        self, bounds: LengthBounds, exit_layers: Sequence[int] | None, context: LengthContext
    ) -> None:
        self._bounds = bounds
        self._num_layers, self._head_layers = context.num_layers, context.head_layers
        self._exit_logits = context.exit_logits
        self.exit_layers = tuple(exit_layers or evenly_spread(context.num_layers))
        self._temperature = 0.0
        # Later exits are right more often.
        guess = np.asarray(self.exit_layers, np.float64) / max(1, context.num_layers)
        # A session begins with the rates that the engine's earlier sessions have found.
        self._common = context.shared(("del", self.exit_layers), lambda: Rates(guess, COMMON_DECAY))
        self._rates = Rates(self._common.values, DECAY)
        # For the wrong shadow tokens of each exit taken so far: sum of confidences, and number.
        self._confidence = np.zeros((2, len(self.exit_layers)))
        self._rounds = self._asked = 0
        self._choice: tuple[int, int] | None = None  # valid until the rates change
        self._costs = context.shared(("del", bounds), lambda: LayerCosts(context.num_layers))
        self._taken = 0  # index of this round's exit
        self._stop = ConfidenceStop(bounds.shortest, 0.0)
        self.stop_rule: StopRule | None = self._stop

    @property
    def needs(self) -> frozenset[Need]:
        """Layer states, in watched rounds."""
        number = self._rounds + 1
        watched = number <= WATCH_ALL or number % WATCH_EVERY == 0
        return frozenset({Need.LAYER_STATES}) if watched else frozenset()

    @property
    def acceptance(self) -> Floats:
        """Estimated acceptance rate of each exit.  # [num_exits]"""
        return self._rates.values

    def budget(self, session: SessionView, load: Load) -> Budget:
        self._temperature = session.params.temperature
        if not self.exit_layers or not self._num_layers:
            return Budget(0, 0)
        if self._choice is None:
            self._choice = best_exit(
                self.acceptance, self.exit_layers, self._costs.verification,
                self._bounds.shortest, self._bounds.longest, self._head_layers,
            )  # fmt: skip
        exit_layer, depth = self._choice
        self._taken = self.exit_layers.index(exit_layer)
        self._asked = depth
        self._stop.threshold = self.stop_threshold(exit_layer)
        budget = self._bounds.budget(depth)
        return Budget(budget.depth, budget.nodes, exit_layer if depth else None)

    def stop_threshold(self, exit_layer: int) -> float:
        """The mean confidence of an exit in its wrong tokens; 0 while unknown.

        A threshold halfway to the confidence in right tokens is too eager: it ends drafts that
        would have continued correctly, and a target forward costs as much as several drafted
        tokens. Above temperature 0 it is 0 as well, because confidence there is not that of the
        argmax.
        """
        total, count = self._confidence[:, self.exit_layers.index(exit_layer)]
        return 0.0 if self._temperature or not count else float(total / count)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Compare the shadow tokens of every exit with the target's, along the accepted path.

        Above temperature 0 no shadow token is drawn: the overlap of the two distributions is the
        probability that a draw would be accepted.
        """
        drafted = outcome.draft.num_nodes
        if drafted and drafted == self._asked:  # the steps of a draft that ended early are unknown
            loaded = drafted * (self.exit_layers[self._taken] + self._head_layers)
            self._costs.observe(loaded, draft_seconds, verify_seconds)
        watched_round = bool(self.needs)
        self._rounds += 1
        if not watched_round:  # other sessions of the batch may have asked for the states
            return
        verification = outcome.verification
        states = verification.extras.get(Need.LAYER_STATES)
        if states is None or self._exit_logits is None or not self.exit_layers:
            return
        # After the first rejected token, the context is wrong.
        rows = [0, *(node + 1 for node in outcome.path)]
        target = verification.logits[rows]  # [rows, vocab]
        layers = [exit_layer - 1 for exit_layer in self.exit_layers]
        watched = states[rows][:, layers]  # [rows, exits, hidden]
        logits = self._exit_logits(watched.flatten(0, 1)).unflatten(0, watched.shape[:2])
        if self._temperature:
            p = (target / self._temperature).softmax(-1)
            q = (logits / self._temperature).softmax(-1)
            right = q.minimum(p[:, None]).sum(-1).clamp(max=1.0)
        else:
            right = logits.argmax(-1) == target.argmax(-1)[:, None]
            taken = logits[:, self._taken].softmax(-1).amax(-1)
            self._learn_confidence(_numpy(taken), _numpy(right[:, self._taken]))
        self._choice = None
        found = _numpy(right.sum(0))
        self._rates.observe(found, len(rows))
        self._common.observe(found, len(rows))

    def _learn_confidence(self, confidence: Floats, right: Floats) -> None:
        """Learn how confident the round's exit was of its wrong shadow tokens.  # both [rows]"""
        wrong = 1.0 - right
        self._confidence *= DECAY
        self._confidence[:, self._taken] += confidence @ wrong, wrong.sum()


def _numpy(values: torch.Tensor) -> Floats:
    result: Floats = values.double().cpu().numpy()
    return result


DEL = LengthPart(
    make=lambda knobs, context: Del(length_bounds(knobs), knobs[EXIT_LAYERS], context),
    knobs=(LENGTH_MIN, LENGTH_MAX, EXIT_LAYERS),
    decides=(EXIT_LAYER,),
    drafters=frozenset({"early_exit"}),
    why="chooses the exit layer of a target that drafts for itself",
)
