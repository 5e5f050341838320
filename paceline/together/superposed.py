"""Superposed Decoding: k drafts of a text for one forward a token (lossy).

Shen et al. 2024 (arXiv 2405.18400): the model reads, at each step, a mixture of the last tokens of
all k drafts (their embeddings, weighted by the drafts' probabilities). Its distribution stands for
all of them: the k most likely tokens are tried after each draft, an n-gram model that sees each
draft's own tokens re-scores the k * k pairs by ``(1 - alpha) log p_LLM + alpha log p_ngram``, and
the k best stay. Made for auto-completion, where several short suggestions are shown.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.errors import InvalidArgument
from paceline.exact_math import exp64, sum64
from paceline.models.base import KVSequence, PseudoTokens, Segment
from paceline.models.llama import LlamaRunner
from paceline.together.reader import check_prompt
from paceline.types import IndexArray

ORDERS = (2, 3, 4, 5, 6)
MAX_DRAFTS = 64


class InterpolatedNgrams:
    """Interpolated n-grams: each order that knows the context counts twice the next shorter one.

    Below the shortest order stand the tokens' own frequencies with one added to each, so no token
    is impossible.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._single: Counter[int] = Counter()
        self._total = 0
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def learn(self, text: Sequence[int]) -> None:
        """Count the n-grams of a text."""
        self._single.update(text)
        self._total += len(text)
        for order in ORDERS:
            for end in range(order - 1, len(text)):
                self._after[tuple(text[end - order + 1 : end])][text[end]] += 1

    @staticmethod
    def of(texts: Iterable[Sequence[int]], vocab_size: int) -> InterpolatedNgrams:
        """A model that has learnt these texts."""
        model = InterpolatedNgrams(vocab_size)
        for text in texts:
            model.learn(text)
        return model

    def probability(self, context: Sequence[int], token: int) -> float:
        """Of ``token`` after ``context``; over all tokens it sums to 1."""
        weight, total = 1.0, 1.0
        found = (self._single[token] + 1) / (self._total + self._vocab_size)
        for order in ORDERS:
            counts = self._after.get(tuple(context[len(context) - order + 1 :]))
            if len(context) < order - 1 or counts is None:
                break  # a longer context is unknown, too
            weight *= 2.0
            total += weight
            found += weight * counts[token] / counts.total()
        return found / total


@dataclass(frozen=True, slots=True)
class SuperposedDraft:
    """One of the k texts.

    Attributes:
        token_ids: without the prompt; the last one may be a stop token.
        score: log-probability that decided its rank.
    """

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Superposition:
    """The k drafts, the best one first.

    Attributes:
        num_forwards: of the model, the one over the prompt included.
        weights: of the drafts in each mixture that the model has read.  # [num_forwards - 1, k]
    """

    drafts: tuple[SuperposedDraft, ...]
    num_forwards: int
    weights: tuple[tuple[float, ...], ...]


def superpose(
    runner: LlamaRunner,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    drafts: int = 3,
    alpha: float = 0.0,
    ngrams: InterpolatedNgrams | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Superposition:
    """Write ``drafts`` texts of ``max_tokens`` tokens in as many forwards as one text takes.

    Args:
        alpha: weight of the n-grams, 0 to 1.
        ngrams: None: they know the prompt alone.
        stop_ids: a draft is cut behind the first of them.

    Raises:
        InvalidArgument: a number is out of its range, or the prompt does not fit.
    """
    check_prompt(prompt_ids, max_tokens, runner)
    if not 1 <= drafts <= min(MAX_DRAFTS, runner.vocab_size):
        raise InvalidArgument("drafts", drafts, f"1 to {min(MAX_DRAFTS, runner.vocab_size)}")
    if not 0.0 <= alpha <= 1.0:
        raise InvalidArgument("alpha", alpha, "a number in [0, 1]")
    if ngrams is None:
        ngrams = InterpolatedNgrams.of([prompt_ids], runner.vocab_size)
    sequence = runner.new_sequence()
    kept: list[SuperposedDraft] = [SuperposedDraft((), 0.0)]
    weights: list[tuple[float, ...]] = []
    try:
        segment = Segment(sequence, np.asarray(prompt_ids, np.int64), logits="last")
        logits = runner.forward([segment]).logits[-1]
        runner.commit(sequence, range(len(prompt_ids)))
        for step in range(max_tokens):
            if step:
                weights.append(_mixture(kept))
                logits = _read(runner, sequence, kept, weights[-1])
            kept = _best(kept, logits, prompt_ids, drafts, alpha, ngrams)
    finally:
        runner.free(sequence)
    ended = (SuperposedDraft(_cut(d.token_ids, stop_ids), d.score) for d in kept)
    return Superposition(tuple(ended), max_tokens, tuple(weights))


def _mixture(drafts: Sequence[SuperposedDraft]) -> tuple[float, ...]:
    """The drafts' probabilities, normalised."""
    scores = np.array([draft.score for draft in drafts])
    probabilities = exp64(scores - scores.max())
    return tuple((probabilities / sum64(probabilities)).tolist())


def _read(
    runner: LlamaRunner,
    sequence: KVSequence,
    drafts: Sequence[SuperposedDraft],
    weights: Sequence[float],
) -> torch.Tensor:
    """Logits after the mixture of the drafts' last tokens.  # [vocab_size]"""
    last = torch.tensor([draft.token_ids[-1] for draft in drafts], device=runner.embedding.device)
    shares = torch.tensor(weights, dtype=torch.float32, device=last.device)

    def mix(others: torch.Tensor) -> torch.Tensor:
        mixed = (shares[:, None] * runner.embedding[last].float()).sum(0, keepdim=True)
        return mixed.to(others.dtype)

    parent: IndexArray = np.array([sequence.num_pending - 1], np.int32)
    pseudo = PseudoTokens(parent, 0, mix)
    segment = Segment(sequence, np.empty(0, np.int64), np.empty(0, np.int32), pseudo=pseudo)
    return runner.forward([segment]).logits[-1]


def _best(
    drafts: Sequence[SuperposedDraft],
    logits: torch.Tensor,
    prompt_ids: Sequence[int],
    count: int,
    alpha: float,
    ngrams: InterpolatedNgrams,
) -> list[SuperposedDraft]:
    """The ``count`` best pairs of a draft and one of the ``count`` most likely tokens."""
    likelihood = logits.float().cpu().double().log_softmax(-1)
    # A stable sort, so that of equally likely tokens the lowest id comes first, as with argmax.
    tokens = likelihood.sort(descending=True, stable=True).indices[:count].tolist()
    pairs = []
    for draft in drafts:
        context = [*prompt_ids[-max(ORDERS) :], *draft.token_ids]
        for token in tokens:
            score = (1.0 - alpha) * float(likelihood[token])
            if alpha > 0.0:
                score += alpha * math.log(ngrams.probability(context, token))
            pairs.append(SuperposedDraft((*draft.token_ids, token), draft.score + score))
    return sorted(pairs, key=lambda pair: -pair.score)[:count]


def _cut(token_ids: tuple[int, ...], stop_ids: frozenset[int]) -> tuple[int, ...]:
    end = next((i + 1 for i, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return token_ids[:end]
