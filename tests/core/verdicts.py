"""Every verdict that an acceptance rule can reach on a draft, with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.acceptance.base import AcceptanceRule, PathLogits
from paceline.sampling import Probs, SamplingParams
from paceline.tree import path_to
from paceline.types import Draft, DraftProbs, IndexArray

AT_ONE = SamplingParams(temperature=1.0)
Law = npt.NDArray[np.float64]


def distribution(rng: np.random.Generator, size: int, zeros: int = 0) -> Law:
    """A random distribution in which ``zeros`` tokens are impossible."""
    weights = rng.dirichlet(np.full(size, 0.7))
    weights[rng.permutation(size)[:zeros]] = 0.0
    result: Law = weights / weights.sum()
    return result


def log(probs: Law) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(probs)).float()


class Scripted(PathLogits):
    """Decisions come from a script instead of noise; a draw hands over what it would draw from."""

    def __init__(self, logits: torch.Tensor, params: SamplingParams, script: Sequence[bool]):
        super().__init__(logits, params, [0] * 5)
        self.script = list(script)
        self.taken: list[bool] = []
        self.chance = 1.0
        self.other_scripts: list[list[bool]] = []
        self.drawn_from: Law = np.empty(0)
        self._asked: set[tuple[int, int]] = set()

    def toss(self, chance: float, depth: int, number: int) -> bool:
        assert (depth, number) not in self._asked, "the same noise twice"
        self._asked.add((depth, number))
        assert chance >= 0.0
        if chance >= 1.0 or chance == 0.0:
            return chance >= 1.0
        if len(self.taken) < len(self.script):
            decision = self.script[len(self.taken)]
        else:
            decision = True
            self.other_scripts.append([*self.taken, False])
        self.taken.append(decision)
        self.chance *= chance if decision else 1.0 - chance
        return decision

    def draw(self, probs: Probs, depth: int) -> int:
        self.drawn_from = probs
        return 0


def verdicts(
    rule: AcceptanceRule, draft: Draft, logits: torch.Tensor, params: SamplingParams = AT_ONE
) -> Iterator[tuple[float, tuple[int, ...], Law]]:
    """Each possible verdict: its probability, the accepted path, the law of the next token."""
    scripts: list[list[bool]] = [[]]
    while scripts:
        target = Scripted(logits, params, scripts.pop())
        path = rule.accept(draft, target).path
        scripts += target.other_scripts
        yield target.chance, path, target.drawn_from


@dataclass
class Language:
    """A distribution after every context of some tokens.  # level d: [vocab] * (d + 1)"""

    levels: list[Law]

    @staticmethod
    def random(rng: np.random.Generator, vocab: int, depth: int, zeros: int = 0) -> Language:
        return Language(
            [
                np.stack([distribution(rng, vocab, zeros) for _ in range(vocab**level)]).reshape(
                    (vocab,) * (level + 1)
                )
                for level in range(depth + 1)
            ]
        )

    @property
    def vocab(self) -> int:
        return len(self.levels[0])

    def after(self, context: tuple[int, ...]) -> Law:
        result: Law = self.levels[len(context)][context]
        return result

    def joint(self, context: tuple[int, ...] = ()) -> Law:
        """Law of all tokens that follow ``context``.  # [vocab] * number of them"""
        result = self.after(context)
        for level in range(len(context) + 1, len(self.levels)):
            result = result[..., None] * self.levels[level][context]
        return result


def context(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(draft.token_ids[list(path_to(draft.parent_indices, node))].tolist())


def all_drafts(
    q: Language, parent_indices: Sequence[int], *, replacement: bool
) -> Iterator[tuple[float, Draft]]:
    """Every draft of a tree drawn from q, with its probability and its ``probs``."""
    parents: IndexArray = np.asarray(parent_indices, np.int32)
    for tokens in itertools.product(range(q.vocab), repeat=len(parents)):
        draft = Draft(np.asarray(tokens, np.int64), parents)
        chance, rows = 1.0, []
        for node, token in enumerate(tokens):
            law = q.after(context(draft, int(parents[node]))).copy()
            if not replacement:
                earlier = [n for n in range(node) if parents[n] == parents[node]]
                law[draft.token_ids[earlier]] = 0.0
            if law[token] == 0.0:
                chance = 0.0
                break
            law /= law.sum()
            chance *= float(law[token])
            support = np.flatnonzero(law)
            rows.append((support.astype(np.int64), law[support].astype(np.float32)))
        if chance > 0.0:
            yield chance, Draft(draft.token_ids, parents, DraftProbs.stack(rows))


def logits_of(p: Language, draft: Draft) -> torch.Tensor:
    return torch.stack([log(p.after(context(draft, n))) for n in range(-1, draft.num_nodes)])


def round_law(
    rule: AcceptanceRule, p: Language, drafts: Iterator[tuple[float, Draft]]
) -> tuple[Law, float]:
    """Law of the tokens after a round that AR completes, and the expected accepted length.

    The first is ``p.joint()`` iff the rule is lossless.
    """
    law, length, whole = np.zeros_like(p.joint()), 0.0, 0.0
    for drawn, draft in drafts:
        total = 0.0
        for chance, path, following in verdicts(rule, draft, logits_of(p, draft)):
            assert (following >= 0).all()
            assert abs(following.sum() - 1.0) < 1e-9
            tokens = tuple(draft.token_ids[list(path)].tolist())
            for token in np.flatnonzero(following):
                rest = (*tokens, int(token))
                weight = drawn * chance * following[token]
                law[rest] += weight * (p.joint(rest) if len(rest) < law.ndim else 1.0)
            total += chance
            length += drawn * chance * len(path)
        assert abs(total - 1.0) < 1e-9
        whole += drawn
    assert abs(whole - 1.0) < 1e-6
    return law, length
