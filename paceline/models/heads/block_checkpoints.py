"""Published checkpoints of block drafters: DFlash, DFlash 2, DSpark and xPress.

Two layouts, which differ in config.json only: that of ``speculators``
(``speculators_model_type``), and for DFlash and DSpark the authors' own (``architectures``:
``DFlashDraftModel`` of z-lab, ``Qwen3DSparkModel`` of DeepSpec). The embedding is the target's, and
so is the output layer unless the head drafts some of the tokens only. What is there for training is
not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.architectures import PLAIN_MODEL_TYPES
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.blocks import BlockSight
from paceline.models.heads.dflash import DFlash
from paceline.models.heads.dflash2 import DFlash2
from paceline.models.heads.dspark import DSpark
from paceline.models.heads.filling import draft_vocabulary, fill, layers_config
from paceline.models.heads.xpress import XPress
from paceline.models.llama_config import LlamaConfig

BLOCK_HEADS: Mapping[str, type[DFlash]] = {
    head.kind: head for head in (DFlash, DFlash2, DSpark, XPress)
}
_ORIGINAL = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
_OF_TARGET = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
# Fields of z-lab's layout that change what is computed, and the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "output_multiplier": (None, 1), "final_logit_softcapping": (None, 0),
    "input_embedding_scale": (None, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layout:
    """What either layout says.

    Attributes:
        layers: config.json of the layers.
        features: numbers of the target's layers, from 1.
        num_logits: tokens that the head can draft; None: all.
    """

    kind: str
    layers: Mapping[str, Any]
    features: Sequence[int]
    block_size: int
    mask_token: int
    from_anchor: bool
    causal_windows: bool
    num_logits: int | None
    more: Mapping[str, Any]


def block_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of a published block drafter by its config.json; None: it is none."""
    kind = config.get("speculators_model_type")
    if kind is None:
        named = config.get("architectures") or [None]
        return _ORIGINAL.get(named[0])
    return kind if kind in BLOCK_HEADS else None


def read_block_head(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget
) -> DFlash:
    """The head that a published checkpoint describes, not yet prepared for drafting.

    Args:
        config: its config.json.
        tensors: its weights by name.

    Raises:
        InvalidArgument: it is for another target, or is or lacks something that changes what it
            computes; the message says what was found and what was expected.
    """
    layout = _layout(config, target)
    layers = _layer_config(layout.layers, target)
    sights = [
        BlockSight(window, window is not None and layout.causal_windows)
        for window in layers.windows
    ]
    cls = BLOCK_HEADS[layout.kind]
    options = cls.Options(
        num_layers=layers.num_layers, block_size=layout.block_size,
        features=tuple(layout.features), mask_token=layout.mask_token,
        from_anchor=layout.from_anchor, **layout.more,
    )  # fmt: skip
    head = cls(target, options, layers, sights, layout.num_logits)
    named = f"a {layout.kind} drafter"
    fill(head, _weights(head, dict(tensors), named), named)
    return head


def _layout(config: Mapping[str, Any], target: HeadTarget) -> _Layout:
    kind = block_kind(config)
    if kind is None:
        found = config.get("speculators_model_type") or config.get("architectures")
        raise InvalidArgument("head", found, f"one of {', '.join(BLOCK_HEADS)}")
    more: dict[str, Any] = {}
    if kind == "dflash2":
        more = {
            "conv_taps": config.get("conv_kernel_size", 2),
            "conv_group": config.get("conv_group_size", 16),
            "selector_rank": config.get("selector_rank", 256),
            "candidates": config.get("selector_top_k", 16),
        }
    if kind == "dspark":
        more = {
            "markov_rank": config.get("markov_rank", 256),
            "markov_kind": config.get("markov_head_type", "vanilla"),
            "confidence_head": config.get("enable_confidence_head", True),
            "confidence_reads_token": config.get("confidence_head_with_markov", True),
        }
    if kind == "xpress":
        more = {
            "refiner_rank": config.get("xpress_rank", 256),
            "refiner_ratio": config.get("xpress_mlp_ratio", 2),
            "jacobi_passes": config.get("num_jacobi_passes", 6),
        }
    if "speculators_model_type" in config:
        layers = config.get("transformer_layer_config") or {}
        vocab_size, drafted = target.config.vocab_size, config.get("draft_vocab_size", 32000)
        return _Layout(
            kind, layers, _needed(config, "aux_hidden_state_layer_ids"),
            config.get("block_size", 8), _needed(config, "mask_token_id"),
            config.get("sample_from_anchor", kind == "dspark"),
            not config.get("sliding_window_non_causal", kind == "dflash2"),
            None if drafted == vocab_size else drafted, more,
        )  # fmt: skip
    own = {**config, **config.get("dflash_config", {})}
    for key, neutral in _NEUTRAL.items():
        if own.get(key) not in neutral:
            raise InvalidArgument(key, own[key], f"{neutral[1]}, or none")
    # Their layers count from 0, and a feature is what comes out of one.
    features = [number + 1 for number in _needed(own, "target_layer_ids")]
    last = target.config.num_layers
    if last in features:  # they would read it behind the final norm
        raise InvalidArgument("target_layer_ids", last - 1, f"numbers below {last - 1}")
    causal = own.get("is_causal")
    return _Layout(
        kind, config, features, _needed(own, "block_size"), _needed(own, "mask_token_id"),
        kind == "dspark", causal is None or causal, None, more,
    )  # fmt: skip


def _needed(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise InvalidArgument(key, None, "a value in the config.json of a block drafter")
    return config[key]


def _layer_config(raw: Mapping[str, Any], target: HeadTarget) -> LlamaConfig:
    # Whatever the type says, the layers are Qwen3's.
    layers = LlamaConfig.from_dict(
        {**layers_config(raw, "qwen3"), "mlp_bias": False}, PLAIN_MODEL_TYPES
    )
    layers = replace(layers, head_norms=True)
    for key in ("hidden_size", "vocab_size"):
        there, here = getattr(layers, key), getattr(target.config, key)
        if there != here:
            raise InvalidArgument(
                "head", f"a drafter for a target with {key} {there}",
                f"a drafter for the loaded target, whose {key} is {here}",
            )  # fmt: skip
    return layers


def _weights(head: DFlash, tensors: dict[str, Tensor], named: str) -> dict[str, Tensor]:
    """A checkpoint's weights without what is the target's; sets the head's vocabulary."""
    for name in _OF_TARGET:
        tensors.pop(name, None)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if head.lm_head is None:
        tensors.pop("lm_head.weight", None)
    else:
        count, size = len(head.vocabulary), head.target.config.vocab_size
        head.vocabulary.copy_(draft_vocabulary(d2t, t2d, count, size, named))
    return tensors
