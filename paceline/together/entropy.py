"""Entropy Adaptive Decoding: the large model writes while the text is uncertain (lossy).

Simonds 2025 (arXiv 2502.06833): the model that writes also says how uncertain it is, by the entropy
of its next-token distribution. While the mean of the last few entropies reaches a threshold, the
large model writes, otherwise the small one. Nothing is verified. A model that takes over first
reads what the other one has written, in one forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paceline.acceptance.base import PathLogits
from paceline.errors import InvalidArgument
from paceline.exact_math import log_of, weights64
from paceline.models.base import ModelRunner
from paceline.sampling import SamplingParams
from paceline.together.reader import Reader, check_prompt


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the model by the rolling mean of entropies.

    Attributes:
        threshold: in nats; 0: always the large model, infinity: always the small one.
        window: how many entropies the mean is taken over.
    """

    threshold: float = 1.5
    window: int = 5

    def __post_init__(self) -> None:
        if not self.threshold >= 0.0:
            raise InvalidArgument("threshold", self.threshold, "0 or more nats")
        if self.window < 1:
            raise InvalidArgument("window", self.window, "at least 1 token")

    def takes_large(self, entropies: Sequence[float]) -> bool:
        """Whether the large model writes the token after those with these entropies.

        With none yet, the mean counts as 0.
        """
        recent = entropies[-self.window :]
        mean = sum(recent) / len(recent) if recent else 0.0
        return mean >= self.threshold

    def shares(self, entropies: Sequence[float]) -> list[bool]:
        """:meth:`takes_large` at each place of a recorded text."""
        return [self.takes_large(entropies[:place]) for place in range(len(entropies))]


@dataclass(frozen=True, slots=True)
class Written:
    """A token, and who wrote it.

    Attributes:
        entropy: of the distribution that it was chosen from, in nats.
    """

    token_id: int
    by_large: bool
    entropy: float


class EntropyAdaptive:
    """Two models with one vocabulary that take turns.

    Args:
        params: how tokens are chosen from either model's distribution.
        stop_ids: tokens that end the text.

    Attributes:
        small, large: the readers, which count forwards.
    """

    def __init__(
        self,
        small: ModelRunner,
        large: ModelRunner,
        router: Router | None = None,
        params: SamplingParams | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.router = router or Router()
        self.params = params or SamplingParams()
        self.stop_ids = stop_ids
        self.small, self.large = Reader(small), Reader(large)

    def decode(self, prompt_ids: Sequence[int]) -> Iterator[Written]:
        """Tokens as they are written, ``params.max_tokens`` at most.

        Raises:
            InvalidArgument: the prompt does not fit, or the vocabularies differ.
        """
        check_prompt(prompt_ids, self.params.max_tokens, self.small.runner, self.large.runner)
        return islice(self._decode(list(prompt_ids)), self.params.max_tokens)

    def _decode(self, text: list[int]) -> Iterator[Written]:
        entropies: list[float] = []
        prompt_length = len(text)
        while True:
            by_large = self.router.takes_large(entropies)
            logits = (self.large if by_large else self.small).logits(text)
            entropies.append(entropy_of(logits.numpy()))
            choice = PathLogits(
                logits[None], self.params, text,
                prompt_length=prompt_length, stop_ids=self.stop_ids,
            )  # fmt: skip
            token = choice.token([], -1)
            text.append(token)
            yield Written(token, by_large, entropies[-1])
            if token in self.stop_ids:
                return

    def close(self) -> None:
        """Free the KV entries of both models."""
        self.small.close()
        self.large.close()


def entropy_of(logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    """Entropy of a softmax, in nats.  # [vocab_size]"""
    scores = logits.astype(np.float64)
    weights, total = weights64(scores)
    mean = float((weights * np.where(weights > 0.0, scores - scores.max(), 0.0)).sum()) / total
    return max(0.0, log_of(total) - mean)
