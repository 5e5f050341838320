"""Which layers of a model compute a token: depth policies.

A policy makes a lossy decoder of the target itself (each token is computed by fewer layers), or a
drafter out of the target's own layers, whose drafts the whole target verifies. The layers of a
later token are always among those of the tokens before it, so that no layer ever misses keys and
values. Prompts are computed by all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InvalidArgument
from paceline.types import DepthPolicy

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.view import SessionView


def layers_of(
    policy: DepthPolicy, session: SessionView, ahead: int, num_layers: int
) -> Sequence[int]:
    """The policy's layers for the token ``ahead`` places after the last committed one."""
    index = session.length - session.prompt_length + ahead
    return policy.layers_at(index, session.max_length - session.prompt_length, num_layers)


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """The first ``exit_layer`` layers (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710)."""

    exit_layer: int

    def layers_at(self, index: int, length: int, num_layers: int) -> Sequence[int]:
        return range(self.exit_layer)


@dataclass(frozen=True, slots=True)
class UnifiedLayerSkipping:
    """Evenly spread layers, the first and the last among them, the same for all tokens.

    Unified Layer Skipping, Liu et al. 2024 (arXiv 2404.06954): the number of layers follows from
    the desired speedup alone, ``round(num_layers / ratio)``.

    Args:
        ratio: desired speedup, at least 1.
    """

    ratio: float

    def layers_at(self, index: int, length: int, num_layers: int) -> Sequence[int]:
        kept = max(min(2, num_layers), round(num_layers / self.ratio))
        return spread(kept, num_layers)


@dataclass(frozen=True, slots=True)
class SkipDecode:
    """Fewer layers the later a token is; lower to middle ones are left out.

    SkipDecode, Del Corro et al. 2023 (arXiv 2307.02628): one number of layers for each position,
    the same for all rows of a batch, falling linearly from ``max_layers`` to ``min_layers``. The
    first ``WARM_UP`` layers and the upper ones run.

    Args:
        min_layers, max_layers: as shares of the model's layers.
    """

    WARM_UP = 1

    min_layers: float
    max_layers: float

    def layers_at(self, index: int, length: int, num_layers: int) -> Sequence[int]:
        share = min(1.0, index / max(1, length - 1))
        wanted = num_layers * (self.max_layers + share * (self.min_layers - self.max_layers))
        kept = max(min(2, num_layers), min(num_layers, math.floor(wanted + 1e-9)))
        first = min(self.WARM_UP, kept)
        return [*range(first), *range(num_layers - (kept - first), num_layers)]


@dataclass(frozen=True, slots=True)
class D3:
    """``floor(num_layers * decay ** index)`` layers: a power law; middle ones are left out first.

    D3, 2025 (arXiv 2503.08524). The head and the tail of the model always run.

    Args:
        decay: of each further token, in (0, 1]; 1 is the whole model.
        floor: fewest layers, as a share of the model's.
    """

    decay: float
    floor: float

    def layers_at(self, index: int, length: int, num_layers: int) -> Sequence[int]:
        fewest = max(min(2, num_layers), math.ceil(num_layers * self.floor))
        kept = max(fewest, math.floor(num_layers * self.decay**index + 1e-9))
        head = (kept + 1) // 2
        return [*range(head), *range(num_layers - (kept - head), num_layers)]


def spread(count: int, num_layers: int) -> list[int]:
    """``count`` layers at even distances, the first and the last among them."""
    if count >= num_layers:
        return list(range(num_layers))
    if count == 1:
        return [0]
    return [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]


def check_exits(config: SpeculationConfig, num_layers: int, model: str) -> None:
    """Raises InvalidArgument for an exit that ``model`` does not have."""
    exits = [("exit_layer", config.exit_layer)] if config.exit_layer is not None else []
    exits += [(f"exit_layers[{i}]", layer) for i, layer in enumerate(config.exit_layers or ())]
    for name, layer in exits:
        if not 1 <= layer <= num_layers:
            raise InvalidArgument(
                name, layer, f"a layer of {model}, which has {num_layers}: 1 to {num_layers}"
            )
