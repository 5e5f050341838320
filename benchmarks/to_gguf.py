"""A small Llama of Paceline's own as a GGUF file.

    python -m benchmarks.to_gguf paceline/demo/drafter drafter.gguf --type Q8_0

The tokenizer is written as byte-level BPE. This is for the demo pair and for tests; llama.cpp's
`convert_hf_to_gguf.py` converts the models that people publish.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.errors import InvalidArgument
from paceline.models.layouts import read_config
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights

# How text is split before merges, and llama.cpp's name for it.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


Array = np.ndarray[Any, Any]
Quantise = Callable[[str, Array], tuple[Array, str]]


def to_gguf(
    folder: str | Path, file: str | Path, kind: str = "F32", quantise: Quantise | None = None
) -> None:
    """Write the model and the tokenizer of a Hugging Face folder to a GGUF file.

    Args:
        kind: of matrices, one of ``TYPES``; vectors are float32.
        quantise: instead of that, a matrix' bytes and their type, from its name and its weights.

    Raises:
        InvalidArgument: not a plain Llama, or another tokenizer than byte-level BPE.
    """
    folder = Path(folder)
    if read_config(folder).get("model_type") != "llama":
        raise InvalidArgument("folder", str(folder), "a model of type llama")
    config = LlamaConfig.from_folder(folder)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(read_config(folder)["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(read_config(folder)["rms_norm_eps"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder, config.vocab_size)
    for name, tensor in _tensors(load_weights(folder, config), config):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        elif quantise is not None:
            raw, own = quantise(name, tensor)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[own])
        elif kind == "F32":
            writer.add_tensor(name, tensor)
        else:
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    tensors: dict[str, torch.Tensor], config: LlamaConfig
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    for name, tensor in tensors.items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        weights = tensor.float().numpy()
        if parts[0] == "layers" and name.endswith(".weight"):
            inner = ".".join(parts[2:])
            if inner.endswith(("q_proj", "k_proj")):
                # llama.cpp rotates neighbours, Hugging Face the two halves of a head.
                halves = weights.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
                weights = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
            yield f"blk.{parts[1]}.{_NAMES[inner]}.weight", weights
        elif parts[0] in top:
            yield f"{top[parts[0]]}.weight", weights
        else:
            raise InvalidArgument("folder", name, "weights of a plain Llama, without biases")


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model, split = tokenizer["model"], json.dumps(tokenizer["pre_tokenizer"], ensure_ascii=False)
    if model["type"] != "BPE" or "ByteLevel" not in split:
        raise InvalidArgument("folder", str(folder), "a byte-level BPE tokenizer")
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in {**model["vocab"], **special}.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    types = [
        gguf.TokenType.CONTROL if token in special
        else gguf.TokenType.NORMAL if index in by_id
        else gguf.TokenType.UNUSED
        for index, token in enumerate(tokens)
    ]  # fmt: skip
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smaug-bpe" if json.dumps(_LLAMA3_SPLIT) in split else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or ["Ā Ā"])  # llama.cpp requires merges; this one makes no token
    writer.add_add_bos_token(False)
    eos = read_config(folder).get("eos_token_id")
    if isinstance(eos, int):
        writer.add_eos_token_id(eos)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with config.json, weights and tokenizer.json")
    parser.add_argument("file", type=Path, help="to write")
    parser.add_argument("--type", choices=TYPES, default="F32", help="of matrices")
    options = parser.parse_args()
    to_gguf(options.folder, options.file, options.type)
