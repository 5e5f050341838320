"""``exits``: teach an existing model to predict from its early layers.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710): training skips layers at random, later ones more
often, and reads out intermediate layers through the model's own final norm and head, with a loss of
their own. The result is an ordinary checkpoint of the same shape, whose first layers can draft for
the whole.

Unlike the paper, training skips a layer for a whole batch, not for single sequences, which saves
the layer's computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.train import losses
from paceline.train.checkpoints import (
    check_exits,
    check_layers,
    check_length,
    load_model,
    save_model,
)
from paceline.train.data import TrainingText
from paceline.train.pretrain import layer_states
from paceline.train.trainer import Batch
from paceline.types import IntArray

Curriculum = Literal["rotational", "gradual", "all"]
CURRICULA: tuple[str, ...] = get_args(Curriculum)


def read_out(model: Any, state: Tensor) -> Tensor:
    """Logits from the residual stream after any layer.  # float32 [..., vocab_size]"""
    logits: Tensor = model.lm_head(model.model.norm(state))
    return logits.float()


def enabled_exits(
    curriculum: str, step: int, progress: float, num_layers: int, period: int
) -> list[int]:
    """Exits (in layers, from 1; without the last layer) that have a loss in a step; section 4.1.2.

    ``rotational``: every ``period``-th exit, others at each step. ``gradual``: from the last exit
    to the first, all of them after half of the training. ``all``: always all.
    """
    exits = range(1, num_layers)
    if curriculum == "rotational":
        return [exit_layer for exit_layer in exits if exit_layer % period == step % period]
    if curriculum == "gradual":
        return [e for e in exits if num_layers - e <= 1 + 2 * progress * num_layers]
    return list(exits)


def exit_weights(exits: Sequence[int], num_layers: int, scale: float) -> dict[int, float]:
    """The share of each layer's loss, the last layer's included; equations 5 and 6.

    The weight of an exit grows quadratically with its depth, because its task gets easier.
    """
    weights = {e: scale * e * (e - 1) / 2 for e in exits}
    last = num_layers - 1 + scale * (num_layers - 2) * (num_layers - 1) / 2
    total = last + sum(weights.values())
    return {e: weight / total for e, weight in [*weights.items(), (num_layers, last)]}


class ExitsTask:
    """The task of ``exits``. It measures ``acceptance``: the mean over exits of sum_x min(p, q).

    p is the exit's distribution, and q that of the last layer of the same weights.

    Args:
        target: a folder with a Llama-type model.
        exits: layers to measure, from 1; by default a quarter, a third and half of the model.
        layer_dropout: probability of skipping the last layer; exponentially less for earlier ones.
        exit_scale: weight of the exit losses.
        curriculum, period: see :func:`enabled_exits`.
    """

    name = "exits"
    criterion = "acceptance"

    def __init__(
        self,
        target: Path,
        text: TrainingText,
        *,
        exits: Sequence[int] = (),
        layer_dropout: float = 0.1,
        exit_scale: float = 0.2,
        curriculum: str = "rotational",
        period: int = 4,
    ) -> None:
        if not 0 <= layer_dropout < 1:
            raise InvalidArgument("layer_dropout", layer_dropout, "at least 0 and below 1")
        if not 0 <= exit_scale <= 10:
            raise InvalidArgument("exit_scale", exit_scale, "0 to 10")
        if curriculum not in CURRICULA:
            raise InvalidArgument("curriculum", curriculum, f"one of {', '.join(CURRICULA)}")
        if period < 1:
            raise InvalidArgument("period", period, "at least 1")
        self.model = load_model(target)
        check_layers(self.model, "target")
        check_length(self.model, text.length, windows=False)
        layers = self.num_layers = int(self.model.config.num_hidden_layers)
        if layers < 2:
            raise InvalidArgument("target", str(target), "a model of at least 2 layers")
        default = sorted({max(1, layers // 4), max(1, layers // 3), max(1, layers // 2)})
        self.exits = tuple(exits) or tuple(default)
        check_exits(self.exits, layers)
        self._target, self._text = target, text
        self._dropout, self._scale = layer_dropout, exit_scale
        self._curriculum, self._period = curriculum, period
        self.num_rows = len(text.training)
        self.settings: Mapping[str, Any] = {
            "target": str(target.resolve()), "data": text.digest, "exits": list(self.exits),
            "layer_dropout": layer_dropout, "exit_scale": exit_scale, "curriculum": curriculum,
            "period": period,
        }  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        # Equation 2: the rate rises exponentially with depth. The first layer always runs.
        depth = np.exp(np.arange(self.num_layers) * math.log(2) / (self.num_layers - 1)) - 1
        keep = (batch.random.random(self.num_layers) >= self._dropout * depth).tolist()
        rows = self._text.training[batch.rows].to(self.model.device)
        states = layer_states(self.model, rows[:, :-1], keep)
        exits = enabled_exits(
            self._curriculum, batch.step, batch.progress, self.num_layers, self._period
        )
        counts = self._text.mask(batch.rows)[:, 1:].to(rows.device)
        labels = rows[:, 1:][counts]
        total = torch.zeros((), device=rows.device)
        for layer, weight in exit_weights(exits, self.num_layers, self._scale).items():
            if weight:
                logits = read_out(self.model, states[layer - 1][counts])
                total = total + weight * F.cross_entropy(logits, labels)
        return total

    def evaluate(self) -> dict[str, float]:
        device, mask = self.model.device, self._text.held_out_mask
        return losses.measure(
            self._text.held_out.to(device),
            self._all_exits,
            [f"exit_{e}" for e in self.exits],
            counts=None if mask is None else mask.to(device),
        )

    def _all_exits(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        states = layer_states(self.model, ids)
        drafts = [read_out(self.model, states[e - 1]) for e in self.exits]
        return drafts, read_out(self.model, states[-1])

    def save(self, folder: Path) -> None:
        save_model(self.model, self._target, folder)

    def describe_rows(self, rows: IntArray) -> str:
        return self._text.describe(rows)
