"""The user's cache folder: compiled kernels, models, and records of what runs on this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Folder ``name`` of Paceline's cache, below PACELINE_CACHE_DIR, XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("PACELINE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "paceline" / name


class locked:
    """Lock a file: one process enters, the others wait.

    On file systems without locks, all of them enter; the block gets whether it is alone.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")

    def __enter__(self) -> bool:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX)
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self._file.close()
