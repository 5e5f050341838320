"""The layouts of model folders' weights that Paceline reads.

Paceline refuses every other folder, and names a tensor or a field of its config.json: a folder that
holds codes instead of weights (quantised checkpoints other than those of
:mod:`paceline.models.int4`), tensors that no layer takes, or shards that are not what their
index says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import InvalidArgument, ModelNotFound

INDEX = "model.safetensors.index.json"
SMALL_BYTES = 2**25
"""Weights of at most this size may all be in memory while they are read."""
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")

# safetensors' names of dtypes -> torch's; names missing here stay as they are.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

# Where config.json says how weights are quantised: transformers, older compressed-tensors, MLX.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
_UNQUANTIZED = (
    "a checkpoint with float32, bfloat16, float16 or float64 weights, or with 4 bits of GPTQ or "
    "AWQ for a model type of the fast path: take the model's unquantised version, a GGUF file, or "
    "write its dequantised weights to a new folder"
)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The parsed config.json of a model folder, or another such file of another folder.

    Raises:
        ModelNotFound: says what is missing.
    """
    kind = "model folder" if name == "config.json" else "folder"
    if not folder.is_dir():
        raise ModelNotFound(f"{kind} {str(folder)!r} does not exist")
    file = folder / name
    if not file.is_file():
        raise ModelNotFound(f"{kind} {str(folder)!r} has no {name}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelNotFound(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{file} holds a {type(config).__name__}, not an object")
    return config


def check_quantization(config: dict[str, Any]) -> None:
    """Refuse quantised weights, by whatever method.

    The general path refuses them too: transformers' result depends on the machine and its
    libraries, and does not always match the checkpoint.

    Args:
        config: a parsed config.json.

    Raises:
        InvalidArgument: names the method, with its format and number of bits where they are given.
    """
    text = config.get("text_config")
    for where, values in (("", config), ("text_config.", text if isinstance(text, dict) else {})):
        for key in QUANTIZATION_KEYS:
            if values.get(key):
                raise InvalidArgument(where + key, described(values[key]), _UNQUANTIZED)


def described(quantization: Any) -> str:
    """One line about a quantization_config: its method, its format and how many bits."""
    if not isinstance(quantization, dict):
        return str(quantization)
    method = quantization.get("quant_method")
    parts = [f"quant_method {method}" if method else "no quant_method"]
    for key in (
        "format", "fmt", "checkpoint_format", "version", "bits", "group_size", "desc_act",
        "load_in_8bit", "load_in_4bit", "weight_block_size",
    ):  # fmt: skip
        value = quantization.get(key)
        if value not in (None, False):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def not_weights(tensor: str, dtype: str) -> InvalidArgument:
    """The error about a tensor whose dtype is not one of ``WEIGHT_DTYPES``."""
    return InvalidArgument("weights", f"{tensor}, of dtype {dtype}", _UNQUANTIZED)


