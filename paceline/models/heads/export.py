"""Trained heads in the format of ``speculators`` 0.9, which vLLM and SGLang load.

The weights keep their values and their names. What is the target's, embedding and output layer, is
left to the target in DFlash, DSpark, xPress and MTP, and written as well in EAGLE-3 and P-EAGLE.
:mod:`paceline.models.heads.published` reads what is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.heads.base import Head
from paceline.models.heads.dflash import DFlash
from paceline.models.heads.dflash2 import DFlash2
from paceline.models.heads.dspark import DSpark
from paceline.models.heads.eagle3 import TrainedEagle3
from paceline.models.heads.mtp import Mtp, published_name
from paceline.models.heads.peagle import PEagle
from paceline.models.heads.published_eagle import PublishedEagle, PublishedEagle3
from paceline.models.heads.xpress import XPress
from paceline.models.layouts import read_config
from paceline.models.llama_config import LlamaConfig

_VERSION = "0.9.0"  # whose format it is


def export_head(head: Head, folder: Path, verifier: str | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

    Args:
        folder: made if it is missing.
        verifier: what the config calls the target: a name of the hub or a folder, from where
            speculators takes the target's parts. None: the folder of the head's target.

    Raises:
        InvalidArgument: a kind that the format does not have.
    """
    writer = next((w for kind, w in _WRITERS.items() if type(head) is kind), None)
    if writer is None:
        kinds = ", ".join(dict.fromkeys(kind.kind for kind in _WRITERS))
        allowed = f"one of {kinds}; an eagle3 trained with published=true"
        raise InvalidArgument("head", f"{head.kind}, of Paceline's own layout", allowed)
    fields, tensors = writer(head)
    where = head.target.folder
    name = verifier or (None if where is None else str(where.resolve()))
    architectures = [] if where is None else read_config(where).get("architectures") or []
    depth = fields.pop("speculative_tokens")
    config = {
        **fields,
        "speculators_config": {
            "algorithm": head.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0, "proposal_type": "greedy",
                    "speculative_tokens": depth, "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": name},
        },
        "speculators_model_type": head.kind,
        "speculators_version": _VERSION,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.tmp"
    stored = {name: _stored(value) for name, value in tensors.items()}
    save_file(stored, part, {"format": "pt"})
    part.replace(folder / "model.safetensors")
    part = folder / "config.json.tmp"
    part.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    part.replace(folder / "config.json")


def _stored(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    # A copy: two names may stand for one tensor of the target, and a file holds each once.
    return (value.bfloat16() if value.is_floating_point() else value).contiguous().clone()


def _layers(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    """config.json of a drafter's layers."""
    windows = config.windows
    widths = {window for window in windows if window is not None}
    if len(widths) > 1:
        raise InvalidArgument("windows", sorted(widths), "one width for all layers with a window")
    sliding = next(iter(widths), None)
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope),
        "attention_bias": config.qkv_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **({"mlp_bias": config.mlp_bias} if model_type == "llama" else {}),
        **(
            {
                "sliding_window": sliding, "use_sliding_window": sliding is not None,
                "layer_types": [
                    "full_attention" if window is None else "sliding_attention"
                    for window in windows
                ],
            }
            if model_type == "qwen3" else {}
        ),
    }  # fmt: skip


