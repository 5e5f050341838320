"""EAGLE-3: EAGLE without a loss on features, over the target's lower, middle and upper layers.

Li et al. 2025 (arXiv 2503.01840). A feature is made from the residual stream after three of the
target's layers, ``project([low; middle; high])``. As in EAGLE, the head's input at a place is
``fc([embedding of the token that follows; feature])``, and while it drafts it goes on from what it
put out itself. It learns from tokens alone, over several drafting steps (*training-time test*), so
what it puts out need not look like a feature of the target. Its output layer is the target's,
behind a norm of its own, for all tokens or for some of them (FR-Spec, Zhao et al. 2025, arXiv
2502.14856).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.heads.base import (
    Head,
    HeadBatch,
    HeadTarget,
    check_vocabulary,
    mean_over,
    reading,
    soft_cross_entropy,
)
from paceline.models.heads.eagle import (
    MEASURED_DEPTH,
    Eagle,
    EagleOptions,
    unrolled_mask,
)
from paceline.models.heads.layer import TargetLayers, layer_ops
from paceline.models.heads.published_eagle import PublishedEagle3, layout_like_target
from paceline.models.ops import Output, Shortlist
from paceline.models.packing import Weight
from paceline.types import Need


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Attributes:
    num_layers: decoder layers; the paper has one.
    features: numbers of layers of the target after which a feature reads the residual stream;
        empty: 2, half of them, and all but three.
    vocabulary: tokens that the head can draft; 0 for all. The head's own list of them is saved
        with it; before training it is the first ones of the tokenizer.
    shallow_layers: number of the target's first layers that read the token that follows, with the
        target's own weights, before it is fused with the feature; 0: ``fc`` reads its embedding.
    unroll: drafting steps that training follows.
    int8: draft with weights rounded to eight bits, where the C kernels run.
    int4: draft with layers rounded to blocks of four bits instead, where 32 divides their inputs;
        the output layer to eight.
    published: the layer of published drafters, which attends to the pair of embedding and feature
        without ``fc`` between them. Other engines load it (`paceline export`); here it drafts in
        torch.
    """

    num_layers: int = 1
    features: tuple[int, ...] = ()
    vocabulary: int = 0
    shallow_layers: int = 0
    unroll: int = 3
    int8: bool = True
    int4: bool = False
    published: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists


