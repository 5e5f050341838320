"""The header of a GGUF file: its metadata, and where its tensors are.

ggml's docs/gguf.md describes the format. A header has some hundred thousand small strings. The
package `gguf` makes three arrays of each, which takes seconds and 200 MB, so this module reads it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.quants import QUANT_TYPES

_FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
_BLOCKS = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
}  # fmt: skip
TYPES = (*_FLOATS.values(), *QUANT_TYPES)
"""The types of tensors that Paceline reads."""

_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in the file.

    Attributes:
        type: the type's name; one of ``TYPES``, or another that Paceline does not read.
        shape: outputs first, as numpy has it.
        offset: bytes from the beginning of the file.
        size: in bytes; 0 for a type that Paceline does not read.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """The header of a file.

    Attributes:
        values: metadata by key.
        tensors: by name.

    Raises:
        ModelNotFound: there is no such file, it is not GGUF, or it ends too early.
        InvalidArgument: a version or a byte order that Paceline does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelNotFound(f"GGUF file {str(path)!r} does not exist")
        self._size, self._at = path.stat().st_size, 0
        if self._size < 4:
            raise ModelNotFound(f"{str(path)!r} is not GGUF: it has {self._size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._data = data
            try:
                self._read()
            finally:
                del self._data

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, ``default`` where there is none."""
        return self.values.get(key, default)

    def value(self, key: str) -> Any:
        """The value of a key; ModelNotFound where there is none."""
        if key not in self.values:
            raise ModelNotFound(f"{str(self.path)!r} lacks the key {key}")
        return self.values[key]

    # --- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise self._damaged(f"it begins with {magic!r}, not with b'GGUF'")
        self._at = 4
        version = self._number("<I", "the version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise InvalidArgument("byte order", "of another machine", "a little-endian GGUF file")
        if version > 255:
            raise self._damaged(f"its version is {version:,}")
        if version not in (2, 3):
            raise InvalidArgument("GGUF version", version, "2 or 3")
        num_tensors, num_values = self._number("<Q", "counts"), self._number("<Q", "counts")
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("a key")
            self.values[key] = self._value(self._number("<I", key), key)
        places = [self._tensor() for _ in range(num_tensors)]
        step = self.values.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise InvalidArgument("general.alignment", step, "a positive integer")
        start = -(-self._at // step) * step
        self.tensors: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in places:
            self.tensors[name] = self._place(name, shape, kind, start + offset)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorPlace:
        known = _FLOATS.get(kind) or _BLOCKS.get(kind)
        if known is None:
            return TensorPlace(name, _type_name(kind), shape, offset, 0)
        count = 1
        for length in shape:
            count *= length
        if known in QUANT_TYPES:
            layout = QUANT_TYPES[known]
            if shape[-1] % layout.inputs:
                raise self._damaged(f"{name} has {shape[-1]} inputs, no blocks of {layout.inputs}")
            size = count // layout.inputs * layout.size
        else:
            size = count * (4 if known == "F32" else 2)
        if offset + size > self._size:
            raise self._damaged(
                f"{name} ends at byte {offset + size:,}, but the file has {self._size:,}"
            )
        return TensorPlace(name, known, shape, offset, size)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("the name of a tensor")
        num_dimensions = self._number("<I", name)
        if not 1 <= num_dimensions <= 4:
            raise self._damaged(f"{name} has {num_dimensions} dimensions, expected 1 to 4")
        shape = [self._number("<Q", name) for _ in range(num_dimensions)]
        kind, offset = self._number("<I", name), self._number("<Q", name)
        return name, tuple(reversed(shape)), kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], key)
        if kind != _ARRAY:
            raise self._damaged(f"the value of {key} has the type {kind}, which does not exist")
        inner, count = self._number("<I", key), self._number("<Q", key)
        if inner in _NUMBERS:
            form = _NUMBERS[inner][1]
            raw = self._bytes(count * struct.calcsize("<" + form), key)
            return list(struct.unpack(f"<{count}{form}", raw))
        if inner == _STRING and count <= self._size:
            return [self._string(key) for _ in range(count)]
        raise self._damaged(f"{key} is a list of {count} values of type {inner}")

    def _string(self, what: str) -> str:
        return self._bytes(self._number("<Q", what), what).decode("utf-8", "replace")

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._damaged(f"{what} ends at byte {end:,}, but the file has {self._size:,}")
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _damaged(self, why: str) -> ModelNotFound:
        return ModelNotFound(f"{str(self.path)!r} is truncated, damaged or not GGUF: {why}")


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"{kind}, which has no name"
