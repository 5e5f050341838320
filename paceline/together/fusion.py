"""Generative Fusion Decoding: models with different vocabularies write one text, byte by byte.

Hsu et al. 2024 (arXiv 2405.14259) fuse models over what all vocabularies have in common, the bytes
that their tokens spell. The probability that a model gives to a beginning of a text is the sum over
all sequences of tokens that spell it, the last of which may reach beyond it:

    P(bytes) = sum of p(t_1) p(t_2 | t_1) .. p(t_m | ..) over spellings t_1 .. t_m,

where only the last token may end behind the last byte. The ratio of two beginnings is the
probability of the next byte, and :func:`fuse` takes the byte with the highest weighted mean of the
models' log-probabilities. With vocabularies whose tokens are single bytes, that is ordinary
log-linear (shallow) fusion.

There are exponentially many spellings. A model keeps the ``beam`` most likely ones that end at a
boundary between tokens, and forgets the others' mass; :attr:`ByteModel.lost` says how much it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument
from paceline.exact_math import exp64, log64, sum64
from paceline.models.base import ModelRunner, Segment
from paceline.sampling import Probs
from paceline.together.reader import check_prompt
from paceline.tokenizer import Tokenizer
from paceline.types import IntArray

END = 256
"""The symbol of the text's end, beside the 256 bytes."""


@dataclass(slots=True, eq=False)
class _Spelling:
    """Tokens that spell the text up to ``begin``, and those that may follow.

    Attributes:
        weight: probability of its tokens.
        entry: pending KV entry of its last token; -1: the prompt's last.
        begin: bytes that its tokens spell.
        tokens: those whose bytes agree with the text behind ``begin``.  # [n]
        probs: of each of them, given the tokens before.  # [n]
    """

    weight: float
    entry: int
    begin: int
    tokens: IntArray
    probs: Probs