def _vocabulary(tokens: Tensor, size: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of the tokens that a head drafts.  # int64 [num_logits]"""
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[tokens.cpu()] = True
    return {"d2t": tokens.cpu() - torch.arange(len(tokens)), "t2d": t2d}


def _block(head: DFlash) -> tuple[dict[str, Any], dict[str, Tensor]]:
    options, size = head.options, head.target.config.vocab_size
    tensors = dict(head.state_dict())
    tensors.pop("vocabulary", None)
    if (rows := head.output_rows) is not None:
        tensors |= {"lm_head.weight": rows, **_vocabulary(head.vocabulary, size)}
    causal = {sight.causal for sight in head.sights if sight.window is not None}
    fields = {
        "architectures": [type(head).__name__ + "DraftModel"],
        "transformer_layer_config": _layers(_with_windows(head), "qwen3"),
        "aux_hidden_state_layer_ids": head.feature_layers,
        "block_size": options.block_size,
        "mask_token_id": head.mask_token,
        "draft_vocab_size": len(head.vocabulary),
        "sample_from_anchor": options.from_anchor,
        "sliding_window_non_causal": causal == {False} or (not causal and head.kind == "dflash2"),
        "speculative_tokens": head.max_depth,
    }
    if isinstance(head, DFlash2):
        fields |= {
            "conv_kernel_size": options.conv_taps,
            "conv_group_size": options.conv_group,
            "selector_rank": options.selector_rank,
            "selector_top_k": options.candidates,
        }
    if isinstance(head, DSpark):
        fields |= {
            "markov_rank": options.markov_rank,
            "markov_head_type": options.markov_kind,
            "enable_confidence_head": options.confidence_head,
            "confidence_head_with_markov": options.confidence_reads_token
            and options.confidence_head,
        }
    if isinstance(head, XPress):
        fields |= {
            "xpress_rank": options.refiner_rank,
            "xpress_mlp_ratio": options.refiner_ratio,
            "num_jacobi_passes": options.jacobi_passes,
        }
    return fields, tensors


def _with_windows(head: DFlash) -> LlamaConfig:
    return replace(head.config, windows=tuple(sight.window for sight in head.sights))


def _eagle3(head: PublishedEagle3) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layout, size = head.layout, head.target.config.vocab_size
    tensors = dict(head.state_dict())
    tensors.pop("vocabulary", None)
    # speculators leaves both uninitialised where they are missing, and takes that for weights.
    if not layout.own_embedding:
        tensors["embed_tokens.weight"] = head.target.embedding
    if not layout.own_output:
        rows, tokens = head.target.lm_head, head.vocabulary
        tensors["lm_head.weight"] = rows if tokens is None else rows[tokens]
    if head.vocabulary is not None:
        tensors |= _vocabulary(head.vocabulary, size)
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": _layers(layout.config, _layers_kind(head)),
        "eagle_aux_hidden_state_layer_ids": list(layout.features),
        "draft_vocab_size": layout.vocabulary or size,
        "norm_before_residual": layout.norm_before_residual,
        "norm_before_fc": layout.norm_before_fc,
        "fc_norm": layout.fc_norm,
        "norm_output": layout.norm_output,
        "embed_requires_grad": layout.own_embedding,
        "speculative_tokens": 5,
    }
    return fields, tensors


def _layers_kind(head: PublishedEagle) -> str:
    return "qwen3" if head.layout.config.head_norms else "llama"


def _peagle(head: PEagle) -> tuple[dict[str, Any], dict[str, Tensor]]:
    fields, tensors = _eagle3(head)
    return fields | {
        "architectures": ["PEagleDraftModel"],
        "mask_token_id": head.mask_token,
        "speculative_tokens": head.max_depth,
    }, tensors


def _mtp(head: Mtp) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not head.layout.config.head_norms:
        found = f"mtp, whose layer is that of a {head.target.config.model_type} target"
        raise InvalidArgument("head", found, "one of a qwen3 target: the format has no other")
    fields = {
        "architectures": ["MTPDraftModel"],
        "transformer_layer_config": _layers(head.layout.config, "qwen3"),
        "num_nextn_predict_layers": 1,
        "speculative_tokens": head.options.steps,
    }
    return fields, {published_name(name): value for name, value in head.state_dict().items()}


_WRITERS: Mapping[type[Head], Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]]] = {
    DFlash: _block,
    DFlash2: _block,
    DSpark: _block,
    XPress: _block,
    PublishedEagle3: _eagle3,
    TrainedEagle3: _eagle3,
    PEagle: _peagle,
    Mtp: _mtp,
}
