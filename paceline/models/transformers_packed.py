"""Attention of ``transformers`` models to the KV entries of many sequences.

All products of a forward see the tokens of all sequences at once. Attention alone works sequence by
sequence, on KV entries that stay where they are from one forward to the next. transformers calls it
by the name of an attention implementation
(https://huggingface.co/docs/transformers/attention_interface).

What a token may see is what the model's own mask allows at its position (transformers hands out
masks as functions of two positions: causal, windows, chunks) and what its tree does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.types import IntArray

IMPLEMENTATION = "paceline_packed"

_BLOCK = 256
"""Buffers grow by this many entries, so that few forwards copy them and little stays unused."""


class SequenceKV:
    """KV entries of one sequence: those of committed tokens, then those of pending ones."""

    def __init__(self) -> None:
        # By layer: keys and values.  # [num_kv_heads, capacity, head_dim] each
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, layer: int, places: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store new entries; there must be room (:meth:`entries`) at ``places``.

        # [num_kv_heads, num_new, head_dim]
        """
        for buffer, new in zip(self._layers[layer], (keys, values), strict=True):
            buffer[:, places] = new

    def entries(
        self, layer: int, count: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``count`` entries of a layer, those that were never written being zeros.

        Args:
            keys, values: what entries look like.  # [num_kv_heads, any, head_dim]

        # [num_kv_heads, count, head_dim] each
        """
        old = self._layers.get(layer, (None, None))
        if old[0] is None or old[0].shape[1] < count:
            grown = (_grown(old[0], count, keys), _grown(old[1], count, values))
            self._layers[layer] = grown
        held = self._layers[layer]
        return held[0][:, :count], held[1][:, :count]

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Move the pending entries of ``path`` behind the first ``length`` ones."""
        if list(path) == list(range(len(path))):
            return
        for buffers in self._layers.values():
            for buffer in buffers:
                index = torch.tensor([length + node for node in path], device=buffer.device)
                buffer[:, length : length + len(path)] = buffer[:, index]


def _grown(old: torch.Tensor | None, count: int, like: torch.Tensor) -> torch.Tensor:
    """A buffer for ``count`` entries and some more, with the old ones."""
    grown = like.new_zeros((like.shape[0], -(-count // _BLOCK) * _BLOCK, like.shape[2]))
    if old is not None:
        grown[:, : old.shape[1]] = old
    return grown


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Tokens of one sequence that a forward computes.

    Attributes:
        kv: the sequence's entries.
        places: where those of these tokens go.  # [num_tokens]
        key_positions: positions of the sequence's entries.  # [num_entries]
        sees: what each token may see by its tree.  # [num_tokens, num_entries]
    """

    kv: SequenceKV
    places: IntArray
    key_positions: IntArray
    sees: npt.NDArray[np.bool_]

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def positions(self) -> IntArray:
        """Of the tokens.  # [num_tokens]"""
        return self.key_positions[self.places]

    def index(self, device: torch.device) -> slice | torch.Tensor:
        """``places`` as an index: a slice where they follow one another."""
        first = int(self.places[0])
        if bool((self.places[1:] - self.places[:-1] == 1).all()):
            return slice(first, first + self.count)
        return torch.from_numpy(self.places).to(device)

    def visible(self, allows: Callable[..., torch.Tensor]) -> torch.Tensor:
        """What each token sees.  # [num_tokens, num_entries] bool"""
        queries, keys = torch.from_numpy(self.positions), torch.from_numpy(self.key_positions)
        zero = torch.zeros((), dtype=torch.int64)
        return allows(zero, zero, queries[:, None], keys[None]) & torch.from_numpy(self.sees)


@dataclass(frozen=True, slots=True, eq=False)
class ModelMask:
    """What stands for a mask inside the model.

    Attributes:
        allows: (batch, head, query position, key position) -> whether the query sees the key.
    """

    allows: Callable[..., torch.Tensor]


class AttentionBatch:
    """The tokens of a forward.

    Args:
        rows: of each sequence.
        side_by_side: they have a row of the input each, at its start; otherwise they lie behind
            one another in the only row.
    """

    def __init__(
        self, rows: Sequence[PackedRows], device: torch.device, *, side_by_side: bool = False
    ) -> None:
        self.rows, self._device = rows, device
        self.indices = [one.index(device) for one in rows]
        # Of each sequence's tokens: the row of the input, and where they are in it.
        self.inputs: list[tuple[int, slice]] = []
        start = 0
        for number, one in enumerate(rows):
            first = 0 if side_by_side else start
            self.inputs.append((number if side_by_side else 0, slice(first, first + one.count)))
            start += one.count
        # By mask of the model, which also holds on to it, so that its id stays its own.
        self._masks: dict[int, tuple[ModelMask, list[torch.Tensor | None]]] = {}

    def masks(self, mask: ModelMask) -> list[torch.Tensor | None]:
        """What each sequence's tokens see; None: all of its entries.

        # [num_tokens, num_entries] bool each
        """
        if id(mask) not in self._masks:
            seen = [one.visible(mask.allows) for one in self.rows]
            self._masks[id(mask)] = (
                mask,
                [None if bool(one.all()) else one.to(self._device) for one in seen],
            )
        return self._masks[id(mask)][1]


def register() -> None:
    """Make the implementation known to transformers; doing so twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _model_mask)


def _model_mask(*_: Any, mask_function: Callable[..., torch.Tensor], **__: Any) -> ModelMask:
    return ModelMask(mask_function)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    packed: AttentionBatch | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: stores the new entries and attends to them.

    Args:
        packed: whose tokens these are; an argument of the model's forward, which hands it on.
        scaling, softcap, s_aux: of the scores, as models of transformers give them; ``s_aux`` are
            sinks, one score for each head.  # [num_heads]

    Raises:
        TypeError: the model does not hand on what is needed, or attends in a way of its own.

    # [num_rows, num_heads, num_tokens, head_dim] -> [num_rows, num_tokens, num_heads, head_dim]
    """
    if packed is None or not isinstance(attention_mask, ModelMask) or position_bias is not None:
        raise TypeError(f"{type(module).__name__} cannot attend to packed sequences")
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Zeros where a row of the input has no token.
    output = query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
    masks = packed.masks(attention_mask)
    for rows, index, (row, new), mask in zip(
        packed.rows, packed.indices, packed.inputs, masks, strict=True
    ):
        fresh = key[row, :, new], value[row, :, new]
        keys, values = rows.kv.entries(layer, len(rows.key_positions), *fresh)
        rows.kv.write(layer, index, *fresh)
        attended = _attend(query[row, :, new], keys, values, mask, scale, softcap, s_aux)
        output[row, new] = attended.transpose(0, 1)
    return output, None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence.

    Heads that share keys become rows of one head, so that no key is copied.

    # [num_heads, num_new, head_dim], [num_kv_heads, num_entries, head_dim] -> as query
    """
    (num_heads, count, _), num_kv_heads = query.shape, keys.shape[0]
    groups = num_heads // num_kv_heads
    grouped = query.reshape(num_kv_heads, groups * count, -1)
    if mask is not None and groups > 1:
        mask = mask.repeat(groups, 1)
    if softcap is None and sinks is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            grouped[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
        return output.reshape(num_heads, count, -1)
    scores = grouped @ keys.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # a score beside the others that attends to nothing
        column = sinks.to(scores.dtype).reshape(num_kv_heads, groups, 1).expand(-1, -1, count)
        scores = torch.cat([scores, column.reshape(num_kv_heads, groups * count, 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (weights[..., : keys.shape[1]] @ values).reshape(num_heads, count, -1)