class ByteModel:
    """What a model says about a text's bytes.

    Args:
        stop_ids: tokens that end the text.
        beam: spellings that are kept; 0: all of them, which is exact.

    Attributes:
        lost: share of the probability that was forgotten with spellings outside the beam.
        num_forwards: so far.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int] = frozenset(),
        beam: int = 8,
    ) -> None:
        if beam < 0:
            raise InvalidArgument("beam", beam, "0 (all) or more")
        self.runner = runner
        self.lost = 0.0
        self.num_forwards = 0
        self._tokenizer = tokenizer
        self._beam = beam
        size = runner.vocab_size
        known = range(min(size, tokenizer.vocab_size))
        spelt = [b"" if token in stop_ids else tokenizer.token_bytes(token) for token in known]
        spelt += [b""] * (size - len(spelt))
        self._stops = np.array(sorted(t for t in stop_ids if 0 <= t < size), np.int64)
        self._lengths = np.array([len(each) for each in spelt])
        self._bytes = np.full((size, max(1, int(self._lengths.max()))), -1, np.int16)
        for token, each in enumerate(spelt):
            self._bytes[token, : len(each)] = list(each)
        self._sequence = runner.new_sequence()
        self._spellings: list[_Spelling] = []
        self._num_bytes = 0
        self._log_probability = 0.0

    def start(self, prompt: str, max_bytes: int) -> None:
        """Read the text before the one whose bytes count.

        Raises:
            InvalidArgument: it is too long.
        """
        ids = self._tokenizer.encode(prompt)
        check_prompt(ids, max_bytes, self.runner)
        rows = np.asarray(ids, np.int64)
        result = self.runner.forward([Segment(self._sequence, rows, logits="last")])
        self.runner.commit(self._sequence, range(len(rows)))
        self.num_forwards += 1
        self._spellings = [self._spelling(1.0, -1, result.logits[-1].float().cpu().numpy())]

    def _spelling(self, weight: float, entry: int, logits: npt.NDArray[np.float32]) -> _Spelling:
        scores = logits.astype(np.float64)
        weights = exp64(scores - scores.max())
        every = np.arange(len(scores))
        return _Spelling(weight, entry, self._num_bytes, every, weights / sum64(weights))

    @property
    def log_probability(self) -> float:
        """Of the bytes so far, and whatever follows them."""
        return self._log_probability

    def next_byte(self) -> Probs:
        """Probabilities of the 256 bytes and of ``END``; what is neither is left out.  # [257]

        Given the bytes so far, they sum to 1 but for tokens that spell nothing.
        """
        mass = np.zeros(257)
        for each in self._spellings:
            place = self._num_bytes - each.begin
            goes_on = self._lengths[each.tokens] > place
            followers = self._bytes[each.tokens[goes_on], place]
            weights = each.weight * each.probs[goes_on]
            mass[:256] += np.bincount(followers, weights, 256)
            if not place:
                mass[END] += each.weight * each.probs[self._stops].sum()
        total = self._mass()
        return mass / total if total > 0.0 else mass

    def _mass(self) -> float:
        """Probability of the bytes so far, by the spellings that are kept."""
        return math.fsum(each.weight * each.probs.sum() for each in self._spellings)

    def push(self, byte: int) -> None:
        """Add a byte to the text."""
        before = self._mass()
        self._num_bytes += 1
        done: list[tuple[float, int, int]] = []  # weight, parent entry, token of new spellings
        for each in self._spellings:
            place = self._num_bytes - 1 - each.begin
            agrees = self._lengths[each.tokens] > place
            agrees &= self._bytes[each.tokens, place] == byte
            each.tokens, each.probs = each.tokens[agrees], each.probs[agrees]
            whole = np.flatnonzero(self._lengths[each.tokens] == place + 1)
            done += [
                (each.weight * float(each.probs[i]), each.entry, int(each.tokens[i])) for i in whole
            ]
        after = self._mass()
        self._log_probability += math.log(after / before) if after > 0.0 < before else -math.inf
        self._grow(done)
        self._spellings = [each for each in self._spellings if len(each.tokens)]

    def _grow(self, done: list[tuple[float, int, int]]) -> None:
        """Read the tokens that end with the last byte, each behind its own spelling.

        Their probability moves from the spelling before to the new one.
        """
        for each in self._spellings:
            longer = self._lengths[each.tokens] > self._num_bytes - each.begin
            each.tokens, each.probs = each.tokens[longer], each.probs[longer]
        done.sort(key=lambda item: -item[0])
        if self._beam and len(done) > self._beam:
            left = sum(weight for weight, _, _ in done[self._beam :])
            kept = self._mass() + sum(weight for weight, _, _ in done[: self._beam])
            self.lost += (1.0 - self.lost) * left / (left + kept)
            done = done[: self._beam]
        if not done:
            return
        first = self._sequence.num_pending
        segment = Segment(
            self._sequence,
            np.array([token for _, _, token in done], np.int64),
            np.array([entry for _, entry, _ in done], np.int32),
        )
        logits = self.runner.forward([segment]).logits.float().cpu().numpy()
        self.num_forwards += 1
        self._spellings += [
            self._spelling(weight, first + row, logits[row])
            for row, (weight, _, _) in enumerate(done)
        ]

    def close(self) -> None:
        """Free the KV entries."""
        self.runner.free(self._sequence)


@dataclass(frozen=True, slots=True)
class Fused:
    """A text by several models.

    Attributes:
        ended: whether the models ended it, not ``max_bytes``.
        log_probabilities: each model's, of the bytes.
    """

    data: bytes
    ended: bool
    log_probabilities: tuple[float, ...]

    @property
    def text(self) -> str:
        """The bytes as text; what is no UTF-8 becomes a replacement character."""
        return self.data.decode("utf-8", "replace")


def fuse(
    models: Sequence[ByteModel], weights: Sequence[float], prompt: str, max_bytes: int = 64
) -> Fused:
    """Write the byte with the highest weighted mean of log-probabilities, again and again.

    The models may have any vocabularies. They are new ones, and stay open.

    Args:
        weights: of the models; they sum to 1.

    Raises:
        InvalidArgument: weights that do not fit, or a prompt that is too long for a model.
    """
    if len(weights) != len(models) or not models:
        raise InvalidArgument("weights", list(weights), f"one for each of {len(models)} models")
    if not all(weight >= 0.0 for weight in weights) or abs(sum(weights) - 1.0) > 1e-9:
        raise InvalidArgument("weights", list(weights), "numbers of 0 or more with the sum 1")
    for model in models:
        model.start(prompt, max_bytes)
    data, ended = bytearray(), False
    while len(data) < max_bytes:
        scores = fused_scores([model.next_byte() for model in models], weights)
        best = int(scores.argmax())
        if best == END or scores[best] == -math.inf:
            ended = True
            break
        data.append(best)
        for model in models:
            model.push(best)
    return Fused(bytes(data), ended, tuple(model.log_probability for model in models))


def fused_scores(probabilities: Sequence[Probs], weights: Sequence[float]) -> Probs:
    """Weighted mean of log-probabilities; a model with weight 0 has no say.  # [257]"""
    total = np.zeros(257)
    for probs, weight in zip(probabilities, weights, strict=True):
        if weight:
            total += weight * log64(np.maximum(probs, 0.0))
    return total
