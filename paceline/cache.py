"""The user's cache folder: compiled kernels, models, and what runs on this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """``name`` in Paceline's cache: below PACELINE_CACHE_DIR, XDG_CACHE_HOME or ``~/.cache``."""
    root = os.environ.get("PACELINE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "paceline" / name


class locked:
    """One process works, the others wait for it; without locks (some file systems) all work."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")

    def __enter__(self) -> None:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()
