"""Draft heads that nobody trained: drafts of theirs are bad, and cost no token."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from paceline.demo import TARGET_DIR
from paceline.models.heads import HEADS
from paceline.models.heads.base import Target


def save_untrained(folder: Path, target_folder: Path, seed: int = 0) -> None:
    """One head of each kind with random weights, small enough to stay near the target's states."""
    target = Target.from_folder(target_folder)
    for kind, head_class in HEADS.items():
        torch.manual_seed(seed)
        head = head_class(target, head_class.Options())
        with torch.no_grad():
            for parameter in head.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        head.save(folder / kind)


@cache
def untrained_demo_heads() -> Path:
    """For the demo target; made once, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_untrained(folder, TARGET_DIR)
    return folder
