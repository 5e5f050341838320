"""The header of a GGUF file: its metadata and the kinds of its tensors, without llama.cpp.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import ModelNotFound

# Numbers of the format's value types -> struct's codes.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of its model.

    Attributes:
        metadata: keys such as ``general.architecture``, and their values.
        parameters: number of weights by the type that they are stored in, for example ``Q4_1``.
    """

    metadata: dict[str, Any]
    parameters: dict[str, int]

    @property
    def architecture(self) -> str:
        """For example ``llama``."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def context_length(self) -> int:
        """Tokens; 0 where the file does not say."""
        return int(self.metadata.get(f"{self.architecture}.context_length", 0))


def read_header(path: Path) -> GgufHeader:
    """Read the header; of the weights nothing.

    Raises:
        ModelNotFound: the file is missing, is not GGUF, or is cut off.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelNotFound(f"cannot read {str(path)!r} as a GGUF file: {error}") from error


def _read(file: BinaryIO) -> GgufHeader:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    _, num_tensors, num_values = _unpack(file, "IQQ")  # the first is the format's version
    metadata = {}
    for _ in range(num_values):
        key = _string(file)
        metadata[key] = _value(file, _unpack(file, "I")[0])
    parameters: Counter[str] = Counter()
    for _ in range(num_tensors):
        _string(file)
        (num_dimensions,) = _unpack(file, "I")
        shape = _unpack(file, f"{num_dimensions}Q")
        kind, _ = _unpack(file, "IQ")
        parameters[_TENSOR_TYPES.get(kind, f"type {kind}")] += math.prod(shape)
    return GgufHeader(metadata, dict(parameters))


def _unpack(file: BinaryIO, codes: str) -> tuple[Any, ...]:
    layout = f"<{codes}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, length = _unpack(file, "IQ")
        if inner in _NUMBERS:
            return list(_unpack(file, f"{length}{_NUMBERS[inner]}"))
        return [_value(file, inner) for _ in range(length)]
    return _unpack(file, _NUMBERS[kind])[0]
