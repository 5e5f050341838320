"""DiffuSpec: a masked-diffusion model drafts a chain in one forward.

Li et al. 2025, arXiv 2510.02358. The model sees the committed text and masks behind it, and gives a
distribution for each masked position. The most probable tokens of the positions form a lattice:
they were predicted side by side, so the best token of each need not follow from the one before. The
causal-consistency path search walks the lattice from left to right with a beam and adds to the
model's log-probabilities those of a causal proxy, here an n-gram model of the committed text.
The method's length controller is the paper's adaptive draft length (`adl`).

Above temperature 0 a position's values are perturbed by the target's own noise, so that a path
follows the tokens that coupled sampling will draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.base import (
    NGRAM_MAX,
    Drafter,
    DrafterPart,
    position_values,
    until_stop,
)
from paceline.knobs import Knob
from paceline.sampling import Probs
from paceline.types import EMPTY_DRAFT, Budget, Draft, FloatArray

if TYPE_CHECKING:
    from paceline.diffusion.runner import BlockRunner, Context
    from paceline.view import SessionView

Lattice = list[list[tuple[int, float]]]
"""Of each drafted position: tokens and their values, the best one first."""

LATTICE_WIDTH = Knob[int](
    "lattice_width", int, 8, "Most candidates of a position among which `diffuspec` searches.",
    ge=1, le=64, search=(1, 4, 8, 16),
)  # fmt: skip
LATTICE_MASS = Knob[float](
    "lattice_mass", float, 0.9,
    "`diffuspec` takes a position's most probable tokens until they have this probability.",
    ge=0.0, le=1.0, search=(0.8, 0.9, 0.95),
)  # fmt: skip
BEAM_WIDTH = Knob[int](
    "beam_width", int, 4, "Paths that the search of `diffuspec` keeps at each position.",
    ge=1, le=64, search=(1, 4, 8),
)  # fmt: skip
PROXY_WEIGHT = Knob[float](
    "proxy_weight", float, 0.5,
    "Weight of the n-grams of the text against the masked model in `diffuspec`; 0: no n-grams.",
    ge=0.0, le=16.0, search=(0.0, 0.25, 0.5, 1.0),
)  # fmt: skip


class WittenBellNgrams:
    """Witten-Bell-smoothed n-grams of a growing text: P(token | the tokens before it).

    A distribution at each order, interpolated with that of the next shorter context in proportion
    to how many different tokens have followed the context; below them all, the uniform one.

    Args:
        order: longest n-gram.
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        self._order, self._uniform = order, 1 / vocab_size
        self._text: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        self._totals: dict[tuple[int, ...], int] = {}

    def learn(self, token_ids: Sequence[int]) -> None:
        """Count ``token_ids``, which begin with the text so far; another text starts anew."""
        seen = len(self._text)
        if self._text != token_ids[:seen]:
            self._text, self._followers, self._totals, seen = [], {}, {}, 0
        self._text += token_ids[seen:]
        for end in range(seen, len(token_ids)):
            for length in range(min(self._order, end + 1)):
                context = tuple(token_ids[end - length : end])
                followers = self._followers.setdefault(context, {})
                followers[token_ids[end]] = followers.get(token_ids[end], 0) + 1
                self._totals[context] = self._totals.get(context, 0) + 1

    def probability(self, token: int, context: Sequence[int]) -> float:
        """Of ``token`` behind ``context``, whose last ``order - 1`` tokens count."""
        p = self._uniform
        for length in range(min(self._order, len(context) + 1)):
            known = tuple(context[len(context) - length :])
            if known not in self._followers:
                break
            followers = self._followers[known]
            p = followers.get(token, 0) + len(followers) * p
            p /= self._totals[known] + len(followers)
        return p


def candidates(values: Probs, width: int, mass: float) -> list[tuple[int, float]]:
    """The best tokens of a position until their softmax reaches ``mass``; ``width`` at most.

    Args:
        values: log-probabilities up to a constant, -inf where a token is impossible.  # [vocab]
    """
    best = np.argsort(-values, kind="stable")[:width]
    share = np.exp(values[best] - values[best[0]])
    total = np.exp(values - values[best[0]]).sum()
    before = np.concatenate([[0.0], share.cumsum()[:-1]]) / total
    kept = best[((before < mass) & np.isfinite(values[best])) | (np.arange(len(best)) == 0)]
    return [(int(token), float(values[token])) for token in kept]


