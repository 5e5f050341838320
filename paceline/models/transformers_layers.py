"""Some of the layers of a model of ``transformers``: early exits, depth policies, pseudo tokens.

A forward is split into calls of the model. In each of them all rows run through the same layers,
and the other layers hand on what they get. What a row had after its last layer enters the first
layer of its next call; the last call, without a layer, has the model's own norm and output layer
make logits of it. So the layers may be of any kind, as long as nothing but the residual stream
passes from one to the next, which is tried at load
(:func:`paceline.models.transformers_check.exits_fail`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.models.base import PseudoTokens, Segment
from paceline.models.transformers_packed import PackedRows
from paceline.models.transformers_sequence import TransformersSequence
from paceline.models.transformers_trees import ModelCalls, RopeRegimes, packed_inputs
from paceline.types import IntArray, Need

_LAYER_STATES = frozenset({Need.LAYER_STATES})


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """The rows of a segment: those that go on from an exit, new tokens, pseudo tokens.

    Attributes:
        first: number of tokens that were pending before; the new ones are appended already.
    """

    segment: Segment
    sequence: TransformersSequence
    first: int

    @property
    def nodes(self) -> list[int]:
        """The pending entry of each row."""
        return [*self.segment.resume, *range(self.first, self.sequence.num_pending)]

    @property
    def wanted(self) -> slice:
        """Rows that have logits."""
        return {"all": slice(None), "last": slice(-1, None), "none": slice(0)}[self.segment.logits]


def chosen_rows(segments: Sequence[Segment], firsts: Sequence[int]) -> list[ChosenRows]:
    """The rows of segments, whose new tokens are pending from ``firsts`` on."""
    found = []
    for segment, first in zip(segments, firsts, strict=True):
        assert isinstance(segment.sequence, TransformersSequence)
        found.append(ChosenRows(segment, segment.sequence, first))
    return found


class ChosenLayers:
    """Forwards whose rows run through some of a model's layers.

    Args:
        calls: of a model whose trees are ``packed`` and whose states are found.

    Attributes:
        num_layers: of the model.
        head_layers: weights of the output layer over those of an average layer.
    """

    def __init__(self, calls: ModelCalls) -> None:
        assert calls.taps is not None
        self._calls, self._taps = calls, calls.taps
        self._rope = RopeRegimes(calls.model.config.get_text_config())
        self.num_layers = self._taps.num_layers
        in_layers = sum(each.numel() for each in self._taps.layers.parameters())
        head = calls.vocab_size * self._taps.hidden_size
        self.head_layers = head * self.num_layers / max(1, in_layers)
        self._num_outputs = self._find_num_outputs()

    def _find_num_outputs(self) -> int:
        """How many values a layer returns in a tuple; 0: it returns the states alone."""
        found: list[int] = []

        def look(_module: Any, _inputs: Any, output: Any) -> None:
            found.append(len(output) if isinstance(output, tuple) else 0)

        hook = self._taps.layers[0].register_forward_hook(look)
        try:
            sequence = TransformersSequence()
            sequence.pending_ids, sequence.pending_parents = [0], [-1]
            with torch.inference_mode():
                rows = [sequence.rows(0, [0])]
                self._calls(torch.zeros((1, 1), dtype=torch.int64), 1, **self._inputs(rows))
        finally:
            hook.remove()
        return found[0]

    def run(
        self, work: Sequence[ChosenRows], needs: frozenset[Need]
    ) -> tuple[list[Tensor], dict[Need, Tensor]]:
        """The wanted logits of each segment, and the states of all rows.

        # [num_wanted, vocab_size] each; states as in :class:`paceline.models.base.ForwardResult`
        """
        offsets = np.cumsum([0, *(len(each.nodes) for each in work)])
        groups: dict[Hashable, list[int]] = {}
        for number, each in enumerate(work):
            if each.nodes:
                groups.setdefault(self._rope.of(each.sequence, each.nodes), []).append(number)
        every = Need.LAYER_STATES in needs or any(each.segment.resumable for each in work)
        states = self.zeros(int(offsets[-1]), self.num_layers if every else 0)
        last = self.zeros(int(offsets[-1]))
        batches = []
        for numbers in groups.values():
            rows = np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in numbers])
            index = torch.from_numpy(rows)
            batch = _Batch([work[number] for number in numbers], self, every=every)
            states[index], last[index] = batch.run()
            batches.append(batch)
        wanted = [
            np.arange(first, end)[each.wanted]
            for each, first, end in zip(work, offsets[:-1], offsets[1:], strict=True)
        ]
        logits = self.logits_of(last[torch.from_numpy(np.concatenate(wanted))])
        extras = {}
        if Need.HIDDEN_STATES in needs:
            extras[Need.HIDDEN_STATES] = self._normed(last)
        if Need.LAYER_STATES in needs:
            extras[Need.LAYER_STATES] = states
        for batch in batches:  # last, so that a forward that fails changes nothing
            batch.keep_states()
        return [*logits.split([len(each) for each in wanted])], extras

    def logits_of(self, states: Tensor) -> Tensor:
        """Logits of a residual stream after any layer, through the model's own norm and head.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        if not len(states):
            return torch.empty((0, self._calls.vocab_size), device=self._calls.device)
        with torch.inference_mode():
            return self._finish(states).float()

    def _normed(self, states: Tensor) -> Tensor:
        """A residual stream after the final norm.  # [num_rows, hidden_size] -> the same"""
        calls = self._calls
        calls.wants, calls.has_logits = frozenset({Need.HIDDEN_STATES}), False
        try:
            return self._finish(states)
        finally:
            calls.wants, calls.has_logits = frozenset(), True

    def _finish(self, states: Tensor) -> Tensor:
        """What the model makes of a residual stream behind its last layer.

        # [num_rows, hidden_size] -> [num_rows, row_size]
        """
        count = len(states)
        sequence = TransformersSequence()
        sequence.pending_ids, sequence.pending_parents = [0] * count, [-1] * count
        with self._only((), lambda _: states):
            rows = [sequence.rows(0, range(count))]
            ids = torch.zeros((1, count), dtype=torch.int64)
            return self._calls(ids, count, **self._inputs(rows))[0][0]

    def run_layers(
        self,
        tokens: IntArray,
        rows: Sequence[PackedRows],
        layers: Sequence[int],
        enter: Callable[[Tensor], Tensor],
        *,
        every: bool,
    ) -> Tensor:
        """What rows have after some layers that they run through: each of them, or the last one.

        Args:
            tokens: # [num_rows]
            enter: what enters the first of the layers, from what would enter it if the rows began
                there.  # [num_rows, hidden_size] -> the same
            every: return the states after each layer.

        # [num_rows, len(layers) or 1, hidden_size]
        """
        taken = self._taps.after(layers if every else layers[-1:])
        with self._only(layers, enter), taken as states:
            self._calls(torch.from_numpy(tokens)[None], 1, **self._inputs(rows))
        return torch.stack([each[0] for each in states], 1)

    def _inputs(self, rows: Sequence[PackedRows]) -> dict[str, Any]:
        return packed_inputs(rows, self._calls.device)

    def zeros(self, *shape: int) -> Tensor:
        """# [*shape, hidden_size]"""
        size = (*shape, self._taps.hidden_size)
        return torch.zeros(size, dtype=self._calls.dtype, device=self._calls.device)

    @contextmanager
    def _only(self, layers: Sequence[int], enter: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Leave out all other layers; ``enter`` changes what enters the first one."""

        def hand_on(*inputs: Any, **named: Any) -> Any:
            stream = inputs[0] if inputs else named["hidden_states"]
            return (stream, *[None] * (self._num_outputs - 1)) if self._num_outputs else stream

        def come_in(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if inputs:
                return (enter(inputs[0][0])[None], *inputs[1:]), named
            return inputs, {**named, "hidden_states": enter(named["hidden_states"][0])[None]}

        others = [layer for i, layer in enumerate(self._taps.layers) if i not in layers]
        first: Any = self._taps.layers[layers[0] if layers else 0]
        hook = first.register_forward_pre_hook(come_in, with_kwargs=True)
        for layer in others:
            layer.forward = hand_on  # of this layer alone: it hides that of its class
        try:
            yield
        finally:
            hook.remove()
            for layer in others:
                del layer.forward


class _Batch:
    """Rows that may share calls of the model: rotary frequencies are the same for all of them."""

    def __init__(self, work: Sequence[ChosenRows], chosen: ChosenLayers, *, every: bool) -> None:
        self._work, self._chosen, self._every = work, chosen, every
        self._nodes = [each.nodes for each in work]
        self._offsets = np.cumsum([0, *map(len, self._nodes)]).tolist()
        count = self._offsets[-1]
        pairs = zip(work, self._nodes, strict=True)
        tokens = [token for each, nodes in pairs for token in each.sequence.path_tokens(nodes)]
        self._tokens = np.asarray(tokens, np.int64)
        # Where each row is computed.  # bool [num_rows, num_layers]
        self._active = np.zeros((count, chosen.num_layers), np.bool_)
        self._begun = np.zeros(count, np.bool_)  # rows that have a state
        # After each layer, if those are kept, and after the last one so far.
        self._states = chosen.zeros(count, chosen.num_layers if every else 0)
        self._last = chosen.zeros(count)
        self._pseudo: list[tuple[slice, PseudoTokens, slice]] = []
        for number, each in enumerate(work):
            self._lay_out(each, *self._offsets[number : number + 2])

    def _lay_out(self, each: ChosenRows, first: int, end: int) -> None:
        segment = each.segment
        layers = range(self._chosen.num_layers) if segment.layers is None else segment.layers
        self._active[first:end, list(layers)] = True
        for row, entry in enumerate(segment.resume, first):
            earlier = each.sequence.exit_states[entry]
            self._active[row, : len(earlier)] = False
            self._last[row], self._begun[row] = earlier[-1], True
            if self._every:
                self._states[row, : len(earlier)] = earlier
        if segment.pseudo is not None:
            real = end - len(segment.pseudo.parent_indices)
            self._active[real:end, : segment.pseudo.first_layer] = False
            self._pseudo.append((slice(first, real), segment.pseudo, slice(real, end)))

    def run(self) -> tuple[Tensor, Tensor]:
        """States after each layer, if those are kept, and after each row's last one.

        # [num_rows, num_layers or 0, hidden_size], [num_rows, hidden_size]
        """
        for rows, layers in _calls(self._active):
            parts = []
            for number, each in enumerate(self._work):
                first, end = self._offsets[number : number + 2]
                nodes = [self._nodes[number][row - first] for row in rows if first <= row < end]
                if nodes:
                    parts.append(each.sequence.rows(each.sequence.length, nodes))
            index = torch.from_numpy(rows)
            enter = partial(self._entering, rows=rows, layer=layers[0])
            states = self._chosen.run_layers(
                self._tokens[rows], parts, layers, enter, every=self._every
            )
            if self._every:
                self._states[index[:, None], torch.tensor(layers)] = states
            self._last[index] = states[:, -1]
            self._begun[rows] = True
        return self._states, self._last

    def _entering(self, stream: Tensor, rows: IntArray, layer: int) -> Tensor:
        """What enters a layer; rows that begin there bring the model's own embeddings."""
        whole = self._last.clone()
        fresh = ~self._begun[rows]
        whole[torch.from_numpy(rows[fresh])] = stream[torch.from_numpy(fresh)]
        for real, pseudo, places in self._pseudo:
            if pseudo.first_layer == layer:
                whole[places] = pseudo.inputs(whole[real]).to(whole.dtype)
        return whole[torch.from_numpy(rows)]

    def keep_states(self) -> None:
        """Leave the states of early exits with their sequences; those that went on need none."""
        for number, each in enumerate(self._work):
            kept = each.sequence.exit_states
            segment = each.segment
            for row, entry in enumerate(self._nodes[number], self._offsets[number]):
                kept.pop(entry, None)
                if segment.resumable:
                    assert segment.layers is not None
                    kept[entry] = self._states[row, : len(segment.layers)].clone()


def _calls(active: npt.NDArray[np.bool_]) -> list[tuple[IntArray, list[int]]]:
    """Rows and the layers that they run through together, in order.

    Args:
        active: # bool [num_rows, num_layers]
    """
    calls: list[tuple[IntArray, list[int]]] = []
    for layer in range(active.shape[1]):
        rows = np.flatnonzero(active[:, layer])
        if calls and np.array_equal(calls[-1][0], rows):
            calls[-1][1].append(layer)
        elif len(rows):
            calls.append((rows, [layer]))
    return calls
