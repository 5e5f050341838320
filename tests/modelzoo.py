"""Small random checkpoints in Hugging Face format, for tests of the load paths and the loop.

``make_model("qwen2", directory)`` writes a folder as a user would have it (config.json,
safetensors, tokenizer.json) and returns it; the same arguments give the same bytes. Weights are
drawn wide enough that argmax wanders over the vocabulary instead of repeating one token.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 258  # the 256 bytes and two special tokens
END_OF_TEXT_ID, PAD_ID = 256, 257
CONTEXT_LENGTH = 512

_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": PAD_ID,
}
_GEMMA_SIZES = _LLAMA_SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def _rope(rope_type: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# kind -> (model_type, config values)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_SIZES),
    "llama_tied": ("llama", _LLAMA_SIZES | {"tie_word_embeddings": True}),
    "llama_gqa": ("llama", _LLAMA_SIZES | {"num_key_value_heads": 2}),
    "llama_bias": ("llama", _LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", _LLAMA_SIZES | {"head_dim": 32, "num_key_value_heads": 1}),
    "llama_llama3_rope": ("llama", _LLAMA_SIZES | _rope("llama3", **_LLAMA3_ROPE)),
    "llama_linear_rope": ("llama", _LLAMA_SIZES | _rope("linear", factor=4.0)),
    "llama_yarn_rope": (
        "llama",
        _LLAMA_SIZES | _rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "mistral": ("mistral", _LLAMA_SIZES | {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral_sliding": ("mistral", _LLAMA_SIZES | {"num_key_value_heads": 2, "sliding_window": 16}),
    "qwen2": ("qwen2", _LLAMA_SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", _LLAMA_SIZES | {"num_key_value_heads": 2, "head_dim": 32}),
    "gpt_oss": (
        "gpt_oss",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 16,
            "swiglu_limit": 1.0,  # what a small random model comes near to
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama4": (
        "llama4_text",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2, 3],
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.4,
            **_rope("llama3", **_LLAMA3_ROPE),
        },
    ),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": CONTEXT_LENGTH,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    "opt": (
        "opt",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT_LENGTH,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    "gemma": ("gemma", _GEMMA_SIZES),
    "gemma2": (
        "gemma2",
        _GEMMA_SIZES
        | {
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
            # Caps that scores and logits of a small random model come near to.
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA_SIZES
        | {
            "sliding_window": 12,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("olmo2", _LLAMA_SIZES | {"num_key_value_heads": 2}),
    "granite": (
        "granite",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "smollm3": (
        "smollm3",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
        },
    ),
    "phi3": (
        "phi3",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 256,
            "sliding_window": 40,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        _LLAMA_SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {key: value for key, value in _LLAMA_SIZES.items() if key != "num_key_value_heads"},
    ),
    # Attention code of its own.
    "gptj": (
        "gptj",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "rotary_dim": 8,
            "n_positions": CONTEXT_LENGTH,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
            "tie_word_embeddings": False,
        },
    ),
    # ALiBi: positions come from the attention mask, and forward takes no position_ids.
    "bloom": (
        "bloom",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    # A state-space model: nothing to crop, nothing to mask.
    "mamba": (
        "mamba",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    "rwkv": (
        "rwkv",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "attention_hidden_size": 64,
            "num_hidden_layers": 3,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    # Hybrids: some layers recur, others attend.
    "jamba": (
        "jamba",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    # A cache of its own kind.
    "minimax": (
        "minimax",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
        },
    ),
    # Its state is in its modules, out of reach.
    "recurrent_gemma": (
        "recurrent_gemma",
        _GEMMA_SIZES
        | {
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "lru_width": 64,
            "attention_window_size": 16,
        },
    ),
}

_IDS = {key: _LLAMA_SIZES[key] for key in _LLAMA_SIZES if key.endswith(("_id", "vocab_size"))}
_GPT_SIZES = _IDS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT_LENGTH}
_WIDE = _IDS | {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_GROUPED = _LLAMA_SIZES | {"num_key_value_heads": 2}
_HEADS_OF_16 = _GROUPED | {"head_dim": 16}
_WINDOWS = _GROUPED | {"sliding_window": 16, "num_hidden_layers": 4}

# Dense models of the general path whose sizes have other names, or none but those of Llama.
_KINDS |= {
    kind: (kind, values)
    for kind, values in {
        "apertus": _GROUPED,
        "arcee": _GROUPED,
        "biogpt": _WIDE | {"intermediate_size": 128},
        "codegen": _GPT_SIZES
        | {"rotary_dim": 8, "n_ctx": CONTEXT_LENGTH, "tie_word_embeddings": False},
        "cohere": _GROUPED,
        "cohere2": _WINDOWS,
        "ernie4_5": _HEADS_OF_16,
        "exaone4": _WINDOWS | {"sliding_window_pattern": 2},
        "falcon": _WIDE | {"alibi": False},
        "glm": _HEADS_OF_16,
        "glm4": _HEADS_OF_16,
        "gpt_bigcode": _GPT_SIZES,
        "gpt_neo": _IDS
        | {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 16,
            "max_position_embeddings": CONTEXT_LENGTH,
        },
        "helium": _HEADS_OF_16,
        "hunyuan_v1_dense": _HEADS_OF_16,
        "mpt": _IDS | {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": CONTEXT_LENGTH},
        "nemotron": _GROUPED,
        "olmo": _GROUPED,
        "olmo3": _WINDOWS,
        "persimmon": _LLAMA_SIZES,
        "phi": _GROUPED,
        "seed_oss": _HEADS_OF_16,
        "stablelm": _GROUPED,
        "starcoder2": _GROUPED | {"sliding_window": 16},
        "xglm": _IDS
        | {
            "d_model": 64,
            "num_layers": 3,
            "attention_heads": 4,
            "ffn_dim": 128,
            "max_position_embeddings": CONTEXT_LENGTH,
        },
    }.items()
}

# One checkpoint of each architecture that declares differences from Llama.
DIFFERENT_KINDS = (
    "olmo2",
    "granite",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "gpt_oss",
    "llama4",
)
_FAST_PATH_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FAST_PATH_KINDS = (
    *(kind for kind, (model_type, _) in _KINDS.items() if model_type in _FAST_PATH_TYPES),
    *DIFFERENT_KINDS,
    "llama_sharded",
    "llama_legacy_rope",
)
RECURRENT_KINDS = (
    "mamba",
    "mamba2",
    "rwkv",
    "jamba",
    "falcon_h1",
    "lfm2",
    "qwen3_next",
    "minimax",
    "recurrent_gemma",
)
GENERAL_PATH_KINDS = ("gpt2", "opt", "gemma", "gpt_neox", "gptj", "bloom", *RECURRENT_KINDS)


def _legacy_rope(folder: Path) -> None:
    """Rewrite config.json with the keys that checkpoints had before transformers 5."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config, indent=2))


