"""The numerics fingerprint: what decides the last bit of a model's logits, as a value.

Two runners with equal fingerprints give the same tokens for the same request, so a session may move
from one to the other, and one can verify what the other has written. A fingerprint has four parts:

*numerics class*: in which order sums are made. ``portable`` has the same bits on any processor,
with whatever variant of the kernels; ``amx`` (matrix tiles) and ``bf16dot`` (dot products of
bfloat16 numbers) are faster and sum otherwise, each in its own way. Where the kernels do not
compute, the class names what does: ``torch-2.13.0-avx512`` for plain torch, with ``-rows`` where
each row is computed by itself and ``-triton`` with the kernels for CUDA devices, and
``torch-2.13.0-avx512-transformers-5.19.0-packed`` for the general path. Those classes promise no
more than their libraries do, which is the same bits on the same kind of machine with the same
number of threads.

*dtype*: of weights, activations and KV entries.

*kernel version*: :data:`paceline.models.kernels.NUMERICS_VERSION`.

*weights*: a digest of all tensors as the runner computes with them, that is in its dtype, whatever
their layout in memory, with names and shapes; of the rope table; and of the numbers that decide
bits beside them (head counts, epsilon, sliding windows; on the general path the whole
configuration). With an adapter it is a digest of that digest and of what the adapter adds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidArgument, NumericsMismatch
from paceline.memory import give_back

if TYPE_CHECKING:
    import torch

NUMERICS = ("fastest", "portable")
"""What a target may be asked for: its processor's fastest class, or `portable`."""
PORTABLE = "portable"
MISMATCH = ("refuse", "allow")
"""What happens to a session where no replica has its fingerprint."""

DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 24
_NUM_THREADS = min(8, os.cpu_count() or 1)
_TEXT = re.compile(
    r"(?P<numerics_class>[a-z][a-z0-9._-]*)-(?P<dtype>[a-z0-9_]+)-k(?P<kernel_version>[0-9]{1,9})"
    rf"-(?P<weights>[0-9a-f]{{{2 * DIGEST_BYTES}}})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A target's numerics. As text: ``portable-float32-k1-3f2a9c...`` (32 hexadecimal digits).

    Attributes:
        numerics_class, dtype, kernel_version, weights: see the module.
    """

    numerics_class: str
    dtype: str
    kernel_version: int
    weights: str

    def __str__(self) -> str:
        return f"{self.numerics_class}-{self.dtype}-k{self.kernel_version}-{self.weights}"

    @staticmethod
    def parse(text: str, field: str = "fingerprint") -> Fingerprint:
        """The fingerprint that ``text`` is.

        Raises:
            InvalidArgument: it is none; names ``field``.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidArgument(field, text[:80], "CLASS-DTYPE-kVERSION-DIGEST")
        parts: dict[str, Any] = match.groupdict()
        return Fingerprint(**{**parts, "kernel_version": int(parts["kernel_version"])})

    def with_adapter(self, digest: str) -> Fingerprint:
        """Of the same target with an adapter.

        Args:
            digest: of what the adapter adds.
        """
        both = f"{self.weights} {digest}".encode()
        weights = hashlib.blake2b(both, digest_size=DIGEST_BYTES).hexdigest()
        return replace(self, weights=weights)

    def differences(self, other: Fingerprint) -> list[str]:
        """Which parts differ, each as ``the dtype (float32, here bfloat16)``."""
        return [
            f"the {f.name.replace('_', ' ')} ({getattr(self, f.name)}, here "
            f"{getattr(other, f.name)})"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def mismatch(what: str, expected: Fingerprint, here: Fingerprint, advice: str) -> NumericsMismatch:
    """The error for tokens of other numerics than those here.

    Args:
        what: begins the message, up to the expected fingerprint.
        advice: what can be done; ends the message.
    """
    return NumericsMismatch(
        f"{what} numerics {expected}, here are {here}: they differ in "
        f"{' and '.join(expected.differences(here))}; {advice}",
        str(expected),
        str(here),
    )


def check_mismatch(value: str, field: str = "numerics_mismatch") -> str:
    """``value``; InvalidArgument unless it is one of :data:`MISMATCH`."""
    if value not in MISMATCH:
        raise InvalidArgument(field, value, f"one of {', '.join(MISMATCH)}")
    return value


def check_numerics(numerics: str) -> None:
    """Raise InvalidArgument unless ``numerics`` is one of :data:`NUMERICS`."""
    if numerics not in NUMERICS:
        raise InvalidArgument("numerics", numerics, f"one of {', '.join(NUMERICS)}")


def refuse_portable(numerics: str, why: str) -> None:
    """Raise InvalidArgument where portable numerics are wanted that cannot be given."""
    check_numerics(numerics)
    if numerics == PORTABLE:
        raise InvalidArgument(
            "numerics", numerics,
            f"'fastest': {why}. Portable numerics come from the C kernels alone: Llama, Mistral, "
            "Qwen2 and Qwen3 models on a CPU, in float32 or bfloat16",
        )  # fmt: skip


def torch_class(device: torch.device, *more: str) -> str:
    """The numerics class of what torch computes on a device.

    Args:
        more: what else decides bits; ends the name.
    """
    import torch

    version = torch.__version__.partition("+")[0]
    if device.type == "cuda":
        parts = [f"cuda{torch.version.cuda}", torch.cuda.get_device_name(device)]
    else:
        parts = [torch.backends.cpu.get_cpu_capability()]
    return class_name("torch", version, *parts, *more)


def class_name(*parts: str) -> str:
    """Parts of a numerics class as one word that a fingerprint can carry."""
    return "-".join(re.sub(r"[^a-z0-9._-]+", "_", part.lower()) for part in parts)


# --- the digest of the weights --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class InParts:
    """A tensor that is made while it is read, some rows at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Iterable[torch.Tensor]


def digest_tensors(
    tensors: Iterable[tuple[str, torch.Tensor | InParts]], numbers: Mapping[str, Any]
) -> str:
    """A digest of named tensors, in the order given, and of JSON values.

    BLAKE2b over pieces of 16 MB on several threads, and over their digests: 1 GB takes about a
    second on one core.
    """
    whole = hashlib.blake2b(json.dumps(numbers, sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    reading: deque[Future[bytes]] = deque()
    num_bytes = 0
    with _pool() as pool:
        for name, tensor in tensors:
            header = json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode()
            reading.append(pool.submit(bytes, header))
            if isinstance(tensor, InParts):
                reading.extend(_digest_parts(tensor.parts, pool))
                continue
            data = _bytes_of(tensor)
            num_bytes += len(data)
            for start in range(0, len(data), _CHUNK_BYTES):
                reading.append(pool.submit(_digest, data[start : start + _CHUNK_BYTES]))
                while len(reading) > _NUM_THREADS + 1:
                    whole.update(reading.popleft().result())
        for digest in reading:
            whole.update(digest.result())
    if num_bytes > _CHUNK_BYTES:  # else it would take longer than the digest
        give_back()
    return whole.hexdigest()


def _digest_parts(
    parts: Iterable[torch.Tensor], pool: ThreadPoolExecutor
) -> Iterator[Future[bytes]]:
    """Digests of a tensor's pieces of 16 MB; two of its parts are in memory at a time."""
    piece, left = hashlib.blake2b(), _CHUNK_BYTES
    reading: Future[None] | None = None
    for part in parts:
        data = _bytes_of(part)
        while data:
            if reading is not None:
                reading.result()
            reading = pool.submit(piece.update, data[:left])
            data, left = data[left:], left - min(left, len(data))
            if not left:
                reading.result()
                yield pool.submit(piece.digest)
                piece, left = hashlib.blake2b(), _CHUNK_BYTES
                give_back()  # glibc would keep what the parts were made in: some 100 MB by the end
    if reading is not None and left < _CHUNK_BYTES:
        reading.result()
        yield pool.submit(piece.digest)
    give_back()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def digest_files(files: Iterable[Path]) -> str:
    """A digest of the names and the bytes of files, for weights that another program loads."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with _pool() as pool:
        for file in files:
            starts = range(0, file.stat().st_size, _CHUNK_BYTES)
            whole.update(json.dumps([file.name, len(starts)]).encode())
            for piece in pool.map(lambda start, file=file: _digest(_read(file, start)), starts):
                whole.update(piece)
    return whole.hexdigest()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, "digest")


def _digest(data: memoryview | bytearray | bytes) -> bytes:
    return hashlib.blake2b(data).digest()  # without the interpreter's lock


def _read(file: Path, start: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(_CHUNK_BYTES)
