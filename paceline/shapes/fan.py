"""Drafts for the likeliest verdicts on a draft that is being verified.

Saguaro (arXiv 2603.03251): a verdict is how many drafted tokens the target
accepts and which token it adds. The tree has the drafted chain, beside each of its tokens the
drafter's next best one, behind its end the best one, and behind each of these the next draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.shapes.base import ALL_DRAWS, Choices, Expander, Level, TreeBuilder, expand
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


def fan_budget(num_drafted: int) -> Budget:
    """Levels and nodes of the tree behind a chain of ``num_drafted`` tokens.

    The drafts behind each of its ``num_drafted + 1`` verdicts are as long as the chain.
    """
    nodes = num_drafted + (num_drafted + 1) ** 2
    return Budget(2 * num_drafted + 1, nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Fan:
    """The tree of a chain's verdicts.

    Args:
        chains: the drafted tokens of each session, by its id.
    """

    chains: Mapping[str, Sequence[int]]

    @property
    def draws(self) -> frozenset[Draws]:
        return ALL_DRAWS

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        level = Level(expander.root(sessions), 2)
        going = []
        for row, tree in enumerate(trees):
            chain = self.chains[tree.session.session_id]
            beside = self._beside(tree, -1, level, row, chain[0])
            nodes = [-1]
            for token in chain:
                nodes.append(self._add(tree, nodes[-1], token, behind=0))
            going.append((tree, [*nodes[1:], *beside]))
        # The chain is known, so that one forward reads all of it, and the drafts behind the
        # verdicts grow side by side.
        while going:
            level = expand(expander, going, 2)
            row, grown = 0, []
            for tree, frontier in going:
                grown.append((tree, self._behind(tree, frontier, level, row)))
                row += len(frontier)
            going = [(tree, frontier) for tree, frontier in grown if frontier]
        return [tree.draft() for tree in trees]

    def _behind(self, tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
        """Add what follows the nodes of a level; returns the nodes to expand next."""
        chain = self.chains[tree.session.session_id]
        added: list[int] = []
        for i, node in enumerate(frontier):
            behind = int(tree.values[node][0])
            if not behind:
                place = tree.depth_of[node]
                drafted = chain[place] if place < len(chain) else None
                added += self._beside(tree, node, level, row + i, drafted)
            else:
                best = tree.choose(node, level, row + i, 1).tokens
                added += [self._add(tree, node, token, behind + 1) for token in best]
        # Nothing is drafted behind the last token of a draft.
        return [node for node in added if tree.values[node][0] <= len(chain)]

    def _beside(
        self, tree: TreeBuilder, node: int, level: Level, row: int, drafted: int | None
    ) -> list[int]:
        """The best verdict's token behind a node that is not the drafted one."""
        best = [t for t in tree.choose(node, level, row, 2).tokens if t != drafted]
        return [self._add(tree, node, token, 1) for token in best[:1]]

    @staticmethod
    def _add(tree: TreeBuilder, node: int, token: int, behind: int) -> int:
        """Add a node; ``behind`` counts the tokens of its path that are not the chain's."""
        tree.values.append((behind,))
        return tree.add(node, Choices([token]), 0)