# kind -> (base kind, what to do after saving, arguments of save_pretrained)
_VARIANTS: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any]]] = {
    "llama_sharded": ("llama_gqa", None, {"max_shard_size": "150KB"}),
    "llama_legacy_rope": ("llama_llama3_rope", _legacy_rope, {}),
}

KINDS = (*_KINDS, *_VARIANTS)
MODEL_TYPES = {kind: model_type for kind, (model_type, _) in _KINDS.items()}
"""The ``model_type`` of each kind, without variants."""


def make_model(
    kind: str, directory: str | Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a random checkpoint of ``kind`` below ``directory`` and return its folder.

    A folder that an earlier call with the same arguments wrote is returned as it is, so a
    directory of session scope makes a cache.

    Args:
        kind: one of ``KINDS``.
        directory: where to put it; created if missing.
        seed: of the weights.
        dtype: of the weights on disk, as torch names it.
        overrides: values of the transformers config, for example ``num_hidden_layers=2``.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
    arguments = json.dumps([seed, dtype, overrides], sort_keys=True)
    folder = Path(directory) / f"{kind}-{hashlib.sha256(arguments.encode()).hexdigest()[:10]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    base, finish, save = _VARIANTS.get(kind, (kind, None, {}))
    random_model(base, seed=seed, dtype=dtype, **overrides).save_pretrained(draft, **save)
    write_tokenizer(draft)
    if finish is not None:
        finish(draft)
    draft.chmod(0o755)
    try:
        os.rename(draft, folder)  # appears whole or not at all
    except OSError:  # another worker was faster
        shutil.rmtree(draft)
    return folder


def random_model(kind: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """The transformers model that :func:`make_model` saves, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = _KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**values, **overrides})
    with torch.random.fork_rng(devices=[]):  # some start from random decay rates, which stay
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tied = bool(getattr(config, "tie_word_embeddings", True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_values(name, parameter, tied, generator))
    model.tie_weights()
    return model.to(getattr(torch, dtype)).eval()


def _random_values(
    name: str, parameter: torch.Tensor, tied: bool, generator: torch.Generator
) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if "A_log" in name:
        return parameter  # decay rates of a state-space model: only their own values are stable
    if name.endswith("sinks"):
        return noise
    if parameter.dim() < 2:
        # Biases are small (a large one in the last norm would favour one token everywhere); a
        # norm's weights spread around what the model starts from, 1 or Gemma's 0.
        return noise * 0.05 if name.endswith("bias") else parameter + noise * 0.2
    if "lm_head" in name or "embed_out" in name:
        scale = 3.0
    elif "wpe" in name or "embed_positions" in name:
        scale = 2.0
    elif "embed" in name or "wte" in name:
        # An embedding that is the head too needs the head's spread, yet must stay small beside
        # what the layers add, or the model would echo its input.
        scale = 1.5 if tied else 0.3
    else:
        scale = 4.0 if tied else 1.5
    fan_in = parameter.shape[0] if ".c_" in name else parameter.shape[-1]  # GPT-2 transposes
    return noise * scale / fan_in**0.5


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with no merges: every byte of a text is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "pad_token": "<|pad|>",
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
    )
