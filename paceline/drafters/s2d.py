"""A draft model with sub-models in it: each token comes from the shallowest one that is sure of it.

S2D, Kavehzadeh et al. 2024 (arXiv 2407.01955). The sub-models are the first layers of one draft
model, read out through its norm and head (sorted fine-tuning trains them together). A token whose
probability at an exit is below the threshold goes on to the next exit, and what it attends to goes
on with it: entries that left early get the keys and values of deeper layers when a deeper token
needs them, and in any case, all in one forward, when they are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.base import Drafter, DrafterContext, DrafterPart, grow, padded
from paceline.errors import InvalidArgument
from paceline.knobs import Knob, Knobs
from paceline.models.base import KVSequence, Segment
from paceline.models.exits import EXIT_LAYERS, check_exits
from paceline.types import Budget, Draft, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

PREFILL_CHUNK = 512
_NO_TOKENS = np.empty(0, np.int64)
_NO_PARENTS = np.empty(0, np.int32)

Path = tuple[int, ...]  # the tokens from the root's child down to a node

EXIT_THRESHOLD = Knob[float](
    "exit_threshold", float, 0.6,
    "Least probability at which `s2d` takes a shallow sub-model's token; 0 always takes the "
    "shallowest sub-model, 1 always the deepest.",
    ge=0.0, le=1.0, search=(0.4, 0.6, 0.8), costs=True,
)  # fmt: skip


@dataclass(slots=True, eq=False)
class _State:
    """A session in the draft model. Committed entries have been through all layers in use.

    Attributes:
        exits: layers of each sub-model, ascending.
        threshold: probability from which on a token is taken.
        num_catch_up: pending entries that hold committed tokens; 0 when nothing was drafted.
        parents, reached: of each pending entry, its parent and the layers it has been through.
        entry_of, path_of: of each node; -1 is the last committed token.
        entries: the first entry with a path.
    """

    sequence: KVSequence
    exits: tuple[int, ...]
    threshold: float
    num_catch_up: int = 0
    parents: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    entry_of: dict[int, int] = field(default_factory=dict)
    path_of: dict[int, Path] = field(default_factory=dict)
    entries: dict[Path, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget all pending entries."""
        self.num_catch_up = 0
        self.parents, self.reached = [], []
        self.entry_of, self.path_of, self.entries = {}, {-1: ()}, {}

    def append(self, token_ids: Sequence[int], parents: Sequence[int]) -> Segment:
        """New pending entries, to be computed up to the first exit."""
        self.parents += parents
        self.reached += [self.exits[0]] * len(parents)
        return Segment(
            self.sequence, np.asarray(token_ids, np.int64), np.asarray(parents, np.int32),
            layers=range(self.exits[0]), resumable=len(self.exits) > 1,
        )  # fmt: skip

    def deepen(self, entries: Sequence[int], layers: int) -> Segment:
        """Compute pending entries, parents first, up to ``layers``."""
        for entry in entries:
            self.reached[entry] = layers
        return Segment(
            self.sequence, _NO_TOKENS, _NO_PARENTS,
            layers=range(layers), resumable=layers < self.exits[-1], resume=entries,
        )  # fmt: skip

    def shallow(self, entries: Sequence[int], layers: int) -> list[int]:
        """``entries`` and what is pending above them, as far as it left before ``layers``."""
        found: set[int] = set()
        for entry in entries:
            while entry >= 0 and entry not in found:
                found.add(entry)
                entry = self.parents[entry]
        return sorted(entry for entry in found if self.reached[entry] < layers)


