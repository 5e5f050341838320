"""Packed weights on disk: the first load of a model writes them, later loads map them.

Processes that map the same file share its pages, and a page that no forward touches takes no
memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.cache import cache_folder, locked
from paceline.memory import give_back
from paceline.models.packing import Packing, Weight

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the layouts in :mod:`paceline.models.packing`, and of the file."""
LEAST_WEIGHTS = 10_000_000
"""A model with fewer weights stays in memory: packing it takes no noticeable time."""
_ALIGNMENT = 64
_CHUNK = 1 << 20


def identity(files: list[Path], *layout: object) -> str:
    """A key of all that a model's packed weights depend on: its current files, and the layout."""
    digest = hashlib.sha256(f"{VERSION} {layout}".encode())
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


class PackedWeights:
    """One model's packed weights. Without a file (``path`` None) they stay in memory.

    Attributes:
        is_made: whether the file exists, so that nothing needs packing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._scratch: Path | None = None
        self._checksum = 0  # of what the scratch file has so far
        self.is_made = path is not None and self._read_index(path)

    @staticmethod
    @contextmanager
    def of(key: str, num_weights: int) -> Iterator[PackedWeights]:
        """The packed weights of a model; leaving the block writes newly packed ones to disk.

        With a small model, a full disk, or `PACELINE_PACKED=off` they stay in memory.
        """
        path: Path | None = None
        if num_weights >= LEAST_WEIGHTS and os.environ.get("PACELINE_PACKED") != "off":
            path = cache_folder("packed") / f"{key}.bin"
        weights = PackedWeights(path)
        with ExitStack() as stack:
            if path is not None and not weights.is_made:
                # One process packs and the others wait, so that all of them map one file.
                with suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(path.with_suffix(".lock")))
                weights = PackedWeights(path)
                if not weights.is_made and path.is_file():
                    logger.warning("packed weights in %s are damaged: packing them again", path)
            try:
                yield weights
                weights._keep()
            finally:
                if weights._scratch is not None:
                    weights._scratch.unlink(missing_ok=True)

    def weight(self, name: str, make: Callable[[], Weight]) -> Weight:
        """A packed weight; packs it now unless the file has it."""
        about: dict[str, Any] = {}

        def data() -> torch.Tensor:
            weight = make()
            about["weight"] = [weight.num_outputs, weight.num_inputs, int(weight.packing)]
            return weight.data

        found = self.tensor(name, data, about)
        outputs, inputs, packing = about["weight"]
        return Weight(found, outputs, inputs, Packing(packing))

    def tensor(
        self, name: str, make: Callable[[], torch.Tensor], about: dict[str, Any] | None = None
    ) -> torch.Tensor:
        """As :meth:`weight`, for any tensor; ``about`` is kept with it, or filled."""
        entry = self._entries.get(name)
        if entry is not None:
            if about is not None:
                about |= entry["about"]
            assert self._path is not None
            return _mapped(self._path, entry)
        made = make().contiguous()
        if self._path is None:
            return made
        try:
            entry = self._append(made)
        except OSError as error:
            logger.info("packed weights stay in memory: %s", error)
            self._path = None
            return made
        self._entries[name] = entry | {"about": about or {}}
        assert self._scratch is not None
        del made
        give_back()  # or what packing freed would add up from one tensor to the next
        return _mapped(self._scratch, entry)

    def _read_index(self, path: Path) -> bool:
        with suppress(OSError, ValueError, KeyError):
            index = json.loads(path.with_suffix(".json").read_text("utf-8"))
            entries = index["entries"]
            if _checksum_of(entries, _checksum_of_file(path)) == index["checksum"]:
                self._entries = entries
                return True
        return False

    def _append(self, tensor: torch.Tensor) -> dict[str, Any]:
        assert self._path is not None
        if self._scratch is None:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".making-")
            os.close(handle)
            self._scratch = Path(name)
        with self._scratch.open("ab") as file:
            padding = bytes(-file.tell() % _ALIGNMENT)
            file.write(padding)
            offset = file.tell()
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            file.write(raw.data)
            self._checksum = zlib.crc32(raw.data, zlib.crc32(padding, self._checksum))
        return {
            "offset": offset, "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }  # fmt: skip

    def _keep(self) -> None:
        """Make the scratch file the model's file; another process may have done the same."""
        if self._path is None or self._scratch is None:
            return
        index = self._path.with_suffix(".json")
        checksum = _checksum_of(self._entries, self._checksum)
        text = json.dumps({"checksum": checksum, "entries": self._entries})
        with suppress(OSError):
            os.replace(self._scratch, self._path)
            written = index.with_suffix(f".{os.getpid()}")
            written.write_text(text, "utf-8")
            os.replace(written, index)


def _checksum_of(entries: dict[str, Any], checksum: int) -> int:
    return zlib.crc32(json.dumps(entries).encode(), checksum)


def _checksum_of_file(path: Path) -> int:
    """Checksum by reading, not mapping, so that pages not yet used take no memory."""
    checksum, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _mapped(path: Path, entry: dict[str, Any]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    count = int(np.prod(entry["shape"])) * dtype.itemsize
    # Copy on write, though nothing writes: torch warns about read-only memory.
    raw = np.memmap(path, np.uint8, "c", entry["offset"], (count,))
    return torch.from_numpy(raw).view(dtype).view(entry["shape"])