def listed(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def in_pieces(count: int, size: int) -> Iterator[slice]:
    """All of ``count`` rows of ``size`` numbers, a million numbers at a time."""
    step = max(1, 2**20 // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class _SmallFile:
    """A small safetensors file that stays mapped while one of its tensors is known.

    To map a file and to read its header takes longer than to read one of its tensors.
    """

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open

        self._file, self._state = file, self._now(file)
        self.opened: Any = safe_open(str(file), "pt")

    def is_current(self) -> bool:
        """Whether the file is the one that was mapped."""
        return self._now(self._file) == self._state

    @staticmethod
    def _now(file: Path) -> tuple[int, int, int]:
        state = file.stat()
        return state.st_ino, state.st_size, state.st_mtime_ns


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, read on demand."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    small: _SmallFile | None = field(default=None, compare=False, repr=False)

    def read_columns(self, columns: slice) -> npt.NDArray[Any]:
        """Some columns of a matrix. Errors: as of :meth:`read`."""
        return np.ascontiguousarray(self.read((slice(None), columns)).numpy())

    def read(self, rows: slice | tuple[slice, ...] = slice(None)) -> torch.Tensor:
        """Some of its rows, mapped: a caller that keeps them should copy them.

        Each call maps a large file anew, so that its pages leave memory together with the rows.

        Raises:
            ModelNotFound: the file has been damaged since its header was read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            if self.small is not None and self.small.is_current():
                return self._read(self.small.opened, rows)
            with safe_open(str(self.file), "pt") as opened:
                return self._read(opened, rows)
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(f"{self.file} is damaged: {error}") from error

    def _read(self, opened: Any, rows: slice | tuple[slice, ...]) -> torch.Tensor:
        found: torch.Tensor = (
            opened.get_tensor(self.name) if rows == slice(None)
            else opened.get_slice(self.name)[rows]
        )  # fmt: skip
        return found


def stored_tensors(folder: Path, codes: Collection[str] = ()) -> dict[str, StoredTensor]:
    """All tensors of model.safetensors, or of the shards that its index names; none is read yet.

    Args:
        codes: further dtypes to accept beside ``WEIGHT_DTYPES``, for codes.

    Raises:
        ModelNotFound: a file is missing or damaged, or the shards are not what the index says.
        InvalidArgument: a tensor of a dtype that is not one of ``WEIGHT_DTYPES``.
    """
    from safetensors import safe_open

    stored = stored_dtypes(folder)
    for file, dtypes in stored.items():
        for name, dtype in sorted(dtypes.items()):
            if dtype not in (*WEIGHT_DTYPES, *codes):
                raise not_weights(f"{name} in {str(file)!r}", dtype)
    tensors: dict[str, StoredTensor] = {}
    is_small = sum(file.stat().st_size for file in stored) <= SMALL_BYTES
    for file, dtypes in stored.items():
        small = _SmallFile(file) if is_small else None
        with safe_open(str(file), "pt") as opened:
            for name, dtype in dtypes.items():
                shape = tuple(opened.get_slice(name).get_shape())
                tensors[name] = StoredTensor(name, file, shape, getattr(torch, dtype), small)
    return tensors


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """As :func:`stored_tensors`, but mapped: each tensor takes memory once it is used."""
    return {name: tensor.read() for name, tensor in stored_tensors(folder).items()}


def count_weights(folder: Path) -> int:
    """Numbers in the safetensors files of a folder; only headers are read. Errors: as below."""
    from safetensors import safe_open

    count = 0
    for file in stored_dtypes(folder):
        with safe_open(str(file), "pt") as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return count


def stored_dtypes(folder: Path) -> dict[Path, dict[str, str]]:
    """Names and dtypes of all tensors, by safetensors file; only the files' headers are read.

    Raises:
        ModelNotFound: a file is missing or damaged, or the shards are not what the index says.
    """
    index = folder / INDEX
    if not index.is_file():
        return {folder / "model.safetensors": _header(folder / "model.safetensors")}
    if (folder / "model.safetensors").is_file():
        raise ModelNotFound(
            f"model folder {str(folder)!r} has both model.safetensors and {INDEX}: remove the one "
            "that does not belong there"
        )
    places = read_index(index)
    headers = {}
    for name in sorted(set(places.values())):
        file = folder / name
        headers[file] = header = _header(file)
        promised = {tensor for tensor, place in places.items() if place == name}
        for wrong, what in (
            (promised - header.keys(), "lacks tensors that the index puts there"),
            (header.keys() - promised, "holds tensors that the index does not put there"),
        ):
            if wrong:
                raise ModelNotFound(
                    f"{file} {what}: {listed(wrong)}; {INDEX} and the shards must agree"
                )
    return headers


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, from a weight index."""
    try:
        places = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(place, str) for place in places.values()):
            raise TypeError("weight_map must give each tensor the name of a file")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelNotFound(f"{str(index)!r} is not a weight index: {error}") from error
    return dict(places)


def _header(file: Path) -> dict[str, str]:
    """Names and dtypes of the tensors in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ModelNotFound(f"model folder {str(file.parent)!r} has no {file.name}")
    try:
        with safe_open(str(file), "pt") as opened:
            dtypes = {name: str(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelNotFound(f"{file} is damaged: {error}") from error
    return {name: _DTYPES.get(dtype, dtype) for name, dtype in dtypes.items()}