def path_score(
    lattice: Lattice,
    path: Sequence[int],
    tail: Sequence[int],
    proxy: WittenBellNgrams,
    weight: float,
) -> float:
    """Sum over a path of the lattice's values and ``weight`` times the proxy's log-probabilities.

    Args:
        tail: the last tokens in front of the path.
    """
    score, context = 0.0, list(tail)
    for column, token in zip(lattice, path, strict=True):
        score += dict(column)[token] + weight * math.log(proxy.probability(token, context))
        context.append(token)
    return score


def best_path(
    lattice: Lattice, tail: Sequence[int], proxy: WittenBellNgrams, weight: float, beam: int
) -> list[int]:
    """The path with the highest :func:`path_score` that the beam finds.

    Never worse than the best token of each position, which competes at the end.
    """
    greedy = [column[0][0] for column in lattice]
    if not weight:
        return greedy
    start = list(tail)
    paths: list[tuple[float, list[int]]] = [(0.0, [])]
    for column in lattice:
        grown = [
            (score + value + weight * math.log(proxy.probability(token, start + path)), path, token)
            for score, path in paths
            for token, value in column
        ]
        grown.sort(key=lambda each: -each[0])
        paths = [(score, [*path, token]) for score, path, token in grown[:beam]]
    score, path = paths[0]
    return path if score >= path_score(lattice, greedy, start, proxy, weight) else greedy


class _State:
    """A session in the masked model: whole blocks of its text in the cache, and its n-grams."""

    def __init__(self, context: Context, proxy: WittenBellNgrams) -> None:
        self.context, self.proxy = context, proxy
        self.held: list[int] = []  # tokens of the cached blocks


class DiffuSpec(Drafter):
    """Drafts with a masked model that has the target's tokenizer.

    Its KV cache holds the text's whole blocks; each draft computes the rest of the text and the
    masks, which attend to one another, so a draft may reach beyond the end of a block.

    Args:
        runner: of the masked model.
        vocab_size: the target's.
    """

    rewinds = True

    def __init__(self, runner: BlockRunner, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size
        self._states: dict[str, _State] = {}

    @property
    def context_length(self) -> int:
        return self.runner.context_length

    def open(self, session: SessionView) -> None:
        from paceline.diffusion.runner import Context

        proxy = WittenBellNgrams(session.config[NGRAM_MAX], self.vocab_size)
        self._states[session.session_id] = _State(Context(), proxy)

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            self._draft(session, min(budget.depth, budget.nodes))
            for session, budget in zip(sessions, budgets, strict=True)
        ]

    def _draft(self, session: SessionView, depth: int) -> Draft:
        if depth <= 0 or session.length + depth > self.context_length:
            return EMPTY_DRAFT
        state, config = self._states[session.session_id], session.config
        lattice = [
            candidates(values, config[LATTICE_WIDTH], config[LATTICE_MASS])
            for values in position_values(session, self._logits(session, state, depth))
        ]
        state.proxy.learn(session.token_ids)
        tail = session.token_ids[-config[NGRAM_MAX] :]
        path = best_path(lattice, tail, state.proxy, config[PROXY_WEIGHT], config[BEAM_WIDTH])
        return Draft.chain(until_stop(session, path))

    def _logits(self, session: SessionView, state: _State, depth: int) -> FloatArray:
        """Of the positions behind the text, from one forward.  # [depth, vocab_size]"""
        import torch

        runner, text = self.runner, session.token_ids
        size, mask = runner.blocks.block_size, runner.blocks.mask_token_id
        kept = 0
        while state.held[kept : kept + size] == text[kept : kept + size] and kept < len(state.held):
            kept += size
        if kept < len(state.held):
            # The last block that stays is computed again, for the token that it predicts.
            kept = max(kept - size, 0)
            runner.truncate(state.context, kept)
        whole = len(text) // size * size
        runner.append(state.context, text[kept:whole])
        state.held = text[:whole]
        (logits,) = runner.predict(
            state.context, [torch.tensor([*text[whole:], *([mask] * depth)], dtype=torch.int64)]
        )
        found: FloatArray = logits[len(text) - whole :].numpy()
        found = found[:, : self.vocab_size].copy()
        if mask < self.vocab_size:
            found[:, mask] = -np.inf
        return found


DIFFUSPEC = DrafterPart(
    knobs=(LATTICE_WIDTH, LATTICE_MASS, BEAM_WIDTH, PROXY_WEIGHT, NGRAM_MAX.but(3)),
    replay="composite",
)
