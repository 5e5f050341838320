"""Replays acceptance on traces: what a configuration would do to these prompts, in no time.

At every position of the target's output the traces say how many drafted tokens a configuration
would have accepted there. Decoding visits some of the positions: from ``i`` with ``a`` accepted
tokens it goes on at ``i + a + 1``. Rounds counted so are those of the real engine, not an estimate;
seconds come from measured costs. The controller ``goodput`` is taken for its best constant length,
which it looks for and which it may outdo or miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import MAX_NODES, SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.plan import Plan, resolve
from paceline.shapes.base import Shape
from paceline.shapes.template import Template
from paceline.types import Budget
from tuning.costs import Costs, RoundCosts, Size, cost_group, draft_size
from tuning.families import Family, is_ar, parts_of, why_not
from tuning.recordings import ABSENT, NUM_RANKS, OrderRecording, RankRecording, Recording
from tuning.results import Point, Prediction
from tuning.shapes import StaticShape, paths_of
from tuning.traces import Traces

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """The rounds in which the prompts' outputs are made, one prompt after the other.

    Attributes:
        accepted: drafted tokens that each round commits.  # [rounds]
        nodes: of each round's draft.  # [rounds]
        prompts: each round's.  # [rounds]
        num_tokens: committed by all of them.
    """

    accepted: Ints
    nodes: Ints
    prompts: Ints
    num_tokens: int

    @property
    def mean_accepted_length(self) -> float:
        """Committed tokens for each target forward."""
        return self.num_tokens / len(self.accepted)


class Simulator:
    """Predicts what configurations do to the prompts of some traces.

    Args:
        traces: say what would be accepted.
        costs: say what it would take; without them only :meth:`rounds` works.
        dtype: of the target that both were recorded with.

    Raises:
        InvalidArgument: the costs are for another concurrency.
    """

    def __init__(self, traces: Traces, costs: Costs | None = None, dtype: str = "float32") -> None:
        if costs is not None and costs.concurrency != traces.concurrency:
            allowed = f"costs for {traces.concurrency} sessions at a time, as the traces"
            raise InvalidArgument("costs", f"for {costs.concurrency}", allowed)
        self.traces = traces
        self.costs = costs
        self.dtype = dtype
        truth = traces.truth
        lengths = np.diff(truth.offsets)
        index = np.arange(len(truth.output_ids)) - np.repeat(truth.offsets[:-1], lengths)
        # At most so deep is a draft: one place is for the target's own token.
        self._room = np.repeat(truth.room, lengths) - index - 1
        self._left = np.repeat(lengths, lengths) - index  # tokens that come
        self._behind = np.repeat(truth.prompt_lengths, lengths) + index  # committed tokens
        self._rounds: dict[tuple[str, Shape | None, int, int], Rounds] = {}

    # --- acceptance -------------------------------------------------------------------------------

    def rounds(self, config: SpeculationConfig) -> Rounds | None:
        """The rounds of a configuration with a constant length; None where it is not recorded.

        These are the rounds that the engine has: the same number, with as many accepted tokens
        and nodes.
        """
        plan = resolve(config)
        if self._why_not(plan) is not None:
            return None
        if is_ar(plan):
            return self._ar
        if plan.config.length != "fixed":
            return None
        ((family, budget),) = parts_of(plan)
        return self._rounds_of(plan, family, budget)

    @cached_property
    def _ar(self) -> Rounds:
        nothing = np.zeros(len(self._left), np.int64)
        return self._walk(nothing, nothing)

    def _rounds_of(self, plan: Plan, family: Family, budget: Budget) -> Rounds:
        key = family.key, plan.shape, budget.depth, budget.nodes
        if key not in self._rounds:
            recording = self.traces.recordings[family.key]
            self._rounds[key] = self._walk(*self._drafts(recording, plan.shape, budget))
        return self._rounds[key]

    def _drafts(
        self, recording: Recording, shape: Shape | None, budget: Budget
    ) -> tuple[Ints, Ints]:
        """Accepted tokens and nodes of a draft at every position.  # 2 x [positions]"""
        if isinstance(recording, RankRecording | OrderRecording):
            limits = np.minimum(self._room, budget.depth)
            if recording.context_length:  # counted with what the loop asks for
                fits = self._behind + limits <= recording.context_length
                limits = np.where(fits, limits, 0)
            if isinstance(recording, RankRecording):
                assert isinstance(shape, StaticShape)
                if not recording.prefix_only:
                    limits = np.minimum(limits, recording.reached)
                accepted, nodes = self._static(recording, shape, budget.nodes, limits)
            else:
                limits = np.minimum(limits, recording.reached)
                accepted, nodes = _competing(recording, budget.nodes, limits)
        else:
            column = recording.place(budget)
            assert column is not None
            accepted = recording.accepted[:, column].astype(np.int64)
            nodes = recording.nodes[:, column].astype(np.int64)
        # A stop condition may cut what was accepted.
        return np.minimum(accepted, self._left), nodes

    def _static(
        self, recording: RankRecording, shape: StaticShape, nodes: int, limits: Ints
    ) -> tuple[Ints, Ints]:
        """Follow the right tokens' ranks down a tree."""
        deepest = int(limits.max(initial=0))
        ranks = self._ranks(recording, deepest)
        accepted = _follow(paths_of(shape, deepest, nodes), ranks)
        accepted = np.minimum(accepted, limits)
        counts = np.zeros(deepest + 1, np.int64)
        for depth in range(1, deepest + 1):
            paths = paths_of(shape, depth, nodes)
            counts[depth] = len(paths)
            # A template that is cut by its budget has other nodes where it may not be so deep.
            cut = isinstance(shape, Template) and len(shape.paths) > nodes
            if cut and depth < deepest and (near := np.flatnonzero(limits == depth)).size:
                accepted[near] = _follow(paths, ranks[near])
        return accepted, counts[limits]

    def _ranks(self, recording: RankRecording, depth: int) -> npt.NDArray[np.uint8]:
        """Ranks along the right path.  # [positions, depth]"""
        if not recording.prefix_only:
            return recording.ranks[:, :depth]
        first = recording.ranks[:, 0]
        padded = np.concatenate([first, np.full(depth, ABSENT, np.uint8)])
        # What lies behind the end of an output is another prompt's, and behind every limit.
        shifted = np.lib.stride_tricks.sliding_window_view(padded, depth) if depth else padded
        ranks: npt.NDArray[np.uint8] = shifted[: len(first)].reshape(len(first), depth)
        return ranks

    def _walk(self, accepted: Ints, nodes: Ints) -> Rounds:
        steps = (accepted + 1).tolist()
        offsets = self.traces.truth.offsets.tolist()
        visited: list[int] = []
        prompts: list[int] = []
        for prompt, end in enumerate(offsets[1:]):
            at, before = offsets[prompt], len(visited)
            while at < end:
                visited.append(at)
                at += steps[at]
            prompts += [prompt] * (len(visited) - before)
        at_rounds = np.array(visited)
        return Rounds(accepted[at_rounds], nodes[at_rounds], np.array(prompts), len(self._left))

    # --- seconds ----------------------------------------------------------------------------------

    def predict(self, point: Point) -> Prediction | None:
        """Goodput over AR's and mean accepted length; None where :meth:`why_not` has a reason."""
        if self.why_not(point) is not None:
            return None
        plan = resolve(point.speculation)
        if is_ar(plan):
            best, rounds = 1.0, self._ar
        else:
            ratio = {
                i: self._ratio(plan, family, budget)
                for i, (family, budget) in enumerate(parts_of(plan))
            }
            chosen = max(ratio, key=lambda i: ratio[i])
            best = ratio[chosen]
            rounds = self._rounds_of(plan, *parts_of(plan)[chosen])
            if plan.config.length == "goodput" and not plan.config.length_min and best < 1.0:
                best, rounds = 1.0, self._ar
        return Prediction(
            key=point.key,
            point=point,
            goodput_ratio=best,
            mean_accepted_length=rounds.mean_accepted_length,
        )

    def predict_all(self, points: Iterable[Point]) -> list[Prediction]:
        """Those of the points that can be predicted, in order."""
        found = (self.predict(point) for point in points)
        return [prediction for prediction in found if prediction is not None]

    def why_not(self, point: Point) -> str | None:
        """Why there is no prediction for a point; None where there is one."""
        if point.topology != "colocated":
            return "what it costs to reach a drafter elsewhere was not measured"
        if point.dtype != self.dtype:
            return f"the traces are those of a {self.dtype} target"
        plan = resolve(point.speculation)
        reason = self._why_not(plan)
        if reason is not None or is_ar(plan):
            return reason
        for family, _ in parts_of(plan):
            if self.costs is None or cost_group(family, plan) not in self.costs.groups:
                return "what its rounds cost was not measured"
        return None

    def _why_not(self, plan: Plan) -> str | None:
        reason = why_not(plan, self.traces.params)
        if reason is not None or is_ar(plan):
            return reason
        for family, budget in parts_of(plan):
            if family.key in self.traces.refused:
                return self.traces.refused[family.key]
            recording = self.traces.recordings.get(family.key)
            if recording is None or not recording.covers(budget):
                return "what its drafter proposes was not recorded"
        return None

    def _ratio(self, plan: Plan, family: Family, budget: Budget) -> float:
        assert self.costs is not None
        costs = self.costs.groups[cost_group(family, plan)]
        size = draft_size(plan, budget)
        rounds = self._rounds_of(plan, family, budget)
        return self._ar_seconds / self._seconds(rounds, costs, size)

    @cached_property
    def _ar_seconds(self) -> float:
        assert self.costs is not None
        return self._seconds(self._ar, self.costs.ar, Size(0, 0, 0))

    def _seconds(self, rounds: Rounds, costs: RoundCosts, size: Size) -> float:
        """Until all prompts are done, ``concurrency`` of them at a time."""
        prefill = costs.prefill * float(self.traces.truth.prompt_lengths.sum())
        active, nodes = self._steps(rounds)
        table = self._verify_table
        whole = np.minimum(nodes.astype(np.int64), MAX_NODES - 1)
        share = np.minimum(nodes - whole, 1.0)
        verify = (1 - share) * table[active, whole] + share * table[active, whole + 1]
        # Drafting and the rest are measured with all sessions; of fewer they cost less.
        scale = table[active, 0] / table[self.traces.concurrency, 0]
        verify *= costs.verify_factor(size.exit_layer)
        return prefill + float((verify + (costs.drafting(size) + costs.rest) * scale).sum())

    def _steps(self, rounds: Rounds) -> tuple[Ints, Floats]:
        """Sessions that take part in each step of the engine, and their mean number of nodes."""
        together = self.traces.concurrency
        if together == 1:
            return np.ones(len(rounds.nodes), np.int64), rounds.nodes.astype(np.float64)
        count = np.bincount(rounds.prompts, minlength=self.traces.truth.num_prompts)
        first = np.cumsum(count) - count
        turn = np.arange(len(rounds.prompts)) - first[rounds.prompts]  # of each round
        step = rounds.prompts // together * int(count.max()) + turn
        active = np.bincount(step)
        nodes = np.bincount(step, weights=rounds.nodes)
        used = active > 0
        return active[used], nodes[used] / active[used]

    @cached_property
    def _verify_table(self) -> Floats:
        """Seconds of a forward by sessions and nodes.  # [concurrency + 1, MAX_NODES + 1]"""
        assert self.costs is not None
        profile = self.costs.profile
        return np.array(
            [
                [profile.verify(1 + nodes, max(1, batch)) for nodes in range(MAX_NODES + 1)]
                for batch in range(self.traces.concurrency + 1)
            ]
        )