class Eagle3(Eagle):
    """See the module."""

    kind = "eagle3"
    needs = frozenset({Need.LAYER_STATES})
    Options = Eagle3Options
    _packed_project: Weight | None = None
    vocabulary: Tensor
    """The tokens that the head can draft, ascending.  # int64 [num_logits]"""

    def __init__(self, target: HeadTarget, options: Eagle3Options) -> None:
        super().__init__(target, EagleOptions(num_layers=options.num_layers, unroll=options.unroll))
        self.options = options
        config = target.config
        count, size = config.num_layers, config.hidden_size
        features = options.features or (min(2, count), -(-count // 2), max(1, count - 3))
        if any(not 1 <= number <= count for number in features):
            raise InvalidArgument("features", features, f"numbers of layers from 1 to {count}")
        check_vocabulary(options.vocabulary, config.vocab_size)
        self._features = [number - 1 for number in features]
        # A plain list, so that the head neither trains nor saves the target's layers.
        if options.shallow_layers:
            self.shallow = TargetLayers(target, options.shallow_layers, "shallow_layers").layers
        self.project = nn.Linear(len(features) * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        some = torch.arange(options.vocabulary or config.vocab_size)
        self.register_buffer("vocabulary", some, persistent=options.vocabulary > 0)

    @classmethod
    def made(cls, target: HeadTarget, options: Eagle3Options) -> Head:
        return TrainedEagle3(target, options) if options.published else cls(target, options)

    @property
    def feature_layers(self) -> Sequence[int]:
        return [number + 1 for number in self._features]

    def read(self, features: Tensor) -> Tensor:
        if self._packed_project is not None:
            flat = self.stack.ops.linear(features.flatten(0, -2), self._packed_project)
            return flat.view(*features.shape[:-1], -1)
        projected: Tensor = self.project(features)
        return projected

    @property
    def output_rows(self) -> Tensor:
        """The target's output layer for the tokens that the head can draft; no copy for all."""
        lm_head = self.target.lm_head
        return lm_head if len(self.vocabulary) == len(lm_head) else lm_head[self.vocabulary]

    def some_logits(self, drafted: Tensor) -> Tensor:
        """Logits of the tokens in :attr:`vocabulary`.  # [..., hidden_size] -> [..., num_logits]"""
        return F.linear(self.norm(drafted), self.output_rows)

    def logits(self, drafted: Tensor) -> Tensor:
        some = self._fast_logits(drafted)
        drafts_all = some.shape[-1] == self.target.config.vocab_size
        return self.target.among_all(some, None if drafts_all else self.vocabulary)

    def _fast_logits(self, drafted: Tensor) -> Tensor:
        """As :meth:`some_logits`, with packed weights once there are some.  # float32"""
        if self.output is None:
            return self.some_logits(drafted).float()
        eps = self.target.config.rms_norm_eps
        rows = self.stack.ops.rmsnorm(drafted, self.norm.weight, eps)
        return self.stack.ops.linear(rows, self.output.weight).float()

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return unrolled_loss(self, batch)

    def prepare(self) -> None:
        self.stack = self.new_stack(int8=self.options.int8, int4=self.options.int4)
        ops = self.stack.ops
        wide = layer_ops(self.target.config, self.fc.weight)
        self._fc = (
            wide.pack(reading(self.fc.weight, rounded=self.options.int8)),
            self.fc.bias.detach(),
        )
        self._packed_project = wide.pack(reading(self.project.weight, rounded=self.options.int8))
        if self.options.int4:
            # A rounding error of logits weighs more than one of states.
            ops = layer_ops(self.target.config, self.fc.weight, int8=True)
        rows = self.output_rows.contiguous()
        likely, packed = self.shortlist, None
        if likely is not None and likely.encode.shape[1] != rows.shape[1]:
            sizes = f"{likely.encode.shape[1]} numbers of a state, not of {rows.shape[1]}"
            raise ModelNotFound(f"the head's shortlist is one of {sizes}")
        if likely is not None and self.stack.has_chains(self.target):  # torch would not use it
            packed = Shortlist(
                wide.pack(likely.encode.to(rows.dtype)), ops.pack(likely.rows(rows)),
                rows.bfloat16(), likely.margin,
            )  # fmt: skip
        self.output = Output(self.norm.weight.detach(), ops.pack(rows), self.vocabulary, packed)


class TrainedEagle3(PublishedEagle3):
    """EAGLE-3 with the layer of published drafters, to train; see :class:`Eagle3Options`."""

    Options = Eagle3Options

    def __init__(self, target: HeadTarget, options: Eagle3Options) -> None:
        size = target.config.vocab_size
        check_vocabulary(options.vocabulary, size)
        if options.shallow_layers:
            raise InvalidArgument("shallow_layers", options.shallow_layers, "0 if published")
        layout = layout_like_target(target, options.num_layers, options.features)
        super().__init__(target, replace(layout, vocabulary=options.vocabulary))
        self.options = options
        if options.vocabulary:
            self.register_buffer("vocabulary", torch.arange(options.vocabulary))

    def forward(self, features: Tensor, token_ids: Tensor, steps: int = 1) -> list[Tensor]:
        """As :meth:`Eagle.forward`."""
        length = features.shape[1]
        cos_sin = self._cos_sin[:length].to(features.device)
        embedded, x, outputs = self.embed(token_ids), features, []
        earlier: list[tuple[Tensor, Tensor] | None] = [None] * len(self.layers)
        for step in range(steps):
            mask = unrolled_mask(length, step, x.device)
            for i, layer in enumerate(self.layers):
                x, earlier[i] = layer(x, embedded, cos_sin, mask, earlier[i])
            outputs.append(x)
            # What was drafted for a place is read where that place is.
            x = F.pad(self.passed_on(x)[:, :-1], (0, 0, 1, 0))
        return outputs

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return unrolled_loss(self, batch)


def unrolled_loss(
    head: Eagle3 | TrainedEagle3, batch: HeadBatch
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy to the target's distribution over the tokens that the head can draft.

    In training mode the agreement is that of the steps that are trained, otherwise that of the
    first five.
    """
    assert batch.layer_states is not None
    features = head.read(head.select(batch.layer_states[:, :-1]))
    steps = head.options.unroll if head.training else MEASURED_DEPTH
    steps = min(steps, features.shape[1])
    total, agreement = batch.hidden.new_zeros(()), []
    best, vocabulary = batch.logits.argmax(-1), head.vocabulary
    for step, drafted in enumerate(head(features, batch.token_ids[:, 1:], steps)):
        logits, counts = head.some_logits(drafted[:, step:]), batch.counts_from(step + 1)
        wanted, guess = batch.logits[:, step + 1 :], logits.argmax(-1)
        if vocabulary is not None:
            wanted, guess = wanted[..., vocabulary], vocabulary[guess]
        if step < head.options.unroll:
            total = total + soft_cross_entropy(logits, wanted, counts)
        right = guess == best[:, step + 1 :]
        agreement.append(mean_over(right.float(), counts))
    return total / head.options.unroll, {"agreement": torch.stack(agreement)}
