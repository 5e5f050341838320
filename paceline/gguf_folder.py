"""A GGUF file as a model folder.

Paceline writes all but the weights (configuration, tokenizer, chat template, end-of-sequence
tokens) once into a folder of its cache, in Hugging Face's formats, beside a link to the file and an
index of its tensors. So all code for model folders works on GGUF files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.cache import cache_folder
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.gguf_file import TYPES, GgufFile

VERSION = 2
"""The version of what :func:`folder_of` writes."""
WEIGHTS, INDEX = "model.gguf", "model.gguf.json"
_CHECKSUMS = "checksums.json"
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Architectures of the fast path, and how transformers' classes name them."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FACTORS = "rope_freqs.weight"
"""The tensor that divides the frequencies: Llama 3.1's rope, computed when the file was made."""
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
# Kinds of tokens; texts are split at control and user-defined ones.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "\u2581"  # what SentencePiece writes for one
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return Path(path).suffix == ".gguf"


def model_folder(path: str | Path) -> Path:
    """A model folder, or that of a GGUF file. Errors: as :func:`folder_of`."""
    return folder_of(path) if is_gguf(path) else Path(path)


def folder_of(path: str | Path) -> Path:
    """The model folder of a GGUF file; made when it is first asked for.

    Raises:
        ModelNotFound: there is no such file, or it is truncated or damaged.
        InvalidArgument: an architecture, a tokenizer or a setting that Paceline does not know.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ModelNotFound(f"GGUF file {str(path)!r} does not exist")
    state = file.stat()
    key = f"{VERSION} {file} {state.st_size} {state.st_mtime_ns}"
    folder = cache_folder("gguf") / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not _is_whole(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
        try:
            _write(file, scratch)
            if folder.is_dir() and not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch, folder)
        except OSError:
            if not _is_whole(folder):  # else another process was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether all files of the folder are there and undamaged."""
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_text("utf-8"))
        return all(zlib.crc32((folder / name).read_bytes()) == n for name, n in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is one that :func:`folder_of` made."""
    return (path / INDEX).is_file()


def is_foreign(path: str | Path) -> bool:
    """Whether only llama.cpp computes a model: a GGUF file of an architecture that Paceline lacks.

    Errors: as :func:`folder_of`.
    """
    return is_gguf(path) and _architecture(Path(path)) not in ARCHITECTURES


def _architecture(file: Path) -> str:
    """Read from the file's beginning if possible: nearly every file has this key first."""
    key = b"general.architecture"
    start = file.open("rb").read(4096) if file.is_file() else b""
    at = start.find(key) + len(key)
    if len(key) <= at <= len(start) - 12:  # a string's kind, 8, and its length come first
        kind, size = struct.unpack_from("<IQ", start, at)
        if kind == 8:
            return start[at + 12 : at + 12 + size].decode("utf-8", "replace")
    return str(GgufFile(file).value("general.architecture"))


def _write(file: Path, folder: Path) -> None:
    source = GgufFile(file)
    name = source.value("general.architecture")
    if name not in ARCHITECTURES:
        raise InvalidArgument("general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
    config = _config(source, name)
    documents = {
        "config.json": config,
        "tokenizer.json": _tokenizer(source),
        "tokenizer_config.json": _tokenizer_config(source),
        "generation_config.json": {"eos_token_id": _eos_token_ids(source)},
        INDEX: _index(source, config),
    }
    checksums = {}
    for document, content in documents.items():
        text = json.dumps(content, indent=1).encode()
        (folder / document).write_bytes(text)
        checksums[document] = zlib.crc32(text)
    (folder / _CHECKSUMS).write_text(json.dumps(checksums), "utf-8")
    (folder / WEIGHTS).symlink_to(file)


def _config(source: GgufFile, name: str) -> dict[str, Any]:
    known = {f"{name}.{key}" for key in _KNOWN_KEYS}
    for key in source.values:
        if key.startswith(f"{name}.") and key not in known and source.get(key):
            raise InvalidArgument(key, source.get(key), f"none: {name} models have no such setting")

    def get(key: str, default: Any = None) -> Any:
        found = (
            source.get(f"{name}.{key}") if default is not None else source.value(f"{name}.{key}")
        )
        if isinstance(found, list):
            raise InvalidArgument(f"{name}.{key}", found, "one number for all layers")
        return default if found is None else found

    tensors = source.tensors
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise InvalidArgument(f"{name}.{key}", get(key), f"{head_dim}, as other dimensions")
    scaling = get("rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
    }  # fmt: skip
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": _shortest(get("rope.scaling.factor"))}
    elif scaling != "none":
        raise InvalidArgument(f"{name}.rope.scaling.type", scaling, "none or linear")
    if _FACTORS in tensors:
        place = tensors[_FACTORS]
        if place.type != "F32":
            raise InvalidArgument(f"type of {_FACTORS}", place.type, "F32")
        with source.path.open("rb") as file:
            file.seek(place.offset)
            rope["frequency_factors"] = np.fromfile(file, "<f4", place.size // 4).tolist()
    if "token_embd.weight" not in tensors:
        raise ModelNotFound(f"{str(source.path)!r} lacks the tensor token_embd.weight")
    biased = "blk.0.attn_q.bias" in tensors
    return {
        "architectures": [f"{ARCHITECTURES[name]}ForCausalLM"],
        "model_type": name,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        **({"attention_bias": biased} if name != "qwen2" else {}),
    }


def _shortest(value: float) -> float:
    """The decimal number that a float32 was written for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _index(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Where each tensor is in the file, by its name in Hugging Face's format."""
    index = {}
    for tensor in source.tensors.values():
        if tensor.name == _FACTORS:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        name = _NAMES.get(tensor.name)
        if layer and layer[2] in _LAYER_NAMES:
            name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        if name is None:
            raise ModelNotFound(
                f"{str(source.path)!r} has the tensor {tensor.name!r}, which Paceline does not "
                f"know: {config['model_type']} models have no such weights"
            )
        if tensor.type not in TYPES:
            raise InvalidArgument(
                f"type of {tensor.name}", tensor.type, f"one of {', '.join(TYPES)}"
            )
        interleaved = 0
        if config["model_type"] == "llama" and layer and layer[2] in ("attn_q", "attn_k"):
            interleaved = config[
                "num_attention_heads" if layer[2] == "attn_q" else "num_key_value_heads"
            ]
        index[name] = {
            "type": tensor.type, "shape": list(tensor.shape), "offset": tensor.offset,
            "size": tensor.size, "interleaved_heads": interleaved,
        }  # fmt: skip
    return index


def _tokenizer(source: GgufFile) -> dict[str, Any]:
    """`tokenizer.json`."""
    kind = source.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        allowed = "gpt2 (byte-level BPE) or llama (SentencePiece BPE)"
        raise InvalidArgument("tokenizer.ggml.model", kind, allowed)
    tokens = source.value("tokenizer.ggml.tokens")
    kinds = source.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kinds[i] == _CONTROL,
        }
        for i in range(len(tokens)) if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    after = _byte_level(use_regex=True) if kind == "gpt2" else None
    if source.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos = source.value("tokenizer.ggml.bos_token_id")
        special, text = {"id": tokens[bos], "type_id": 0}, {"id": "A", "type_id": 0}
        after = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": special}, {"Sequence": text}],
            "pair": [
                {"SpecialToken": special}, {"Sequence": text}, {"Sequence": text | {"id": "B"}},
            ],
            "special_tokens": {
                tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}
            },
        }  # fmt: skip
    parts = _byte_level_bpe if kind == "gpt2" else _sentencepiece_bpe
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": after, **parts(source, tokens, kinds),
    }  # fmt: skip


