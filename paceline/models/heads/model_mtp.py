"""MTP layers of models of ``transformers``: the layer is one of the target's own class.

Qwen3-Next and Qwen3.5 have theirs under ``mtp.``, DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437,
section 2.2) and GLM-4.5 behind the last layer of the stack, with other names for the same parts.
:mod:`paceline.models.heads.mtp` says what such a layer computes.

transformers leaves these tensors aside. Here they become a model of one layer of the target's
class, which reads fused inputs instead of embeddings and attends as on the general path.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.mtp import mtp_layout
from paceline.models.heads.published_eagle import Layout, PublishedEagle, PublishedState
from paceline.models.transformers_loading import load_parts
from paceline.models.transformers_packed import (
    IMPLEMENTATION,
    AttentionBatch,
    PackedRows,
    SequenceKV,
    register,
)


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the parts in a checkpoint, behind the layer's prefix.

    Attributes:
        layer: prefix of the tensors of the decoder layer itself.
        of_target: tensors that are copies of the target's.
        feeds_norm: the next step reads the output behind the norm.
        skips_first: the first place of a text has no embedding.
    """

    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str
    of_target: tuple[str, ...] = ()
    feeds_norm: bool = True
    skips_first: bool = False


QWEN = MtpNames(
    "fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight",
    "layers.0.",
)  # fmt: skip
DEEPSEEK = MtpNames(
    "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "",
    of_target=("embed_tokens.weight", "shared_head.head.weight"),
    feeds_norm=False, skips_first=True,
)  # fmt: skip


class _State(PublishedState):
    """As its base; the entries are in buffers of the general path."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = SequenceKV()
        self.positions: list[int] = []

    @property
    def num_places(self) -> int:
        return len(self.positions)

    def cut(self, count: int) -> None:
        del self.positions[count:]


class ModelMtp(PublishedEagle):
    """See the module.

    Args:
        tensors: of the layer, by their names behind its prefix.
        names: of these tensors.
        named: the checkpoint, for errors.

    Raises:
        InvalidArgument: tensors are missing or left over, or have other shapes.
    """

    kind = "mtp"

    def __init__(
        self, target: HeadTarget, tensors: Mapping[str, Tensor], names: MtpNames, named: str
    ) -> None:
        # The base's own layer and table of positions are not used.
        unused = replace(target.config, intermediate_size=1, context_length=1)
        super().__init__(target, mtp_layout(Layout(unused)))
        self.names = names
        own = {name: value for name, value in tensors.items() if name not in names.of_target}
        parts = (names.fc, names.embedding_norm, names.hidden_norm, names.norm)
        missing = [part for part in parts if part not in own]
        if missing:
            raise InvalidArgument("head", f"{named}, without {missing[0]}", "a whole MTP layer")
        layer = {
            f"layers.0.{name.removeprefix(names.layer)}": value
            for name, value in own.items()
            if name not in parts
        }
        model = load_parts(
            type(target.model), _one_layer(target.model.config),
            {**layer, "norm.weight": own[names.norm]}, named,
        )  # fmt: skip
        self.layers = nn.ModuleList()  # those of the base
        self.decoder: Any = model.base_model
        # The next step may read what comes before the norm.
        self.norm = self.decoder.norm
        self.decoder.norm = nn.Identity()
        self.embedding_norm, self.hidden_norm = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        for part, name in (
            (self.embedding_norm, names.embedding_norm),
            (self.hidden_norm, names.hidden_norm),
            (self.fc, names.fc),
        ):
            if part.weight.shape != own[name].shape:
                found, wanted = tuple(own[name].shape), tuple(part.weight.shape)
                raise InvalidArgument("head", f"{named}, {name} of shape {found}", str(wanted))
            part.weight = nn.Parameter(own[name])

    def new_state(self) -> _State:
        return _State()

    def inputs(self, embedded: Tensor, x: Tensor) -> Tensor:
        pair = self.embedding_norm(embedded), self.hidden_norm(x)
        fused: Tensor = self.fc(torch.cat(pair, -1))
        return fused

    def passed_on(self, drafted: Tensor) -> Tensor:
        return self.norm(drafted) if self.names.feeds_norm else drafted

    def some_logits(self, drafted: Tensor) -> Tensor:
        return super().some_logits(self.norm(drafted))

    def _run(
        self, state: PublishedState, tokens: Sequence[int], x: Tensor,
        positions: Sequence[int], mask: Tensor,
    ) -> Tensor:  # fmt: skip
        assert isinstance(state, _State)
        device, first = x.device, mask.shape[1] - len(tokens)
        embedded = self.embed(torch.tensor(tokens, device=device))
        places = torch.tensor(list(positions), device=device)
        if self.names.skips_first:
            embedded = embedded.masked_fill((places == 0)[:, None], 0.0)
        state.positions[first:] = positions
        rows = PackedRows(
            state.kv, np.arange(first, mask.shape[1]), np.array(state.positions),
            mask.cpu().numpy(),
        )  # fmt: skip
        with torch.inference_mode():
            outputs = self.decoder(
                inputs_embeds=self.inputs(embedded, x)[None],
                position_ids=places[None],
                attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64, device=device),
                use_cache=False,
                packed=AttentionBatch([rows], device),
            )
        drafted: Tensor = outputs.last_hidden_state[0]
        return drafted


def _one_layer(config: Any) -> Any:
    """The configuration of a model with one layer, which attends to everything, without a table.

    The layer has experts if the target's last one has.
    """
    register()
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    one.vocab_size, one.pad_token_id, one.tie_word_embeddings = 1, None, False
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    if hasattr(one, "mlp_layer_types"):
        one.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    one._attn_implementation = IMPLEMENTATION
    return one
