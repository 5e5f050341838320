"""The target drafts for itself with some of its own layers.

LayerSkip, Elhoushi et al. 2024 (arXiv 2404.16710): the first layers, the shared norm and the shared
head draft; verification goes on from the exit with the states and the KV entries that drafting
left, so that no layer sees an accepted token twice. With a depth policy instead of an exit
(:mod:`paceline.models.exits`) the drafting layers are spread over the model, and verification
computes the draft anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import Drafter, DrafterPart, greedy_chain_depth, grow, stop_below
from paceline.models.exits import EXIT_LAYER, check_exits, layers_of
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.knobs import Knobs
    from paceline.target import ModelTarget
    from paceline.view import SessionView


class SelfDrafter(Drafter):
    """Expands nodes with layers of the target that verifies them."""

    needs = frozenset({Need.SHARED_MODEL})

    def __init__(self, target: ModelTarget) -> None:
        self._target = target
        self._layers: dict[str, Sequence[int]] = {}  # of this round
        self._entries: dict[str, dict[int, int]] = {}  # KV entry of each node; -1 is the root's

    def check_knobs(self, knobs: Knobs) -> None:
        """Raises InvalidArgument for an exit that the target does not have."""
        check_exits(knobs, self._target.num_layers, "the target")

    def open(self, session: SessionView) -> None:
        """Nothing to prepare: the drafter keeps no state between rounds."""

    def close(self, session: SessionView) -> None:
        self._layers.pop(session.session_id, None)
        self._entries.pop(session.session_id, None)

    def exit_layer(self, session: SessionView, budget: Budget) -> int:
        """The exit layer: the controller's if it sets one, else the request's."""
        default = max(1, self._target.num_layers // 3)
        return budget.exit_layer or session.config[EXIT_LAYER] or default

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        able = [i for i, b in enumerate(budgets) if min(b.depth, b.nodes) > 0]
        if able:
            made = self._propose([sessions[i] for i in able], [budgets[i] for i in able])
            for i, draft in zip(able, made, strict=True):
                drafts[i] = draft
        return drafts

    def _propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        for session, budget in zip(sessions, budgets, strict=True):
            policy = session.depth_policy
            if policy is None:
                layers: Sequence[int] = range(self.exit_layer(session, budget))
            else:
                layers = layers_of(policy, session, 0, self._target.num_layers)
            self._layers[session.session_id] = layers
        return self._greedy_chains(sessions, budgets) or grow(self, sessions, budgets)

    def _greedy_chains(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft] | None:
        depth = greedy_chain_depth(sessions, budgets, stops=True)
        layers = {tuple(self._layers[session.session_id]) for session in sessions}
        if not depth or len(layers) > 1 or sessions[0].depth_policy is not None:
            return None
        ends = stop_below(sessions, depth)
        chains = self._target.draft_chains(sessions, depth, len(layers.pop()), ends)
        if chains is None:
            return None
        sizes = [min(budget.depth, budget.nodes) for budget in budgets]
        return [Draft.chain(chain[:size]) for chain, size in zip(chains, sizes, strict=True)]

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        for session in sessions:
            self._entries[session.session_id] = {-1: -1}
        return self.expand(sessions, [[(-1, s.token_ids[-1], -1)] for s in sessions])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        steps, layers = [], []
        for session, frontier in zip(sessions, frontiers, strict=True):
            entries = self._entries[session.session_id]
            steps.append([(entries[parent], token) for _, token, parent in frontier])
            layers.append(self._layers[session.session_id])
        logits, made = self._target.draft(sessions, steps, layers)
        for session, frontier, new in zip(sessions, frontiers, made, strict=True):
            nodes = (node for node, _, _ in frontier)
            self._entries[session.session_id] |= dict(zip(nodes, new, strict=True))
        return logits

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Nothing: verification commits the entries."""


EARLY_EXIT = DrafterPart(
    make=lambda context: SelfDrafter(context.target), knobs=(EXIT_LAYER,), replay="prefix"
)
# A depth policy chooses the layers, by the place of the token.
FEWER_LAYERS = DrafterPart(make=lambda context: SelfDrafter(context.target), replay="tree")