def _byte_level_bpe(source: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    before = source.get("tokenizer.ggml.pre") or "gpt-2"
    if before not in _BEFORE:
        raise InvalidArgument("tokenizer.ggml.pre", before, f"one of {', '.join(_BEFORE)}")
    # Conversion fills a vocabulary up to the size of the model's.
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    pairs = [merge.split(" ", 1) for merge in source.value("tokenizer.ggml.merges")]
    normalizer, steps, whole_words = _BEFORE[before]
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": vocabulary,
            "merges": [pair for pair in pairs if "".join(pair) in vocabulary],
        },
    }  # fmt: skip


def _sentencepiece_bpe(source: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Pieces with scores: the neighbours that make the piece of the highest score are merged first.

    As in the tokenizers of Llama 2 and Mistral; a byte that no piece has is a token of its own.
    """
    # Here, because the import takes seconds.
    from transformers.convert_slow_tokenizer import generate_merges

    scores = source.value("tokenizer.ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    pieces = {
        token: scores[i] for token, i in vocabulary.items() if kinds[i] in (_NORMAL, _USER_DEFINED)
    }
    unknown = next((tokens[i] for i in range(len(tokens)) if kinds[i] == _UNKNOWN), None)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, Any] = {"type": "Sequence", "normalizers": [space]}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if source.get("tokenizer.ggml.add_space_prefix", True):
        normalizer["normalizers"].insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocabulary,
            "merges": generate_merges({token: vocabulary[token] for token in pieces}, pieces),
        },
    }  # fmt: skip


def _byte_level(use_regex: bool) -> dict[str, Any]:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return step | {"use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BEFORE: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "gpt-2": (None, [_byte_level(True)], False),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, _byte_level(True)], False),
    "llama-bpe": (None, [_split(_LLAMA3), _byte_level(False)], True),
    "smaug-bpe": (None, [_split(_LLAMA3), _byte_level(False)], False),
    "qwen2": ({"type": "NFC"}, [_split(_QWEN2), _byte_level(False)], False),
}
"""By `tokenizer.ggml.pre`: the normalizer, the steps that split a text, and whether a word that is
in the vocabulary is taken whole before merges are tried."""


def _tokenizer_config(source: GgufFile) -> dict[str, Any]:
    config: dict[str, Any] = {"chat_template": source.get("tokenizer.chat_template") or ""}
    tokens = source.value("tokenizer.ggml.tokens")
    for name in ("bos", "eos"):
        token = source.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token"] = None if token is None else tokens[token]
    return config


def _eos_token_ids(source: GgufFile) -> list[int]:
    """Every token after which a generation ends: of the text, of a turn, of a message."""
    ids = [source.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return sorted({int(token) for token in ids if token is not None})


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file of a folder that :func:`folder_of` made."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int
    interleaved_heads: int
    file: Path

    def read(self, rows: slice = slice(None)) -> npt.NDArray[Any]:
        """Its bytes for a quantised type, its numbers for others (BF16: as uint16).

        Args:
            rows: which outputs, in the order of Hugging Face's format.

        # [outputs, ...]
        """
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(self.type, np.uint8)
        # Copy on write, though nothing writes: torch warns about read-only memory.
        raw = np.memmap(self.file, np.uint8, "c", self.offset, (self.size,))
        whole = raw.view(kind).reshape(self.shape[0], -1)
        if self.interleaved_heads:  # (0, half), (1, half + 1), ... as llama.cpp's rope has them
            pairs = np.arange(len(whole)).reshape(self.interleaved_heads, -1, 2)
            found = whole[pairs.swapaxes(1, 2).reshape(-1)[rows]]
        else:
            found = whole[rows]
        return found if kind is np.uint8 else found.reshape(-1, *self.shape[1:])


def tensors(folder: Path) -> dict[str, GgufTensor]:
    """All tensors of a folder that :func:`folder_of` made."""
    index = json.loads((folder / INDEX).read_text("utf-8"))
    return {
        name: GgufTensor(name, file=folder / WEIGHTS, **entry | {"shape": tuple(entry["shape"])})
        for name, entry in index.items()
    }
