"""The interface of acceptance rules, and what they may read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from paceline.exact_math import sum64
from paceline.knobs import Knob
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
from paceline.types import Acceptance, Draft, Draws, FloatArray, IntArray, Need

if TYPE_CHECKING:
    import torch

    from paceline.constraints import Constraint, Mask
    from paceline.sampling import SamplingParams


class PathLogits:
    """The target's logits along the path that a rule walks, processed only where the rule looks.

    Penalties and constraints depend on the tokens before a position, and those are known only with
    the path to it. Processing lazily therefore sees exactly the prefix that AR would have seen.

    Args:
        logits: raw, row 0 at the root and row ``i + 1`` at node ``i``.  # [num_nodes + 1, vocab]
        params: the request's sampling parameters.
        history: the committed tokens.
        argmaxes: argmax of each row, if already computed for the whole batch.
        prompt_length: how many tokens of ``history`` are the prompt.
        constraint: the request's constraint, advanced past ``history``; None: it has none.
        stop_ids: the tokens that end the generation.
        states: the target's last hidden states, in rows as ``logits``; None: the rule does not
            need them.  # [num_nodes + 1, hidden_size]
    """

    def __init__(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        history: list[int],
        argmaxes: Sequence[int] | None = None,
        prompt_length: int = 0,
        constraint: Constraint | None = None,
        stop_ids: frozenset[int] = frozenset(),
        states: torch.Tensor | None = None,
    ) -> None:
        self.params = params
        self.position = len(history)
        self._logits = logits
        self._history = history
        self._argmaxes = argmaxes if params.is_plain_argmax else None
        self._prompt_length = prompt_length
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._states = states

    def row(self, path_tokens: list[int], node: int) -> Row:
        """Processed logits after ``node`` (-1: the root), reached over ``path_tokens``."""
        row: Row = self._logits[node + 1].float().cpu().numpy()
        history = self._history + path_tokens if self.params.depends_on_history else self._history
        stops = self._stop_ids
        allowed = None if self._constraint is None else self._constraint.allowed(path_tokens)
        if allowed is not None and self.params.min_tokens and _only(allowed, stops):
            stops = frozenset()  # a finished output cannot go on
        row = process_logits(row, self.params, history, self._prompt_length, stops)
        return row if allowed is None else np.where(allowed, row, np.float32(-np.inf))

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

    def state(self, node: int) -> FloatArray | None:
        """The target's last hidden state at ``node``; None if there are none.

        # [hidden_size] float32
        """
        if self._states is None:
            return None
        result: FloatArray = self._states[node + 1].float().cpu().numpy()
        return result

    def toss(self, chance: float, depth: int, number: int) -> bool:
        """True with probability ``chance``; independent for each (round or depth, number).

        Args:
            depth: number of accepted tokens before the position to decide. Noise belongs to
                absolute positions: a rule may read a position's noise only in the round that
                commits its token (which the round always does at depth 0).
            number: which of the decisions at that position.
        """
        return uniform(self.params.seed, self.position + depth, number, Salt.ACCEPT) < chance

    def draw(self, probs: Probs, depth: int) -> int:
        """Draw the round's last token, after ``depth`` accepted ones, from ``probs``."""
        return sample_from(probs, self.params.seed, self.position + depth, Salt.RESIDUAL)


def _only(allowed: Mask, token_ids: frozenset[int]) -> bool:
    """Whether nothing but some of these tokens is allowed."""
    return int(np.count_nonzero(allowed)) == sum(bool(allowed[token]) for token in token_ids)


class AcceptanceRule(Protocol):
    """A pure function of a draft, the target's logits and the seed.

    A rule with knobs is a frozen dataclass that has a field for each of them, with the knob's name
    and default.

    Attributes:
        name: the rule's name in the catalogue.
        lossless: the output's distribution (for coupled and greedy: the output) is the target's.
        chain_only: the rule refuses drafts with more than one branch.
        draws: how the rule wants the children of a node to be chosen.
        needs: what it reads of the target beside the logits.
        knobs: those that the rule reads.
    """

    name: str
    lossless: bool
    chain_only: bool
    draws: Draws
    needs: frozenset[Need]

    @property
    def knobs(self) -> tuple[Knob[Any], ...]: ...

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        """The accepted path (node indices from the root down) and the target's next token."""
        ...


def with_knobs(rule: AcceptanceRule, values: Mapping[str, Any]) -> AcceptanceRule:
    """The same rule, with the values that ``values`` has for its knobs, by their names."""
    changes = {knob.name: values[knob.name] for knob in rule.knobs if knob.name in values}
    return replace(cast("Any", rule), **changes) if changes else rule


def exact_match(
    draft: Draft, target: PathLogits, token_after: Callable[[list[int], int], int]
) -> Acceptance:
    """Walk down the tree as long as a child holds the one token that is allowed there.

    Args:
        token_after: returns that token, given the path's tokens and last node so far (-1: root).
    """
    return walk(draft, token_after, lambda nodes, own, tokens, parent: -1)


def walk(
    draft: Draft,
    token_after: Callable[[list[int], int], int],
    otherwise: Callable[[list[int], int, list[int], int], int],
) -> Acceptance:
    """Walk down the tree to the child with the target's own token, or to another that may stay.

    Args:
        token_after: as in :func:`exact_match`: the target's own token.
        otherwise: returns a node's child that stays although it has another token, or -1; given the
            children, the target's own token, and the path's tokens and last node so far.
    """
    followers, drafted = children(draft.parent_indices), draft.token_ids.tolist()
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        own, nodes, parent = token_after(tokens, node), followers[node], node
        node = next((c for c in nodes if drafted[c] == own), -1)
        if node < 0 and nodes:
            node = otherwise(nodes, own, tokens, parent)
        if node < 0:
            return Acceptance(tuple(path), own)
        path.append(node)
        tokens.append(drafted[node])


def q_row(draft: Draft, node: int) -> tuple[IntArray, FloatArray]:
    """The q that ``node`` was drawn from; a point mass if the draft has no ``probs``."""
    if draft.probs is not None:
        return draft.probs.row(node)
    return draft.token_ids[node : node + 1], np.ones(1, np.float32)


def reject_in_turn(
    p: Probs, draft: Draft, nodes: Sequence[int], target: PathLogits, depth: int
) -> tuple[int | None, Probs]:
    """Multi-candidate rejection sampling: try candidates in order until one is accepted.

    Candidate x with q is accepted with probability ``min(1, p(x) / q(x))``; after a rejection,
    ``norm(max(p - q, 0))`` takes the place of p for the next one. The committed token has the law p
    as long as each q is the law of its candidate given the earlier ones (Jeon et al. 2024, arXiv
    2402.14160, algorithm 3; with one candidate Leviathan et al. 2022, arXiv 2211.17192,
    algorithm 1).

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
        # If p equals q up to rounding, nothing is left and nothing needs correcting.
        left = after / total if total > 0.0 else left
    return None, left
