"""Trees by stochastic beam search: sequences drawn without replacement.

RSD-S of Jeon et al. 2024, Recursive Speculative Decoding (arXiv 2402.14160), after Kool, van
Hoof, Welling 2019, Stochastic Beams and Where to Find Them (arXiv 1903.06059, algorithm 1). Each
sequence has a log probability and a perturbed one; the children of a node share its perturbed
value as their maximum, and the best of all children of the beam survive. Among siblings the order
is that of drawing without replacement, and which of them survive depends on values that are
independent of which tokens they hold, so recursive rejection stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.exact_math import exp_of, log1p_of
from paceline.shapes.base import Choices, Expander, Level, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class StochasticBeam:
    """Keeps the ``width`` best sequences of each level; plain beam search if nothing is drawn."""

    width: int

    @property
    def draws(self) -> frozenset[Draws]:
        return frozenset({Draws.TOP, Draws.COUPLED, Draws.WITHOUT_REPLACEMENT})

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, self._step, lambda depth: self.width)
        return [tree.draft() for tree in trees]

    def _step(self, tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
        found: list[tuple[float, float, int, Choices, int]] = []
        for i, node in enumerate(frontier):
            choices = tree.choose(node, level, row + i, self.width, weighted=True)
            log_q, perturbed = tree.values[node] if node >= 0 else (0.0, 0.0)
            drawn = choices.perturbed != choices.log_q
            highest = log_q + choices.perturbed[0] if choices.tokens else 0.0
            for rank in range(len(choices.tokens)):
                own = log_q + choices.log_q[rank]
                value = own
                if drawn:
                    noisy = log_q + choices.perturbed[rank]
                    value = conditional_gumbel(perturbed, highest, noisy)
                found.append((value, own, node, choices, rank))
        found.sort(key=lambda candidate: -candidate[0])  # stable: siblings stay in order
        added = []
        for value, own, node, choices, rank in found[: self.width]:
            if tree.is_full:
                break
            added.append(tree.add(node, choices, rank))
            tree.values.append((own, value))
        return added


def conditional_gumbel(maximum: float, highest: float, value: float) -> float:
    """``value`` moved so that the highest of its kind becomes ``maximum``, in distribution.

    The perturbed log probabilities of siblings, given that their maximum is their parent's
    (Kool et al. 2019, appendix B.3, in the numerically stable form).
    """
    if value >= highest:
        return maximum
    v = maximum - value + log1p_of(-exp_of(value - highest))
    return maximum - max(0.0, v) - log1p_of(exp_of(-abs(v)))
