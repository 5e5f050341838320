"""The interfaces of tree shapes and of the expanding drafters that they drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.exact_math import exp64, log_of, sum64, weights64
from paceline.knobs import Knob, Knobs
from paceline.sampling import (
    Probs,
    Row,
    Salt,
    gumbel,
    gumbel_at,
    perturbed_argmax,
    process_logits,
    scaled_scores,
)
from paceline.tree import subset
from paceline.types import Budget, Draft, DraftProbs, DraftStep, Draws, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

ALL_DRAWS = frozenset(Draws)
# Each call of TreeBuilder.choose has its own noise, because nodes of one depth share a position.
_STREAM_STRIDE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """An expander's answer if it knows only a few candidates for each node.

    Only listed tokens can be drafted; a node whose row is all padding gets no children. Scores are
    comparable within a row: the best is tried first, and their softmax over the row's candidates
    serves as probabilities.
    """

    token_ids: IntArray  # [F, k]; -1 pads
    logits: FloatArray  # [F, k]; values at padding are not read


Rows: TypeAlias = "torch.Tensor | SparseRows"


class Expander(Protocol):
    """An expanding drafter's answer to "what comes after these nodes?", for many sessions.

    The answer is dense logits ``[rows, vocab]`` or :class:`SparseRows`. An expander that has
    hidden states for length controllers keeps those of its last answer in its attribute
    ``last_hidden``, one row for each row of the answer.  # [rows, hidden_size]
    One that estimates how likely the target accepts its tokens keeps that of its last answer in
    ``last_acceptance``.  # [rows]
    """

    def root(self, sessions: Sequence[SessionView]) -> Rows:
        """Candidates to follow the last committed token of each session.  # num_sessions rows"""
        ...

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> Rows:
        """Candidates to follow new nodes, all sessions in one forward.  # a row for each node

        Args:
            frontiers: for each session the ``(node, token_id, parent)`` triples to expand, in
                order. ``parent`` -1 is the last committed token; other parents were expanded
                before. Numbers refer to the tree under construction; the finished draft may leave
                nodes out and then has other numbers.
        """
        ...


class Shape(Protocol):
    """Grows one tree for each session; expands all sessions of a level in one forward.

    A frozen value: sessions with equal shapes grow their trees together.

    Attributes:
        draws: the ways of choosing children that keep the shape exact. A shape that picks nodes
            by the drawn tokens would bias a rule that corrects for q.
    """

    @property
    def draws(self) -> frozenset[Draws]: ...

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]: ...