def _competing(recording: OrderRecording, nodes: int, limits: Ints) -> tuple[Ints, Ints]:
    """Take the first ``nodes`` nodes of the tree that is as deep as the limits."""
    column = np.maximum(limits - 1, 0)
    rows = np.arange(len(limits))
    taken = recording.before[rows, :, column] < nodes  # [positions, depth]
    drafts = limits > 0
    accepted = np.where(drafts, taken.sum(axis=1), 0)
    total = recording.total[rows, column].astype(np.int64)
    return accepted.astype(np.int64), np.where(drafts, np.minimum(total, nodes), 0)


def _follow(paths: tuple[tuple[int, ...], ...], ranks: npt.NDArray[np.uint8]) -> Ints:
    """How far the ranks of each row lead in a tree.  # [rows, depth] -> [rows]"""
    table, dead = _steps_of(paths)
    state = np.zeros(len(ranks), np.int32)
    accepted = np.zeros(len(ranks), np.int64)
    for depth in range(ranks.shape[1]):
        state = table[state, np.minimum(ranks[:, depth], NUM_RANKS)]
        going = state != dead
        if not going.any():
            break
        accepted += going
    return accepted


@lru_cache(maxsize=256)
def _steps_of(paths: tuple[tuple[int, ...], ...]) -> tuple[npt.NDArray[Any], int]:
    """Where each rank leads from each node; node 0 is the root, the last one has no way on.

    # int32 [nodes + 2, NUM_RANKS + 1]
    """
    dead = len(paths) + 1
    table = np.full((dead + 1, NUM_RANKS + 1), dead, np.int32)
    number = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
    for path, node in number.items():
        if path and path[-1] < NUM_RANKS:
            table[number[path[:-1]], path[-1]] = node
    return table, dead