class S2D(Drafter):
    """Expands nodes with the sub-models of the engine's draft model; any shape, any target.

    It has KV of its own in the draft model's runner.

    Raises:
        InvalidArgument: the draft model is not on the fast path.
    """

    def __init__(self, context: DrafterContext) -> None:
        from paceline.models.llama import LlamaRunner

        runner = getattr(context.drafter("draft_model"), "runner", None)
        if not isinstance(runner, LlamaRunner):
            raise InvalidArgument(
                "method", "s2d",
                "a draft model on the fast path (Llama, Mistral, Qwen2 or Qwen3), in this process",
            )  # fmt: skip
        self.runner = runner
        self._padding = context.vocab_size - runner.vocab_size
        self._states: dict[str, _State] = {}

    def check_knobs(self, knobs: Knobs) -> None:
        """Raises InvalidArgument for an exit that the draft model does not have."""
        check_exits(knobs, self.runner.config.num_layers, "the draft model")

    def open(self, session: SessionView) -> None:
        config = session.config
        threshold = config[EXIT_THRESHOLD]
        given = config[EXIT_LAYERS] or halvings(self.runner.config.num_layers)
        exits = tuple(sorted(set(given)))
        if threshold == 0.0:
            exits = exits[:1]  # no later round needs the layers behind it
        elif threshold == 1.0:
            exits = exits[-1:]
        state = _State(self.runner.new_sequence(), exits, threshold)
        state.forget()
        self._states[session.session_id] = state

    def close(self, session: SessionView) -> None:
        state = self._states.pop(session.session_id, None)
        if state is not None:
            self.runner.free(state.sequence)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        context = self.runner.context_length  # which may be shorter than the target's
        fitting = [
            budget if session.length + budget.depth <= context else Budget(0, 0)
            for session, budget in zip(sessions, budgets, strict=True)
        ]
        return grow(self, sessions, fitting)

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        """Catch up with the committed tokens; logits after the last.  # [num_sessions, vocab]"""
        rows, segments = [], []
        for session in sessions:
            state = self._states[session.session_id]
            if state.sequence.num_pending:  # no outcome came
                self.runner.commit(state.sequence, ())
            state.forget()
            behind = session.token_ids[state.sequence.length :]
            while len(behind) > 2:  # a prompt; after a round there are one or two tokens
                chunk = behind[:-1][:PREFILL_CHUNK]
                self._read(state, chunk)
                behind = behind[len(chunk) :]
            state.num_catch_up = len(behind)
            segments.append(state.append(behind, range(-1, len(behind) - 1)))
            state.entry_of[-1] = len(behind) - 1
            rows.append((state, len(behind) - 1))
        result = self.runner.forward(segments)
        last = [result.row_offsets[i + 1] - 1 for i in range(len(segments))]
        return self._settle(rows, result.logits[last])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        rows, segments = [], []
        for session, frontier in zip(sessions, frontiers, strict=True):
            state = self._states[session.session_id]
            for entry, (node, token, parent) in enumerate(frontier, len(state.parents)):
                path = state.path_of[node] = (*state.path_of[parent], token)
                state.entry_of[node] = entry
                state.entries.setdefault(path, entry)
                rows.append((state, entry))
            parents = [state.entry_of[parent] for _, _, parent in frontier]
            segments.append(state.append([token for _, token, _ in frontier], parents))
        return self._settle(rows, self.runner.forward(segments).logits)

    def _read(self, state: _State, token_ids: Sequence[int]) -> None:
        """Committed tokens, through all layers in use."""
        tokens = np.asarray(token_ids, np.int64)
        layers = range(state.exits[-1])
        self.runner.forward([Segment(state.sequence, tokens, logits="none", layers=layers)])
        self.runner.commit(state.sequence, range(len(tokens)))

    def _settle(self, rows: Sequence[tuple[_State, int]], logits: torch.Tensor) -> torch.Tensor:
        """Read each row's logits from the shallowest exit whose token reaches the threshold.

        Args:
            rows: sessions one after the other, each with a pending entry.
            logits: from the first exit.  # [num_rows, runner's vocab]
        """
        unsure = list(range(len(rows)))
        for stage in count(1):
            unsure = [i for i in unsure if stage < len(rows[i][0].exits)]
            if not unsure:
                break
            scores = logits[unsure]
            chances = (scores.max(-1).values - scores.logsumexp(-1)).exp().tolist()
            unsure = [i for i, p in zip(unsure, chances, strict=True) if p < rows[i][0].threshold]
            if unsure:
                logits[unsure] = self._deepen([rows[i] for i in unsure], stage)
        return padded(logits, self._padding)

    def _deepen(self, rows: Sequence[tuple[_State, int]], stage: int) -> torch.Tensor:
        """Logits of ``rows`` from the exit number ``stage``."""
        members: dict[int, tuple[_State, list[int]]] = {}
        for state, entry in rows:
            members.setdefault(id(state), (state, []))[1].append(entry)
        segments, places = [], []
        first = 0
        for state, entries in members.values():
            going = state.shallow(entries, state.exits[stage])
            places += [first + going.index(entry) for entry in entries]
            first += len(going)
            segments.append(state.deepen(going, state.exits[stage]))
        return self.runner.forward(segments).logits[places]

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Keep the entries of accepted tokens, once they have been through all layers in use."""
        kept: dict[str, list[int]] = {}
        for session, outcome in zip(sessions, outcomes, strict=True):
            state = self._states.get(session.session_id)
            if state is None or not state.num_catch_up:
                continue
            entries = list(range(state.num_catch_up))
            path: Path = ()
            for token in outcome.token_ids[: outcome.num_accepted]:
                path = (*path, token)
                if path not in state.entries:
                    break  # never expanded, as the last of a chain
                entries.append(state.entries[path])
            kept[session.session_id] = entries
        self._commit(kept)

    def _commit(self, kept: Mapping[str, Sequence[int]]) -> None:
        segments = []
        for session_id, entries in kept.items():
            state = self._states[session_id]
            going = state.shallow(entries, state.exits[-1])
            if going:
                segments.append(replace(state.deepen(going, state.exits[-1]), logits="none"))
        if segments:
            self.runner.forward(segments)
        for session_id, entries in kept.items():
            state = self._states[session_id]
            self.runner.commit(state.sequence, entries)
            state.forget()


def halvings(num_layers: int) -> tuple[int, ...]:
    """All layers, half of them, half of those, down to one."""
    found = []
    while num_layers:
        found.append(num_layers)
        num_layers //= 2
    return tuple(found[::-1])


S2D_PART = DrafterPart(make=S2D, knobs=(EXIT_LAYERS, EXIT_THRESHOLD), replay="prefix")
