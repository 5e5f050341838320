"""Trees by stochastic beam search: sequences drawn without replacement.

RSD-S of Jeon et al. 2024, Recursive Speculative Decoding (arXiv 2402.14160), after Kool, van
Hoof, Welling 2019, Stochastic Beams and Where to Find Them (arXiv 1903.06059, algorithm 1). Each
sequence has a log probability and a perturbed one. The maximum of the perturbed values of a node's
children is the node's own perturbed value, and the best of all children in the beam survive.
Siblings are in the order of drawing without replacement, and the values that decide which of them
survive are independent of their tokens, so recursive rejection stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.exact_math import exp_of, log1p_of
from paceline.shapes.base import BRANCHING, Choices, Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class StochasticBeam:
    """Keeps the ``width`` best sequences of each level; without noise, this is beam search."""

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
    """Shift ``value`` so that the highest of its siblings becomes ``maximum``, in distribution.

    The result is the sibling's perturbed log probability, given that the siblings' maximum is their
    parent's (Kool et al. 2019, appendix B.3, in the numerically stable form).
    """
    if value >= highest:
        return maximum
    v = maximum - value + log1p_of(-exp_of(value - highest))
    return maximum - max(0.0, v) - log1p_of(exp_of(-abs(v)))


RSD_S = ShapePart(
    make=lambda knobs: StochasticBeam(knobs[BRANCHING]),
    nodes=lambda knobs, depth: knobs[BRANCHING] * depth,
    knobs=(BRANCHING.but(3),),
    nodes_compete=True,
)
