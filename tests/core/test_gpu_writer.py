"""What a GPU writes in many conversations at once is what the target says in each.

``make test-triton`` runs this in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.models.base import Segment
from paceline.models.cuda_ops import CudaOps
from paceline.models.heads import layer
from paceline.models.heads.base import HeadTarget
from paceline.models.llama import LlamaRunner
from paceline.train import gpu_writer
from paceline.train.conversations import Conversation, Turn
from paceline.train.gpu_writer import GpuWriter
from tests.core.runners import load_runner_without_kernels
from tests.modelzoo import make_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="no Triton here: `make test-triton` runs these tests"
    ),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="neither a CUDA device here nor TRITON_INTERPRET=1",
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTH, ANSWER = 32, 5


class Script:
    """Conversations of two greedy answers, the second after three further tokens.

    Args:
        end: the token that ends a turn.
    """

    room = 16

    def __init__(self, end: int) -> None:
        self.end, self.begun, self.turns = end, 0, list[tuple[list[int], list[int]]]()

    def begin(self) -> Conversation:
        self.begun += 1
        prompt = [(7 * self.begun + i) % 60 + 1 for i in range(1 + self.begun % 5)]
        return Conversation("", "own", prompt, turns=2, answering=True, max_tokens=ANSWER)

    def hear(self, talk: Conversation, written: Sequence[int]) -> Turn:
        self.turns.append((list(talk.tokens), list(written)))
        talk.positions += range(len(talk.tokens), len(talk.tokens) + len(written))
        talk.tokens += written
        talk.turns -= 1
        if not talk.turns:
            return "done"
        talk.tokens += [3, 2, 1]
        return "more"


def greedy(runner: LlamaRunner, prompt: Sequence[int], count: int, end: int) -> list[int]:
    """What the target says after a prompt, up to ``end`` or ``count`` tokens."""
    sequence, written, new = runner.new_sequence(), list[int](), list(prompt)
    while len(written) < count and end not in written:
        result = runner.forward([Segment(sequence, torch.tensor(new).numpy())])
        runner.commit(sequence, range(len(new)))
        new = [int(result.logits[-1].argmax())]
        written += new
    return written


def test_every_turn_is_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of several lengths in slots that are used again, two of them ended by a token."""
    folder = make_model("llama", tmp_path)
    runner = load_runner_without_kernels(folder)
    target = HeadTarget.from_folder(folder, device=DEVICE)
    monkeypatch.setattr(gpu_writer, "STEPS", 4)  # the interpreter takes a second for each
    if INTERPRETED:
        monkeypatch.setattr(layer, "layer_ops", lambda *_, **__: CudaOps(by_row=False))
    first = greedy(runner, Script(-1).begin().tokens, ANSWER, -1)
    script = Script(first[2])
    writer = GpuWriter(
        target, script, slots=2, length=LENGTH,  # type: ignore[arg-type]
        capture=(lambda step: step) if INTERPRETED else None,
    )  # fmt: skip
    talks = writer.write()
    done = [next(talks) for _ in range(3)]
    assert all(len(talk.positions) == len(set(talk.positions)) > 2 for talk in done)
    assert len(script.turns) >= 6
    for prompt, written in script.turns:
        assert written == greedy(runner, prompt, ANSWER, script.end), prompt
    assert any(written[-1] == script.end for _, written in script.turns)
    assert any(len(written) == ANSWER for _, written in script.turns)
