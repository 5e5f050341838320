"""Choose the exit layer and the speculation length of a self-drafting target, round by round.

DEL, Entezari Zarch, Gao, Jiang, Annavaram 2025 (arXiv 2504.05598). Verification computes every
layer of the drafted tokens anyway. The shared norm and head turn the states after a layer into its
*shadow token*, the one that an exit there would have drafted; how often it is the target's token
is the layer's acceptance rate. With it the next round takes the exit and the length with the most
tokens per loaded layer (TPL), and the draft ends early where the exit is unsure of a token (dynamic
draft exiting).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.lengths.base import ConfidenceStop, LengthBounds, LengthContext, StopRule
from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session

DECAY = 0.95  # weight of a round relative to the one after it
NUM_EXITS = 6  # each costs a head for every verified token, so not all layers are watched
PRIOR_WEIGHT = 1.0  # tokens that the first guess of an acceptance rate counts as

Floats = npt.NDArray[np.float64]


def tokens_per_layer(
    acceptance: npt.ArrayLike, exit_layers: Sequence[int], num_layers: int, longest: int
) -> Floats:
    """TPL(l, d) = (1 - a^(d+1)) / (1 - a) / (d l + L) for every exit l and length d = 0, 1, ...

    Args:
        acceptance: rate a of each exit, in [0, 1].  # [num_exits]

    Returns:
        # [longest + 1, num_exits] tokens for each layer that is loaded
    """
    depth = np.arange(longest + 1)[:, None]
    tokens = np.cumsum(np.asarray(acceptance, np.float64) ** depth, axis=0)
    values: Floats = tokens / (depth * np.asarray(exit_layers) + num_layers)
    return values


def best_exit(
    acceptance: npt.ArrayLike,
    exit_layers: Sequence[int],
    num_layers: int,
    shortest: int,
    longest: int,
) -> tuple[int, int]:
    """The exit and the length in [shortest, longest] with the highest TPL.

    Of equal ones the shortest draft, and then the first exit.
    """
    values = tokens_per_layer(acceptance, exit_layers, num_layers, longest)[shortest:]
    depth, place = np.unravel_index(int(values.argmax()), values.shape)
    return exit_layers[int(place)], shortest + int(depth)


def evenly_spread(num_layers: int, count: int = NUM_EXITS) -> tuple[int, ...]:
    """Up to ``count`` exits before the last layer, at even distances."""
    places = {round(i * num_layers / (count + 1)) for i in range(1, count + 1)}
    return tuple(sorted(place for place in places if 1 <= place < num_layers))


class Del:
    """The exit layer and the length with the most tokens per layer, for this session's text.

    Without a model whose layers can be had one by one there is no exit, and every round is AR.

    Args:
        exit_layers: the exits to choose from; None: evenly spread ones.

    Attributes:
        exit_layers: those that are watched.
    """

    needs: frozenset[Need] = frozenset({Need.LAYER_STATES})

    def __init__(
        self, bounds: LengthBounds, exit_layers: Sequence[int] | None, context: LengthContext
    ) -> None:
        self._bounds = bounds
        self._num_layers = context.num_layers
        self._exit_logits = context.exit_logits
        self.exit_layers = tuple(exit_layers or evenly_spread(context.num_layers))
        self._temperature = 0.0
        # An exit is the more often right the later it is.
        guess = np.asarray(self.exit_layers, np.float64) / max(1, context.num_layers)
        self._weight = PRIOR_WEIGHT
        self._accepted = PRIOR_WEIGHT * guess
        # Of each exit that was taken: [wrong, right shadow tokens; sum of confidences, number].
        self._confidence = np.zeros((2, 2, len(self.exit_layers)))
        self._taken = 0  # place of the exit of this round
        self._stop = ConfidenceStop(bounds.shortest, 0.0)
        self.stop_rule: StopRule | None = self._stop

    @property
    def acceptance(self) -> Floats:
        """Estimated acceptance rate of each exit.  # [num_exits]"""
        rates: Floats = self._accepted / self._weight
        return rates

    def budget(self, session: Session, load: Load) -> Budget:
        self._temperature = session.params.temperature
        if not self.exit_layers or not self._num_layers:
            return Budget(0, 0)
        exit_layer, depth = best_exit(
            self.acceptance, self.exit_layers, self._num_layers,
            self._bounds.shortest, self._bounds.longest,
        )  # fmt: skip
        self._taken = self.exit_layers.index(exit_layer)
        self._stop.threshold = self.stop_threshold(exit_layer)
        budget = self._bounds.budget(depth)
        return Budget(budget.depth, budget.nodes, exit_layer if depth else None)

    def stop_threshold(self, exit_layer: int) -> float:
        """Confidence halfway between an exit's wrong and its right tokens; 0 while unknown.

        0 as well above temperature 0, where a confidence is not that of the argmax.
        """
        place = self.exit_layers.index(exit_layer)
        sums, counts = self._confidence[:, 0, place], self._confidence[:, 1, place]
        if self._temperature or not counts.all():
            return 0.0
        return float((sums / counts).mean())

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Compare the shadow tokens of every exit with the target's, along the accepted path.

        Above temperature 0 no shadow token is drawn: the overlap of the two distributions is the
        chance that a draw would be accepted.
        """
        verification = outcome.verification
        states = verification.extras.get(Need.LAYER_STATES)
        if states is None or self._exit_logits is None or not self.exit_layers:
            return
        # Beyond the first rejected token the context is wrong.
        rows = [0, *(node + 1 for node in outcome.path)]
        target = verification.logits[rows]  # [rows, vocab]
        layers = [exit_layer - 1 for exit_layer in self.exit_layers]
        watched = states[rows][:, layers]  # [rows, exits, hidden]
        logits = self._exit_logits(watched.flatten(0, 1)).unflatten(0, watched.shape[:2])
        if self._temperature:
            p = (target / self._temperature).softmax(-1)
            q = (logits / self._temperature).softmax(-1)
            right = torch.minimum(q, p[:, None]).sum(-1).clamp(max=1.0)
        else:
            right = logits.argmax(-1) == target.argmax(-1)[:, None]
            taken = logits[:, self._taken].softmax(-1).amax(-1)
            self._learn_confidence(_numpy(taken), _numpy(right[:, self._taken]))
        self._weight = DECAY * self._weight + len(rows)
        self._accepted = DECAY * self._accepted + _numpy(right.sum(0))

    def _learn_confidence(self, confidence: Floats, right: Floats) -> None:
        """How sure the round's exit was of each shadow token.  # both [rows]"""
        self._confidence *= DECAY
        for place, where in enumerate((1.0 - right, right)):
            self._confidence[place, :, self._taken] += confidence @ where, where.sum()


def _numpy(values: torch.Tensor) -> Floats:
    result: Floats = values.double().cpu().numpy()
    return result
