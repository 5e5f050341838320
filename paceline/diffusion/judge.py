"""The model that judges the schedule `apd`'s proposals: it reads in order and has a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner, Segment

DEMO = {"target": TARGET_DIR, "drafter": DRAFTER_DIR}


class JudgeModel:
    """Logits of proposed tokens, all from one forward.

    The cache keeps what consecutive calls have in common; a call may have any text.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._sequence, self._held = runner.new_sequence(), list[int]()

    def logits(self, text: Sequence[int], proposed: Sequence[int]) -> torch.Tensor:
        """Of each proposed token's position, given ``text`` and the proposed tokens before it.

        # [len(proposed), vocab_size]

        Raises:
            InvalidArgument: the text is longer than the judge's context.
        """
        tokens = [*text, *proposed[:-1]]
        longest = self.runner.context_length
        if len(tokens) > longest:
            raise InvalidArgument("max_tokens", len(tokens), f"a text of at most {longest} tokens")
        kept = 0
        while kept < min(len(self._held), len(text) - 1) and self._held[kept] == tokens[kept]:
            kept += 1
        if kept < len(self._held):
            self.runner.truncate(self._sequence, kept)
        new = np.asarray(tokens[kept:], np.int64)
        result = self.runner.forward([Segment(self._sequence, new, logits="all")])
        self.runner.commit(self._sequence, range(len(new)))
        self._held = tokens
        return result.logits[len(text) - 1 - kept :].float().cpu()


@lru_cache(maxsize=4)
def load_judge(name: str) -> JudgeModel:
    """A judge: `target` or `drafter` of the demo pair, or a folder or name of a model.

    Raises:
        ModelNotFound, InvalidArgument: as :func:`paceline.loading.load_runner`.
    """
    from paceline.loading import load_runner

    return JudgeModel(load_runner(DEMO.get(name, name)))
