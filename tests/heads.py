"""Untrained draft heads: their drafts are bad, and change no token."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.models.heads import HEADS, HeadLibrary
from paceline.models.heads.base import Head, HeadTarget
from paceline.models.llama import LlamaRunner


def untrained(
    kind: str, target: HeadTarget, seed: int = 0, *, noise: float = 0.02, **options: Any
) -> Head:
    """A head with random weights; little ``noise`` keeps it near the target's states."""
    torch.manual_seed(seed)
    head = HEADS[kind].made(target, HEADS[kind].Options(**options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16())  # as a saved head has it
    return head


def save_untrained(folder: Path, target_folder: Path, seed: int = 0) -> None:
    """One head of each kind, near the target's states, and a judge, with random weights."""
    target = HeadTarget.from_folder(target_folder)
    for kind in HEADS:
        untrained(kind, target, seed).save(folder / kind)
    _save_random_judge(folder, target)


def _save_random_judge(folder: Path, target: HeadTarget) -> None:
    save_judge(folder, target.config.vocab_size, torch.randn(target.config.hidden_size))


def save_judge(folder: Path, vocab_size: int, weight: torch.Tensor, bias: float = 0.0) -> None:
    """The head of the rule `judge`.

    Args:
        weight: # [hidden_size]
    """
    metadata = {
        "kind": "judge", "vocab_size": str(vocab_size), "target_hidden_size": str(len(weight)),
        "drafter_hidden_size": "0",
    }  # fmt: skip
    values = {"weight": weight, "bias": torch.tensor([bias])}
    save_file(values, str(folder / "judge.safetensors"), metadata)


@cache
def untrained_heads(target_folder: Path) -> Path:
    """For a target; made once, removed at exit."""
    folder = _folder_until_exit()
    save_untrained(folder, target_folder)
    return folder


@cache
def untrained_judge(target_folder: Path) -> Path:
    """For a target; made once, removed at exit."""
    folder = _folder_until_exit()
    _save_random_judge(folder, HeadTarget.from_folder(target_folder))
    return folder


def _folder_until_exit() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="paceline-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class UntrainedHeads(HeadLibrary):
    """Heads with random weights for a loaded target, made when a method needs them.

    Args:
        target: its model folder.
    """

    def __init__(self, target: Path, runner: LlamaRunner) -> None:
        super().__init__(target / "heads", target, runner)
        self._made: dict[str, Head] = {}
        self._of = target, runner

    @cached_property
    def _parts(self) -> HeadTarget:
        """What heads read of the target; most methods need none."""
        return HeadTarget.of_runner(*self._of)

    def has(self, kind: str) -> bool:
        return kind in HEADS

    def load(self, kind: str) -> Head:
        if kind not in self._made:
            (self._made[kind],) = self.copies(kind, 1)
        return self._made[kind]

    def copies(self, kind: str, count: int) -> list[Head]:
        """As many of one head as there are places where it drafts; they share the target's part."""
        parts = self._parts
        head = untrained(kind, parts).to(parts.embedding.dtype).requires_grad_(False).eval()
        made = [head, *(copy.deepcopy(head, {id(parts): parts}) for _ in range(count - 1))]
        for each in made:
            each.prepare()
        return made
