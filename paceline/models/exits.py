"""Which layers of a model compute a token: depth policies.

A policy makes a lossy decoder of the target itself (each token is computed by fewer layers), or a
drafter out of the target's own layers, whose drafts the whole target verifies. The layers of a
later token are always among those of the tokens before it, so that no layer ever misses keys and
values. Prompts are computed by all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline.errors import InvalidArgument
from paceline.knobs import Knob, Knobs
from paceline.types import DepthPolicy

if TYPE_CHECKING:
    from paceline.view import SessionView

EXIT_LAYER = Knob[int | None](
    "exit_layer", int, None,
    "How many of the target's first layers draft; default: a third of all.", ge=1,
)  # fmt: skip
EXIT_LAYERS = Knob[tuple[int, ...] | None](
    "exit_layers", tuple[Annotated[int, Field(ge=1)], ...], None,
    "Exit layers: of the target, for the controller `del` to choose from (default: evenly spread), "
    "or of the draft model in `s2d` (default: its number of layers, halved again and again).",
    max_length=32, costs=True,
)  # fmt: skip
SPEEDUP_RATIO = Knob[float](
    "speedup_ratio", float, 2.0,
    "Unified layer skipping keeps the number of the target's layers divided by this.",
    ge=1.0, le=64.0, search=(1.5, 2.0, 3.0, 4.0), costs=True,
)  # fmt: skip
MIN_LAYERS = Knob[float](
    "min_layers", float, 0.4,
    "Least share of the layers that computes a token (`skipdecode`, `d3`).",
    ge=0.0, le=1.0, search=(0.25, 0.4, 0.6), costs=True,
)  # fmt: skip
MAX_LAYERS = Knob[float](
    "max_layers", float, 0.8, "Share of the layers for the first token (`skipdecode`).",
    ge=0.0, le=1.0, search=(0.6, 0.8, 1.0), costs=True,
)  # fmt: skip
DEPTH_DECAY = Knob[float](
    "depth_decay", float, 0.99,
    "Factor by which D3 shrinks the number of layers with each further token.",
    gt=0.0, le=1.0, search=(0.97, 0.99, 0.995), costs=True,
)  # fmt: skip


def layers_of(
    policy: DepthPolicy, session: SessionView, ahead: int, num_layers: int
) -> Sequence[int]:
    """The policy's layers for the token ``ahead`` places after the last committed one."""
    index = session.length - session.prompt_length + ahead
    return policy.layers_at(index, session.max_length - session.prompt_length, num_layers)


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


def check_exits(knobs: Knobs, num_layers: int, model: str) -> None:
    """Raises InvalidArgument for an exit that ``model`` does not have."""
    one = knobs[EXIT_LAYER]
    exits = [] if one is None else [(EXIT_LAYER.name, one)]
    many = knobs[EXIT_LAYERS] or ()
    exits += [(f"{EXIT_LAYERS.name}[{i}]", layer) for i, layer in enumerate(many)]
    for name, layer in exits:
        if not 1 <= layer <= num_layers:
            raise InvalidArgument(
                name, layer, f"a layer of {model}, which has {num_layers}: 1 to {num_layers}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPart:
    """A depth policy as the catalogue lists it: how to make it from knobs, and which it reads."""

    make: Callable[[Knobs], DepthPolicy]
    knobs: tuple[Knob[Any], ...]


UNIFIED = PolicyPart(
    make=lambda knobs: UnifiedLayerSkipping(knobs[SPEEDUP_RATIO]), knobs=(SPEEDUP_RATIO,)
)
SKIPDECODE = PolicyPart(
    make=lambda knobs: SkipDecode(knobs[MIN_LAYERS], knobs[MAX_LAYERS]),
    knobs=(MIN_LAYERS, MAX_LAYERS),
)
D3_PART = PolicyPart(
    make=lambda knobs: D3(knobs[DEPTH_DECAY], knobs[MIN_LAYERS]), knobs=(DEPTH_DECAY, MIN_LAYERS)
)
