"""FS-GEN: how much of the large model's text needs the large model.

Zhang et al. 2024 (arXiv 2406.12295) read speculative decoding, contrastive decoding and proxy
tuning as one scheme in which a small model writes fast and a large one steps in now and then, and
ask how often it has to. :func:`collaborate` answers for a router that knows: it takes the small
model's token wherever the large one would write the same, so the text is the large model's own, and
the share of the other places is what any such scheme needs at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.models.base import ModelRunner
from paceline.together.entropy import entropy_of
from paceline.together.reader import Reader, check_prompt


@dataclass(frozen=True, slots=True)
class Collaboration:
    """A text by both models.

    Attributes:
        token_ids: the text without its prompt.
        by_large: for each token, whether the small model would have written another one.
        entropies: of the small model at each place, in nats.
    """

    token_ids: tuple[int, ...]
    by_large: tuple[bool, ...]
    entropies: tuple[float, ...]

    @property
    def large_share(self) -> float:
        """Share of the tokens that only the large model writes."""
        return sum(self.by_large) / len(self.by_large)


def collaborate(
    small: ModelRunner,
    large: ModelRunner,
    prompt_ids: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    small_layers: int | None = None,
) -> Collaboration:
    """Write greedily with the oracle router.

    Args:
        small_layers: how many of the small model's first layers take part; None: all.

    Raises:
        InvalidArgument: the prompt does not fit, or the vocabularies differ.
    """
    check_prompt(prompt_ids, max_tokens, small, large)
    fast, slow = Reader(small, small_layers), Reader(large)
    text, by_large, entropies = list(prompt_ids), list[bool](), list[float]()
    try:
        while len(by_large) < max_tokens:
            guess = fast.logits(text)
            right = int(slow.logits(text).argmax())
            token = int(guess.argmax())
            by_large.append(token != right)
            entropies.append(entropy_of(guess.numpy()))
            text.append(right if by_large[-1] else token)
            if text[-1] in stop_ids:
                break
    finally:
        fast.close()
        slow.close()
    return Collaboration(tuple(text[len(prompt_ids) :]), tuple(by_large), tuple(entropies))


def how_well_entropy_tells(collaborations: Sequence[Collaboration]) -> float:
    """Chance that a place that needs the large model has the higher entropy of two places.

    The area under the ROC curve: 0.5 tells nothing, 1 everything; ties count as a half. NaN if all
    places are of one kind.
    """
    entropy = np.array([value for c in collaborations for value in c.entropies])
    needed = np.array([flag for c in collaborations for flag in c.by_large])
    high, low = entropy[needed], entropy[~needed]
    if not len(high) or not len(low):
        return float("nan")
    wins = (high[:, None] > low).mean() + 0.5 * (high[:, None] == low).mean()
    return float(wins)
