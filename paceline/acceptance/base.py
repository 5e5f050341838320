"""What an acceptance rule is, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.exact_math import sum64
from paceline.sampling import (
    Probs,
    Row,
    Salt,
    coupled_sample,
    probabilities,
    process_logits,
    sample_from,
    uniform,
)
from paceline.tree import children
from paceline.types import Acceptance, Draft, Draws, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from paceline.constraints import Constraint
    from paceline.sampling import SamplingParams


class PathLogits:
    """The target's logits along the path that a rule walks, processed only where it looks.

    Penalties and constraints depend on the tokens before a position, and those are known only
    once the path to it is; processing lazily therefore sees exactly the prefix that AR would
    have seen.

    Args:
        logits: raw, row 0 at the root and row ``i + 1`` at node ``i``.  # [num_nodes + 1, vocab]
        params: the request's sampling parameters.
        history: the committed tokens.
        argmaxes: argmax of each row where they were computed for the whole batch at once.
        prompt_length: tokens of ``history`` that are the prompt.
        constraint: after ``history``, if the request has one.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        history: list[int],
        argmaxes: Sequence[int] | None = None,
        prompt_length: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.position = len(history)
        self._logits = logits
        self._history = history
        self._argmaxes = argmaxes if params.is_plain_argmax else None
        self._prompt_length = prompt_length
        self._constraint = constraint

    def row(self, path_tokens: list[int], node: int) -> Row:
        """Processed logits after ``node`` (-1: the root), reached over ``path_tokens``."""
        row: Row = self._logits[node + 1].float().cpu().numpy()
        history = self._history + path_tokens if self.params.depends_on_history else self._history
        row = process_logits(row, self.params, history, self._prompt_length)
        if self._constraint is not None:
            allowed = self._constraint.allowed(path_tokens)
            if allowed is not None:
                row = np.where(allowed, row, np.float32(-np.inf))
        return row

    def argmax(self, path_tokens: list[int], node: int) -> int:
        """Argmax of :meth:`row`."""
        if self._argmaxes is not None:
            return self._argmaxes[node + 1]
        return int(np.argmax(self.row(path_tokens, node)))

    def probs(self, path_tokens: list[int], node: int) -> Probs:
        """The target's distribution p after ``node``.  # [vocab_size] float64, sums to 1"""
        return probabilities(self.row(path_tokens, node), self.params)

    def token(self, path_tokens: list[int], node: int) -> int:
        """The token that AR has after ``node``: argmax, or the draw of coupled sampling."""
        if self.params.temperature == 0:
            return self.argmax(path_tokens, node)
        row = self.row(path_tokens, node)
        return coupled_sample(row, self.params, self.position + len(path_tokens))

    def toss(self, chance: float, depth: int, number: int) -> bool:
        """True with probability ``chance``; independent for each (round or depth, number).

        Args:
            depth: accepted tokens before the position that is decided. Noise belongs to absolute
                positions: a rule may look at a position's noise only in the round that commits
                its token (depth 0 always is such a position).
            number: which of the decisions there.
        """
        return uniform(self.params.seed, self.position + depth, number, Salt.ACCEPT) < chance

    def draw(self, probs: Probs, depth: int) -> int:
        """The round's last token, which follows ``depth`` accepted ones, drawn from ``probs``."""
        return sample_from(probs, self.params.seed, self.position + depth, Salt.RESIDUAL)


class AcceptanceRule(Protocol):
    """A pure function of a draft, the target's logits and the seed.

    A rule with knobs is a frozen dataclass whose fields are named as in SpeculationConfig and have
    the defaults; see :func:`knobs_of`.

    Attributes:
        name: as in the catalogue.
        lossless: the output law (or, for coupled and greedy, the output itself) is the target's.
        chain_only: refuses drafts with more than one branch.
        draws: how it wants the children of a node to be chosen.
    """

    name: str
    lossless: bool
    chain_only: bool
    draws: Draws

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        """The accepted path (node indices, root side first) and the target's next token."""
        ...


def knobs_of(rule: AcceptanceRule) -> dict[str, Any]:
    """The knobs of a rule by their names in SpeculationConfig, with its values."""
    if not is_dataclass(rule):
        return {}
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def with_knobs(rule: AcceptanceRule, values: Mapping[str, Any]) -> AcceptanceRule:
    """The same rule with those of its knobs that ``values`` names."""
    if not is_dataclass(rule):
        return rule
    changed: AcceptanceRule = replace(rule, **{k: values[k] for k in knobs_of(rule) if k in values})
    return changed


def exact_match(
    draft: Draft, target: PathLogits, token_after: Callable[[list[int], int], int]
) -> Acceptance:
    """Walk down the tree as long as a child holds the one token that is allowed there.

    Args:
        token_after: that token, given the tokens of the path so far and its last node (-1: root).
    """
    followers, drafted = children(draft.parent_indices), draft.token_ids.tolist()
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        token = token_after(tokens, node)
        node = next((c for c in followers[node] if drafted[c] == token), -1)
        if node < 0:
            return Acceptance(tuple(path), token)
        path.append(node)
        tokens.append(token)


def q_row(draft: Draft, node: int) -> tuple[IntArray, FloatArray]:
    """What ``node`` was drawn from; a point mass in a draft without ``probs``."""
    if draft.probs is not None:
        return draft.probs.row(node)
    return draft.token_ids[node : node + 1], np.ones(1, np.float32)


def reject_in_turn(
    p: Probs, draft: Draft, nodes: Sequence[int], target: PathLogits, depth: int
) -> tuple[int | None, Probs]:
    """Multi-candidate rejection sampling: try candidates in order until one is accepted.

    Candidate x with q is accepted with probability ``min(1, p(x) / q(x))``; after a rejection the
    next one faces ``norm(max(p - q, 0))``. The committed token has the law p as long as each q is
    the law of its candidate given the earlier ones (Jeon et al. 2024, arXiv 2402.14160,
    algorithm 3; with one candidate Leviathan et al. 2022, arXiv 2211.17192, algorithm 1).

    Returns:
        The accepted node, or None and the distribution to draw from instead.
    """
    left = p
    for number, node in enumerate(nodes):
        token = int(draft.token_ids[node])
        support, q = q_row(draft, node)
        q_token = sum64(q[support == token])
        if q_token <= 0.0:
            continue  # not drawn from this q at all: trying it would change the law
        if target.toss(float(left[token]) / q_token, depth, number):
            return node, left
        after = left.copy()
        after[support] = np.maximum(after[support] - q, 0.0)
        total = sum64(after)
        # Nothing is left where p equals q up to rounding; then there is nothing to correct.
        left = after / total if total > 0.0 else left
    return None, left
