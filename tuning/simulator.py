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
from paceline.tuning.costs import MeasuredCosts, SimulatedRound, Size, draft_size
from paceline.tuning.families import FamilyPart, is_ar, parts_of, why_not
from paceline.tuning.recordings import ABSENT, NUM_RANKS, OrderRecording, RankRecording
from paceline.tuning.results import Point, PredictedResult
from paceline.tuning.shapes import StaticShape, paths_of
from paceline.tuning.traces import Traces

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """The rounds in which the prompts' outputs are made, one prompt after the other.

    Attributes:
        accepted: drafted tokens that each round commits.  # [rounds]
        nodes: of each round's draft.  # [rounds]
        prompts: each round's.  # [rounds]
        fell_back: whether the fallback of a hybrid drafted, in which nothing was found.  # [rounds]
        num_tokens: committed by all of them.
    """

    accepted: Ints
    nodes: Ints
    prompts: Ints
    fell_back: npt.NDArray[np.bool_]
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

    def __init__(
        self, traces: Traces, costs: MeasuredCosts | None = None, dtype: str = "float32"
    ) -> None:
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
        self._rounds: dict[tuple[str, Shape | None, int, int, int], Rounds] = {}

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
        (part,) = parts_of(plan)
        return self._rounds_of(part)

    @cached_property
    def _ar(self) -> Rounds:
        nothing = np.zeros(len(self._left), np.int64)
        return self._walk(nothing, nothing, nothing > 0)

    def _rounds_of(self, part: FamilyPart) -> Rounds:
        shape, budget = part.plan.shape, part.budget
        other = part.fallback.budget.depth if part.fallback else 0
        key = part.family.key, shape, budget.depth, budget.nodes, other
        if key not in self._rounds:
            accepted, nodes = self._drafts(part)
            falls_back = np.zeros(len(nodes), np.bool_)
            if part.fallback is not None:
                falls_back = nodes == 0
                instead = self._drafts(part.fallback)
                accepted = np.where(falls_back, instead[0], accepted)
                nodes = np.where(falls_back, instead[1], nodes)
            self._rounds[key] = self._walk(accepted, nodes, falls_back)
        return self._rounds[key]

    def _drafts(self, part: FamilyPart) -> tuple[Ints, Ints]:
        """Accepted tokens and nodes of a draft at every position.  # 2 x [positions]"""
        recording, budget = self.traces.recordings[part.family.key], part.budget
        if isinstance(recording, RankRecording | OrderRecording):
            limits = np.minimum(self._room, budget.depth)
            if recording.context_length:  # counted with what the loop asks for
                fits = self._behind + limits <= recording.context_length
                limits = np.where(fits, limits, 0)
            if isinstance(recording, RankRecording):
                shape = part.plan.shape
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

    def _walk(self, accepted: Ints, nodes: Ints, falls_back: npt.NDArray[np.bool_]) -> Rounds:
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
        return Rounds(
            accepted[at_rounds], nodes[at_rounds], np.array(prompts), falls_back[at_rounds],
            len(self._left),
        )  # fmt: skip

    # --- seconds ----------------------------------------------------------------------------------

    def predict(self, point: Point) -> PredictedResult | None:
        """Goodput over AR's and mean accepted length; None where :meth:`why_not` has a reason."""
        if self.why_not(point) is not None:
            return None
        plan = resolve(point.speculation)
        if is_ar(plan):
            best, rounds = 1.0, self._ar
        else:
            best, rounds = max(
                ((self._ratio(part), self._rounds_of(part)) for part in parts_of(plan)),
                key=lambda found: found[0],
            )
            if plan.config.length == "goodput" and not plan.config.length_min and best < 1.0:
                best, rounds = 1.0, self._ar
        return PredictedResult(
            key=point.key,
            point=point,
            goodput_ratio=best,
            mean_accepted_length=rounds.mean_accepted_length,
        )

    def predict_all(self, points: Iterable[Point]) -> list[PredictedResult]:
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
        parts = [each for part in parts_of(plan) for each in part.everything()]
        if self.costs is None or any(p.cost_group not in self.costs.groups for p in parts):
            return "what its rounds cost was not measured"
        return None

    def _why_not(self, plan: Plan) -> str | None:
        reason = why_not(plan, self.traces.params)
        if reason is not None or is_ar(plan):
            return reason
        for part in (each for whole in parts_of(plan) for each in whole.everything()):
            if part.family.key in self.traces.refused:
                return self.traces.refused[part.family.key]
            if not self.traces.covers(part):
                return "what its drafter proposes was not recorded"
        return None

    def _ratio(self, part: FamilyPart) -> float:
        assert self.costs is not None
        rounds, groups = self._rounds_of(part), self.costs.groups
        own = groups[part.cost_group]
        if part.fallback is None:
            return self._ar_seconds / self._seconds(rounds, own, draft_size(part))
        # The lookup is asked in every round; the rest of a round is what it is with the model.
        other, size = groups[part.fallback.cost_group], draft_size(part.fallback)
        seconds = self._seconds(rounds, other, size, own.drafting(draft_size(part)))
        return self._ar_seconds / seconds

    @cached_property
    def _ar_seconds(self) -> float:
        assert self.costs is not None
        return self._seconds(self._ar, self.costs.ar, Size(0, 0, 0))

    def _seconds(
        self, rounds: Rounds, costs: SimulatedRound, size: Size, lookup: float | None = None
    ) -> float:
        """Until all prompts are done, ``concurrency`` of them at a time.

        Args:
            lookup: of a hybrid; then only the rounds that fell back draft at these costs.
        """
        prefill = costs.prefill * float(self.traces.truth.prompt_lengths.sum())
        active, nodes, fell_back = self._steps(rounds)
        table = self._verify_table
        whole = np.minimum(nodes.astype(np.int64), MAX_NODES - 1)
        share = np.minimum(nodes - whole, 1.0)
        verify = (1 - share) * table[active, whole] + share * table[active, whole + 1]
        verify *= costs.verify_factor(size.exit_layer)
        others = costs.rest + costs.drafting(size) * (1.0 if lookup is None else fell_back)
        others += lookup or 0.0
        # These are measured with all sessions; of fewer they cost less.
        scale = table[active, 0] / table[self.traces.concurrency, 0]
        return prefill + float((verify + others * scale).sum())

    def _steps(self, rounds: Rounds) -> tuple[Ints, Floats, Floats]:
        """Sessions in each step of the engine, their mean nodes, and the share that fell back."""
        together = self.traces.concurrency
        if together == 1:
            step = np.arange(len(rounds.nodes))
        else:
            count = np.bincount(rounds.prompts, minlength=self.traces.truth.num_prompts)
            first = np.cumsum(count) - count
            turn = np.arange(len(rounds.prompts)) - first[rounds.prompts]  # of each round
            step = rounds.prompts // together * int(count.max()) + turn
        active = np.bincount(step)
        used = active > 0
        sums = [np.bincount(step, values)[used] for values in (rounds.nodes, rounds.fell_back)]
        return active[used], sums[0] / active[used], sums[1] / active[used]

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