BRANCHING = Knob[int](
    "branching", int, 1,
    "Width of a tree: children of each node (`kary`; `dyspec`: at most), nodes expanded in a level "
    "and children of each (`confidence`), beams (`rsd_s`) or sequences (`iid`).",
    ge=1, le=16, search=(2, 3, 4),
)  # fmt: skip
# The default is wide enough to lose little acceptance, narrow enough to send over a network; any
# width is exact.
DRAFT_SUPPORT = Knob[int](
    "draft_support", int, 64,
    "How many of the most likely tokens a sampled draft is drawn from (rejection sampling).",
    ge=1, le=4096,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePart:
    """A tree shape as the catalogue lists it.

    Attributes:
        make: the shape, from the knobs of a method.
        nodes: the default node budget of a draft, from the knobs and its depth, at least 1.
        knobs: those that the shape reads, with its defaults.
        depth: the depth of the tree, if the shape's knobs determine it.
        nodes_compete: which nodes a draft has depends on its budget and on the drafter's
            probabilities, so a simulation needs the order in which the nodes were taken.
        depth_changes_nodes: a shallower draft has other nodes, not just fewer, so a simulation
            needs a recording of each depth.
    """

    make: Callable[[Knobs], Shape]
    nodes: Callable[[Knobs, int], int]
    knobs: tuple[Knob[Any], ...] = ()
    depth: Callable[[Knobs], int] | None = None
    nodes_compete: bool = False
    depth_changes_nodes: bool = False


class Level:
    """An expander's answer for all nodes of a level, of all sessions.

    Args:
        rows: the answer.
        count: most children of a node.
    """

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows = rows
        self._count = count

    def row(self, index: int) -> tuple[IntArray | None, Row]:
        """A node's candidates (None: the whole vocabulary) and their raw logits."""
        if not isinstance(self.rows, SparseRows):
            return None, self.rows[index].float().cpu().numpy()
        ids = np.asarray(self.rows.token_ids[index])
        known = ids >= 0
        return ids[known], np.asarray(self.rows.logits[index], np.float32)[known]

    @cached_property
    def best(self) -> list[list[int]]:
        """The ``count`` most likely tokens of each row, computed in one call."""
        if not isinstance(self.rows, SparseRows):
            if self._count == 1:
                return [[token] for token in self.rows.argmax(-1).tolist()]
            return self._top[0].tolist()
        ids, logits = np.asarray(self.rows.token_ids), np.asarray(self.rows.logits)
        order = np.argsort(-np.where(ids >= 0, logits, -np.inf), axis=-1, kind="stable")
        ranked = np.take_along_axis(ids, order, -1)[:, : self._count].tolist()
        return [[token for token in row if token >= 0] for row in ranked]

    @cached_property
    def best_log_q(self) -> list[list[float]]:
        """Log probability of each token of :attr:`best`."""
        if not isinstance(self.rows, SparseRows):
            _, logits = self._top
            return (logits.float() - self.rows.float().logsumexp(-1, keepdim=True)).tolist()
        result = []
        for index, row in enumerate(self.best):
            scores = np.sort(self.row(index)[1].astype(np.float64))[::-1]
            result.append(_log_softmax(scores)[: len(row)].tolist() if row else [])
        return result

    @cached_property
    def _top(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely tokens and their logits.  # int64, logits' dtype [num_nodes, count]

        Among equally likely tokens the lowest id comes first, as with argmax, so every tree
        contains the chain as a branch. ``topk`` promises no order, and rounded logits are often
        equal.
        """
        assert not isinstance(self.rows, SparseRows)
        count = min(self._count, self.rows.shape[1])
        values, indices = self.rows.topk(min(count + 1, self.rows.shape[1]))
        tied = (values[:, 1:] == values[:, :-1]).any(-1)
        values, indices = values[:, :count], indices[:, :count]
        for i in tied.nonzero().flatten().tolist():
            among = (self.rows[i] >= values[i, -1]).nonzero().flatten()
            order = self.rows[i, among].sort(descending=True, stable=True).indices[:count]
            indices[i] = among[order]
            values[i] = self.rows[i, indices[i]]
        return indices, values


@dataclass(slots=True, eq=False)
class Choices:
    """Candidate children of one node, in the order in which to try them.

    Attributes:
        tokens: distinct, unless they were drawn with replacement.
        log_q: log probability of each under the drafter (above temperature 0, of logits over
            temperature; limited to ``draft_support`` tokens if the rule needs q).
        perturbed: ``log_q`` plus the noise that decided the order; equal to it without noise.
        confidences: softmax of the scores that decided the choice (q itself for a rule that
            needs q), if asked for.
        q_rows: the distribution that each was drawn from, for rules that need q.
        scores: the row of scores that decided the choice, as in :class:`DraftStep`; None if a
            plain argmax needed none.
    """

    tokens: list[int]
    log_q: list[float] = field(default_factory=list)
    perturbed: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    q_rows: list[tuple[IntArray, FloatArray]] = field(default_factory=list)
    scores: npt.NDArray[np.floating[Any]] | None = None


@dataclass(slots=True)
class TreeBuilder:
    """A draft under construction."""

    session: SessionView
    budget: Budget
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth_of: list[int] = field(default_factory=list)
    rank_of: list[int] = field(default_factory=list)  # place among the candidates of its parent
    values: list[tuple[float, ...]] = field(default_factory=list)  # of each node, for the shape
    q_rows: list[tuple[IntArray, FloatArray]] = field(default_factory=list)
    _streams: int = 0  # how many streams of independent noise are used so far

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root down to ``node``; empty for -1."""
        tokens = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def is_full(self) -> bool:
        """Whether the node budget is spent."""
        return len(self.token_ids) >= self.budget.nodes

    def add(self, node: int, choices: Choices, rank: int) -> int:
        """Make a candidate a child of ``node``; returns the new node."""
        self.token_ids.append(choices.tokens[rank])
        self.parents.append(node)
        self.depth_of.append(self.depth_of[node] + 1 if node >= 0 else 1)
        self.rank_of.append(rank)
        if choices.q_rows:
            self.q_rows.append(choices.q_rows[rank])
        return len(self.token_ids) - 1

    def add_children(self, node: int, level: Level, row: int, count: int) -> list[int]:
        """Choose up to ``count`` children of ``node`` from a row of the expander's answer.

        Returns the new nodes; fewer if the node budget is spent or the expander has no more.
        """
        count = min(count, self.budget.nodes - len(self.token_ids))
        if count <= 0:
            return []
        choices = self.choose(node, level, row, count)
        return [self.add(node, choices, rank) for rank in range(len(choices.tokens))]

    def add_link(self, node: int, level: Level, row: int, expander: Expander) -> list[int]:
        """Add one child as :meth:`add_children` does, and ask the stop rule whether to continue.

        Returns the new node, or an empty list if the chain ends.
        """
        if self.is_full:
            return []
        choices = self.choose(node, level, row, 1)
        if not choices.tokens:
            return []
        added = self.add(node, choices, 0)
        rule = self.session.stop_rule
        if rule is None:
            return [added]
        hidden = getattr(expander, "last_hidden", None) if rule.wants_hidden else None
        estimates = getattr(expander, "last_acceptance", None)
        step = DraftStep(
            depth=self.depth_of[added],
            token_id=choices.tokens[0],
            scores=level.row(row)[1] if choices.scores is None else choices.scores,
            hidden=None if hidden is None else hidden[row],
            acceptance=None if estimates is None else float(estimates[row]),
        )
        if not rule.stop_after(step):
            return [added]
        if rule.drops:
            self._remove_last()
        return []

    def _remove_last(self) -> None:
        for values in (self.token_ids, self.parents, self.depth_of, self.rank_of):
            values.pop()
        if self.q_rows:
            self.q_rows.pop()

    def choose(
        self, node: int, level: Level, row: int, count: int, *, weighted: bool = False
    ) -> Choices:
        """Up to ``count`` candidates for the children of ``node``, drawn as the rule wants.

        At temperature 0 they are the most likely tokens. Above it, the rule's ``draws`` decides:
        the most likely tokens; the best under the noise that the target will use (Gumbel top-k);
        independent draws from q, in which siblings may repeat a token; or draws without
        replacement (Gumbel top-k with separate noise), where the q of each is renormalised
        without its earlier siblings. q keeps the ``draft_support`` most likely tokens.

        Args:
            weighted: fill in ``log_q``, ``perturbed`` and ``confidences``.
        """
        params, draws = self.session.params, self.session.draws
        if params.is_plain_argmax:
            choices = Choices(level.best[row][:count])
            if weighted:
                choices.log_q = level.best_log_q[row][:count]
                choices.perturbed = choices.log_q
                choices.confidences = exp64(np.array(choices.log_q)).tolist()
            if draws.needs_q:
                choices.q_rows = [_point_mass(token) for token in choices.tokens]
            return choices
        ids, scores = self._scores(node, level, row)
        depth = self.depth_of[node] + 1 if node >= 0 else 1
        position = self.session.length + depth - 1
        if params.temperature == 0:
            choices = _best(ids, scores, scores, count, weighted)
            if draws.needs_q:
                choices.q_rows = [_point_mass(token) for token in choices.tokens]
            return choices
        if draws is Draws.TOP:
            return _best(ids, scores, scores, count, weighted)
        if draws is Draws.COUPLED:
            if count == 1 and ids is None and not weighted:
                token = perturbed_argmax(scores, params.seed, position)
                choices = Choices([token])
                if self.session.stop_rule is not None:
                    choices.scores = scores + gumbel(params.seed, position, len(scores))
                return choices
            if ids is None:
                noise = gumbel(params.seed, position, len(scores))
            else:
                noise = gumbel_at(params.seed, position, ids)
            return _best(ids, scores, scores + noise, count, weighted)
        return self._draw(ids, scores, position, count)

    def _scores(self, node: int, level: Level, row: int) -> tuple[IntArray | None, Probs]:
        """Candidates (None: the whole vocabulary) and processed logits, over temperature if > 0."""
        params = self.session.params
        ids, logits = level.row(row)
        if ids is not None:
            # Processors that read the whole vocabulary or the history make little sense for a few
            # candidates, and verification does not require a processed draft.
            scores: Probs = logits.astype(np.float64)
            return ids, scores / params.temperature if params.temperature else scores
        history = self.session.token_ids
        if params.depends_on_history:
            history = history + self.path_tokens(node)
        logits = process_logits(
            logits, params, history, self.session.prompt_length, self.session.stop_ids
        )
        if params.temperature == 0:
            return None, logits.astype(np.float64)
        return None, scaled_scores(logits, params)

    def _draw(self, ids: IntArray | None, scores: Probs, position: int, count: int) -> Choices:
        """Draws from the truncated and renormalised q; the choices carry q for the rule."""
        support = np.flatnonzero(np.isfinite(scores))
        limit = self.session.config[DRAFT_SUPPORT]
        if limit < len(support):
            # Not argpartition: which of several equals it takes depends on the processor.
            least = np.partition(scores[support], -limit)[-limit]
            support = support[scores[support] >= least]
            support = np.sort(support[np.argsort(-scores[support], kind="stable")[:limit]])
        if not len(support):
            return Choices([])
        tokens = support.astype(np.int64) if ids is None else ids[support]
        log_q = _log_softmax(scores[support])
        q = exp64(log_q)
        if self.session.draws is Draws.WITH_REPLACEMENT:
            total = np.stack([log_q + self._noise(position, tokens) for _ in range(count)])
            order = total.argmax(-1)
            perturbed = total.max(-1)
            q_rows = [(tokens, _normalised(q))] * count
        else:
            total = log_q + self._noise(position, tokens)
            order = np.argsort(-total, kind="stable")[:count]
            perturbed = total[order]
            q_rows, left = [], np.ones(len(tokens), np.bool_)
            for place in order:
                q_rows.append((tokens[left], _normalised(q[left])))
                left[place] = False
        return Choices(
            tokens[order].tolist(),
            log_q[order].tolist(),
            perturbed.tolist(),
            q[order].tolist(),
            q_rows,
            scores,
        )

    def _noise(self, position: int, token_ids: IntArray) -> Probs:
        salt = Salt.DRAFT + _STREAM_STRIDE * self._streams
        self._streams += 1
        return gumbel_at(self.session.params.seed, position, token_ids, salt)

    def draft(self, keep: Sequence[int] | None = None) -> Draft:
        """The finished draft, with all nodes or those in ``keep``, which includes their parents."""
        probs = DraftProbs.stack(self.q_rows) if self.session.draws.needs_q else None
        whole = Draft(
            np.asarray(self.token_ids, np.int64), np.asarray(self.parents, np.int32), probs
        )
        return whole if keep is None else subset(whole, np.sort(np.asarray(keep, np.int64)))


def expand(
    expander: Expander, frontiers: Sequence[tuple[TreeBuilder, Sequence[int]]], count: int
) -> Level:
    """Expand the given nodes of each tree in one forward; rows are in the order of the nodes."""
    rows = expander.expand(
        [tree.session for tree, _ in frontiers],
        [
            [(node, tree.token_ids[node], tree.parents[node]) for node in nodes]
            for tree, nodes in frontiers
        ],
    )
    return Level(rows, count)


Step: TypeAlias = Callable[[TreeBuilder, list[int], Level, int], list[int]]


def grow(
    expander: Expander, trees: Sequence[TreeBuilder], step: Step, width: Callable[[int], int]
) -> None:
    """Grow trees level by level, each level of all trees in one forward.

    Args:
        step: adds a level to a tree, given the expanded nodes (-1: the root), the expander's
            answer, and the row of the first node; returns the nodes to expand next. The last level
            is never expanded, as nothing is drafted after it.
        width: most candidates of a node at the given depth (0: the root).
    """
    going = [(tree, [-1]) for tree in trees if tree.budget.depth > 0 and tree.budget.nodes > 0]
    depth = 0
    while going:
        if depth == 0:
            level = Level(expander.root([tree.session for tree, _ in going]), width(0))
        else:
            level = expand(expander, going, width(depth))
        depth += 1
        row, grown = 0, []
        for tree, frontier in going:
            grown.append((tree, step(tree, frontier, level, row)))
            row += len(frontier)
        going = [
            (tree, frontier)
            for tree, frontier in grown
            if frontier and depth < tree.budget.depth and not tree.is_full
        ]


def _best(ids: IntArray | None, scores: Probs, total: Probs, count: int, weighted: bool) -> Choices:
    """The candidates with the highest ``total``; ties go to the one listed first."""
    if count == 1:
        order = np.array([total.argmax()]) if len(total) else np.empty(0, np.int64)
    else:
        order = np.arange(len(total))
        if count < len(total) // 8:  # sorting a whole vocabulary would cost too much
            order = np.flatnonzero(total >= np.partition(total, -count)[-count])
        order = order[np.argsort(-total[order], kind="stable")[:count]]
    order = order[np.isfinite(total[order])]
    tokens: list[int] = (order if ids is None else ids[order]).tolist()
    if not weighted or not tokens:
        return Choices(tokens, scores=total)
    shift = _log_sum_exp(scores)
    return Choices(
        tokens,
        (scores[order] - shift).tolist(),
        (total[order] - shift).tolist(),
        exp64(total[order] - _log_sum_exp(total)).tolist(),
        scores=total,
    )


def _log_sum_exp(scores: Probs) -> float:
    highest = scores.max()
    return float(highest + log_of(weights64(scores)[1]))


def _log_softmax(scores: Probs) -> Probs:
    result: Probs = scores - _log_sum_exp(scores)
    return result


def _normalised(weights: Probs) -> FloatArray:
    q: FloatArray = (weights / sum64(weights)).astype(np.float32)
    q /= np.float32(sum64(q))
    return q


def _point_mass(token: int) -> tuple[IntArray, FloatArray]:
    return np.array([token], np.int64), np.ones(1, np.float32)
