"""Read Hugging Face folders for training, and write folders that other tools load."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.architectures import PLAIN_MODEL_TYPES
from paceline.models.layouts import read_config
from paceline.models.transformers_loading import load_causal_lm

# Files of a tokenizer and its chat template, in all versions of transformers.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "chat_template.*", "generation_config.json",
)  # fmt: skip


def load_model(folder: Path, *, random_weights: bool = False, seed: int = 0) -> Any:
    """A causal language model of transformers, in float32 and eval mode.

    Args:
        random_weights: read only config.json, and draw the weights from ``seed``.

    Raises:
        ModelNotFound: the folder, its config.json or its weights are missing or damaged.
        InvalidArgument: an encoder-decoder model, quantised weights, or tensors that the model does
            not have.
    """
    if read_config(folder).get("is_encoder_decoder"):
        raise InvalidArgument("model", str(folder), "a causal language model")
    if random_weights:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
    return load_causal_lm(folder, torch.float32, attn_implementation="sdpa").eval()


def has_weights(folder: Path) -> bool:
    """Whether the folder holds more than a config.json."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def first_layers(model: Any, count: int) -> Any:
    """A new model with the embedding, the first ``count`` layers and the head of another.

    Raises:
        InvalidArgument: ``model`` is of a type without such layers, or has fewer.
    """
    from transformers import AutoModelForCausalLM

    check_layers(model, "target")
    have = model.config.num_hidden_layers
    if not 1 <= count <= have:
        raise InvalidArgument("layers", count, f"1 to {have}, the layers of the target")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    cut = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    weights = model.state_dict()
    cut.load_state_dict({name: weights[name] for name in cut.state_dict()})
    return cut


def check_layers(model: Any, field: str) -> None:
    """Raise InvalidArgument unless the model's layers can run one by one."""
    kind = model.config.model_type
    if kind not in PLAIN_MODEL_TYPES:
        raise InvalidArgument(field, kind, f"a model of type {', '.join(PLAIN_MODEL_TYPES)}")


def check_exits(exits: Sequence[int], num_layers: int) -> None:
    """Raise InvalidArgument for an exit (in layers, from 1) that the model does not have."""
    for exit_layer in exits:
        if not 1 <= exit_layer <= num_layers:
            raise InvalidArgument("exits", exit_layer, f"a layer of the model: 1 to {num_layers}")


def check_length(model: Any, length: int, *, windows: bool = True) -> None:
    """Raise InvalidArgument for rows longer than the model's context.

    Args:
        windows: False if the training calls layers one by one, without a mask: then a sliding
            window must hold the whole row.
    """
    config = model.config
    limit = getattr(config, "max_position_embeddings", length)
    if not windows and getattr(config, "use_sliding_window", True):
        limit = min(limit, getattr(config, "sliding_window", None) or limit)
    if length > limit:
        raise InvalidArgument("length", length, f"at most {limit}, the context of the model")


def save_model(model: Any, like: Path, folder: Path) -> None:
    """Write a folder that other tools load, with the tokenizer and in the dtype of ``like``."""
    name = read_config(like).get("dtype") or read_config(like).get("torch_dtype") or "float32"
    shipped = copy.deepcopy(model).to("cpu", getattr(torch, name)).eval()
    shipped.save_pretrained(folder)
    for pattern in _COMPANIONS:
        for path in like.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def all_logits(model: Any, token_ids: Tensor) -> Tensor:
    """# int64 [batch, length] -> float32 [batch, length, vocab_size]"""
    logits: Tensor = model(token_ids, use_cache=False).logits
    return logits.float()
