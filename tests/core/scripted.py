"""A target whose next token is any Python function of the tokens before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.models.base import ForwardResult, Segment
from paceline.numerics import Fingerprint
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Need

NextToken = Callable[[list[int]], int]


@dataclass(eq=False)
class ScriptedSequence:
    token_ids: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # tokens down to each pending entry

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.paths)


class ScriptedRunner:
    """A model runner over a function; the token that it gives has the logit ``margin``.

    At temperature 1 a margin of 0 makes all tokens equally likely, whatever came before.
    """

    batch_invariant = True
    provides = frozenset({Need.TREE_LOGITS})
    context_length = kv_capacity = num_free = 4096
    fingerprint = Fingerprint(
        numerics_class="scripted", dtype="float32", kernel_version=1, weights=32 * "0"
    )

    def __init__(self, function: NextToken, vocab_size: int, margin: float = 10.0) -> None:
        self.function, self.vocab_size, self.margin = function, vocab_size, margin

    def new_sequence(self) -> ScriptedSequence:
        return ScriptedSequence()

    def free(self, sequence: ScriptedSequence) -> None:  # type: ignore[override]
        sequence.token_ids.clear()

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        rows: list[torch.Tensor] = []
        offsets, ends = [0], [0]
        for segment in segments:
            sequence = segment.sequence
            assert isinstance(sequence, ScriptedSequence)
            first, count = sequence.num_pending, len(segment.token_ids)
            parents = segment.parent_indices
            chain = range(first - 1, first + count - 1)
            for token, parent in zip(
                segment.token_ids.tolist(), chain if parents is None else parents, strict=True
            ):
                path = [*(sequence.paths[parent] if parent >= 0 else []), token]
                sequence.paths.append(path)
                if segment.logits != "none":
                    row = torch.zeros(self.vocab_size)
                    row[self.function(sequence.token_ids + path)] = self.margin
                    rows.append(row)
            offsets.append(len(rows))
            ends.append(ends[-1] + count)
        packed = torch.stack(rows) if rows else torch.empty((0, self.vocab_size))
        return ForwardResult(packed, tuple(offsets), {}, tuple(ends))

    def commit(self, sequence: ScriptedSequence, pending: Sequence[int]) -> None:  # type: ignore[override]
        if len(pending):
            sequence.token_ids += sequence.paths[pending[-1]]
        sequence.paths.clear()

    def truncate(self, sequence: ScriptedSequence, length: int) -> None:  # type: ignore[override]
        del sequence.token_ids[length:]
        sequence.paths.clear()


def scripted_engine(
    function: NextToken, vocab_size: int, *, margin: float = 10.0, eos: Sequence[int] = ()
) -> Engine:
    runner = ScriptedRunner(function, vocab_size, margin)
    limits = EngineLimits(prefill_chunk=4096)
    return Engine(ModelTarget(runner), eos_token_ids=eos, limits=limits)  # type: ignore[arg-type]


def run(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    config: SpeculationConfig,
    **options: Any,
) -> tuple[Session, list[RoundEvent]]:
    """Generate for one prompt; the session, and every round of it.

    Args:
        options: of :meth:`Engine.submit`.
    """
    events: list[RoundEvent] = []
    session = engine.submit(Request(prompt, params, config, **options), on_event=events.append)
    while engine.has_work:
        engine.step()
    assert not session.stats.drafter_lost
    assert session.error is None
    for drafter in engine.drafters.values():
        assert not getattr(drafter, "_states", None)
    return session, events


def chaotic(vocab_size: int) -> NextToken:
    """Every token before a position decides: a wrong guess says nothing about what follows."""

    def function(token_ids: list[int]) -> int:
        digest = hashlib.sha256(repr(token_ids).encode()).digest()
        return int.from_bytes(digest[:8], "big") % vocab_size

    return function


def spoken(function: NextToken, prompt: Sequence[int], count: int) -> list[int]:
    """What AR generates."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(function(ids))
    return ids[len(prompt) :]
