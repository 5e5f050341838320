"""MTP: the layer for the token after next that a model was trained with.

Gloeckle et al. 2024 (arXiv 2404.19737); as a drafter that goes on from its own output, DeepSeek-AI
2024 (arXiv 2412.19437, section 2.2) and FastMTP (Cai et al. 2025, arXiv 2509.18362). Its input is
``fc([norm(embedding); norm(feature)])``, of the token after a place and of the target's last
hidden state there; a decoder layer of the target's kind and a norm make the feature of the next
step, which the target's output layer reads.

While it drafts, a step attends to the committed pairs and to the nodes above it, as EAGLE's, and as
vLLM runs these layers. FastMTP trains each step on entries of that step alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    HeadBatch,
    HeadTarget,
    mean_over,
    soft_cross_entropy,
    text_cross_entropy,
)
from paceline.models.heads.published_eagle import Layout, PublishedEagle

_NAMES = {  # speculators': this module's; the others are those of the decoder layer
    "input_proj.weight": "fc.weight",
    "hidden_layernorm.weight": "pre_fc_norm_hidden.weight",
    "token_layernorm.weight": "pre_fc_norm_embedding.weight",
    "final_layernorm.weight": "norm.weight",
}
_PREFIX = "mtp_layers.0."


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """Attributes:
    steps: drafting steps that training follows.
    decay: the loss of step k weighs ``decay ** k``, k from 0.
    text_weight, teacher_weight: of the cross-entropy against the text, as in the paper, and
        against the target's distribution.
    """

    steps: int = 3
    decay: float = 0.6
    text_weight: float = 1.0
    teacher_weight: float = 0.0


class Mtp(PublishedEagle):
    """See the module.

    Args:
        layout: of a published layer; None: a layer as the target's.
    """

    kind = "mtp"
    Options: ClassVar[type[Any]] = MtpOptions

    def __init__(
        self, target: HeadTarget, options: MtpOptions, layout: Layout | None = None
    ) -> None:
        if options.steps < 1:
            raise InvalidArgument("steps", options.steps, "1 or more")
        super().__init__(target, layout or mtp_layout(Layout(target.config)))
        self.options = options
        config = self.layout.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.norm = nn.RMSNorm(size, eps=eps)

    def inputs(self, embedded: Tensor, x: Tensor) -> Tensor:
        pair = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(x)
        fused: Tensor = self.fc(torch.cat(pair, -1))
        return fused

    def passed_on(self, drafted: Tensor) -> Tensor:
        normed: Tensor = self.norm(drafted)
        return normed

    def some_logits(self, drafted: Tensor) -> Tensor:
        return super().some_logits(self.norm(drafted))

    # --- training ------------------------------------------------------------------------------

    def forward(self, features: Tensor, token_ids: Tensor, steps: int) -> list[Tensor]:
        """What each step puts out, fed the text.

        Args:
            features: of the first places.  # [batch, length, hidden_size]
            token_ids: from the one after the first place on.  # int64 [batch, length + steps - 1]

        Returns:
            # steps x [batch, length, hidden_size]
        """
        length, x, outputs = features.shape[1], features, []
        cos_sin = self._cos_sin[:length].to(x.device)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for step in range(steps):
            x = self.inputs(self.embed(token_ids[:, step : step + length]), x)
            for layer in self.layers:
                x, _ = layer(x, x, cos_sin, causal, None)
            outputs.append(x)
            x = self.passed_on(x)
        return outputs

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of all steps (FastMTP, equations 1 and 2)."""
        options = self.options
        steps = min(options.steps, batch.token_ids.shape[1] - 2)
        length = batch.token_ids.shape[1] - steps - 1
        weights = [options.decay**step for step in range(steps)]
        total, agreement = batch.hidden.new_zeros(()), []
        drafted = self(batch.hidden[:, :length], batch.token_ids[:, 1:-1], steps)
        for step, (weight, x) in enumerate(zip(weights, drafted, strict=True), 1):
            logits, end = self.logits(x), step + length
            counts, wanted = batch.counts_from(step, end), batch.logits[:, step:end]
            labels = batch.token_ids[:, step + 1 : end + 1]
            if options.text_weight:
                hard = text_cross_entropy(logits, labels, counts)
                total = total + weight * options.text_weight * hard
            if options.teacher_weight:
                soft = soft_cross_entropy(logits, wanted, counts)
                total = total + weight * options.teacher_weight * soft
            right = logits.argmax(-1) == wanted.argmax(-1)
            agreement.append(mean_over(right.float(), counts))
        return total / sum(weights), {"agreement": torch.stack(agreement)}


def mtp_layout(layout: Layout) -> Layout:
    """One layer of this kind that sees everything, behind ``fc`` without a bias."""
    config = replace(layout.config, num_layers=1, windows=(None,))
    return replace(layout, config=config, fc_bias=False, first_norm=True)


def own_name(published: str) -> str:
    """A parameter of :class:`Mtp` by its name in speculators' format."""
    name = published.removeprefix(_PREFIX)
    return published if name == published else _NAMES.get(name, f"layers.0.{name}")


def published_name(own: str) -> str:
    """The other way."""
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    return _PREFIX + names.get(own, own.removeprefix("layers.0."))
