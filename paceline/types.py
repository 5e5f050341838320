"""The values that travel through the loop: drafts, verifications, outcomes.

All but :class:`ShadowDraft` are frozen: state lives in the session, the KV cache and the drafter.
Token ids and tree structure are NumPy arrays (they are tiny, and cross process boundaries);
logits are torch tensors on the device that computed them.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument

if TYPE_CHECKING:  # clients of a server need not have torch
    import torch

IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Need(enum.Enum):
    """What a drafter needs from the target beyond the accepted tokens."""

    TREE_LOGITS = "tree_logits"
    HIDDEN_STATES = "hidden_states"
    LAYER_STATES = "layer_states"
    KV_ENTRIES = "kv_entries"
    SHARED_MODEL = "shared_model"


STATES = frozenset({Need.HIDDEN_STATES, Need.LAYER_STATES})
"""What heads read of a forward."""


@dataclass(frozen=True, slots=True)
class StatesLayout:
    """Which states of the target a drafter reads, and where they stand in what it is sent.

    Attributes:
        need: ``HIDDEN_STATES``, after the final norm, or ``LAYER_STATES``, after layers.
        layers: with ``LAYER_STATES``, the numbers of these layers from 1, in the order in which
            their states are sent.
        hidden_size: numbers in one state.
    """

    need: Need
    layers: tuple[int, ...]
    hidden_size: int

    @property
    def num_values(self) -> int:
        """Numbers for each token."""
        return max(1, len(self.layers)) * self.hidden_size

    def take(self, extras: Mapping[Need, torch.Tensor]) -> torch.Tensor:
        """These states, from what a forward computed.  # [num_tokens, num_values]"""
        computed = extras[self.need]
        if self.need is Need.LAYER_STATES:
            computed = computed[:, [number - 1 for number in self.layers]]
        return computed.flatten(1)


class Draws(enum.Enum):
    """How an acceptance rule wants the children of a node to be chosen above temperature 0.

    At temperature 0 all of them mean the most likely tokens.
    """

    TOP = "top"  # the most likely ones
    COUPLED = "coupled"  # the best under the noise that the target will use
    WITH_REPLACEMENT = "with_replacement"  # independent draws from q, which the draft carries
    WITHOUT_REPLACEMENT = "without_replacement"  # draws from q without those drawn before

    @property
    def needs_q(self) -> bool:
        """Whether drafts must carry the distributions that their nodes were drawn from."""
        return self in (Draws.WITH_REPLACEMENT, Draws.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The sparse distribution q that each node of a draft was drawn from (CSR layout).

    Node ``i`` was drawn from ``token_ids[offsets[i]:offsets[i + 1]]`` with the probabilities at
    the same places, which sum to 1. Rules that correct for q (rejection sampling and its kin)
    need it; a draft without it counts as a point mass on each drafted token.
    """

    offsets: IndexArray  # [num_nodes + 1]
    token_ids: IntArray  # [nnz]
    probs: FloatArray  # [nnz]

    def row(self, node: int) -> tuple[IntArray, FloatArray]:
        """Support and probabilities that ``node`` was drawn from."""
        low, high = self.offsets[node], self.offsets[node + 1]
        return self.token_ids[low:high], self.probs[low:high]

    @staticmethod
    def stack(rows: Sequence[tuple[IntArray, FloatArray]]) -> DraftProbs:
        """Pack one ``(token_ids, probs)`` pair for each node."""
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(ids) for ids, _ in rows], out=offsets[1:])
        empty_ids, empty_probs = np.empty(0, np.int64), np.empty(0, np.float32)
        return DraftProbs(
            offsets,
            np.concatenate([empty_ids, *(ids for ids, _ in rows)]),
            np.concatenate([empty_probs, *(probs for _, probs in rows)]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A token tree proposed in one round.

    ``parent_indices[i]`` is the node that node ``i`` follows, or -1 for a child of the last
    committed token; parents come before their children. A chain is a tree with one branch.
    """

    token_ids: IntArray  # [num_nodes]
    parent_indices: IndexArray  # [num_nodes]
    probs: DraftProbs | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def is_sound(self, vocab_size: int) -> bool:
        """Whether all tokens are in the vocabulary and all parents come before their children."""
        ids, parents = self.token_ids, self.parent_indices
        if len(ids) != len(parents) or ids.dtype.kind != "i" or parents.dtype.kind != "i":
            return False
        if not len(ids):
            return True
        drafted = ids.tolist()
        in_vocabulary = min(drafted) >= 0 and max(drafted) < vocab_size
        if self.probs is not None:
            support = self.probs.token_ids
            in_vocabulary &= bool(support.min() >= 0 and support.max() < vocab_size)
        return in_vocabulary and all(-1 <= p < node for node, p in enumerate(parents.tolist()))

    @staticmethod
    def chain(token_ids: Sequence[int] | IntArray, probs: DraftProbs | None = None) -> Draft:
        """A draft with a single branch."""
        ids = np.asarray(token_ids, np.int64)
        return Draft(ids, np.arange(-1, len(ids) - 1, dtype=np.int32), probs)

    @staticmethod
    def checked(
        token_ids: Sequence[int] | IntArray,
        parent_indices: Sequence[int] | IndexArray,
        vocab_size: int,
        probs: DraftProbs | None = None,
    ) -> Draft:
        """Build a draft from untrusted values.

        Raises:
            InvalidArgument: lengths differ, a token is outside the vocabulary, a parent does not
                come before its child, or ``probs`` does not fit the nodes.
        """
        ids = _whole_numbers("token_ids", token_ids)
        parents = _whole_numbers("parent_indices", parent_indices)
        if len(ids) != len(parents):
            raise InvalidArgument(
                "parent_indices", len(parents), f"one entry for each of the {len(ids)} token_ids"
            )
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(bad):
            raise InvalidArgument(
                f"token_ids[{bad[0]}]", int(ids[bad[0]]), f"a token id in [0, {vocab_size})"
            )
        bad = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
        if len(bad):
            raise InvalidArgument(
                f"parent_indices[{bad[0]}]",
                int(parents[bad[0]]),
                f"-1 or the index of an earlier node (below {bad[0]})",
            )
        if probs is not None:
            _check_probs(probs, ids, vocab_size)
        return Draft(ids, parents.astype(np.int32), probs)


def _whole_numbers(name: str, values: object) -> IntArray:
    try:
        array = np.asarray(values)
        if array.shape == (0,):
            return np.empty(0, np.int64)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError
        return array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(name, values, "a list of integers") from None


def _check_probs(probs: DraftProbs, ids: IntArray, vocab_size: int) -> None:
    offsets, support, values = probs.offsets, probs.token_ids, probs.probs
    fits = (
        len(offsets) == len(ids) + 1
        and (len(offsets) == 0 or (offsets[0] == 0 and offsets[-1] == len(support)))
        and bool(np.all(np.diff(offsets) >= 1))
        and len(support) == len(values)
    )
    if not fits:
        raise InvalidArgument("probs.offsets", offsets.tolist()[:8], "one CSR row for each node")
    if len(support) and (support.min() < 0 or support.max() >= vocab_size):
        raise InvalidArgument("probs.token_ids", "out of range", f"ids in [0, {vocab_size})")
    if not np.all(np.isfinite(values)) or bool((values < 0).any()):
        raise InvalidArgument("probs.probs", "not finite or negative", "probabilities in [0, 1]")
    for node, token in enumerate(ids):
        row_ids, row_probs = probs.row(node)
        if len(np.unique(row_ids)) != len(row_ids):
            raise InvalidArgument(f"probs row {node}", "repeated ids", "distinct token ids")
        if abs(float(row_probs.sum()) - 1.0) > 1e-3:
            raise InvalidArgument(f"probs row {node}", float(row_probs.sum()), "a sum of 1")
        if not bool((row_probs[row_ids == token] > 0).any()):
            raise InvalidArgument(
                f"probs row {node}", 0.0, "a positive probability for the drafted token itself"
            )


EMPTY_DRAFT = Draft.chain(())


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The verdict of an acceptance rule: node indices from the root down, and the next token."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What a target on another machine decided about a draft, having applied the rule there.

    Attributes:
        draft: the draft that it verified. It is not the one that this round was given if another
            was sent ahead, or made beside the target.
        acceptance: ``next_token`` is not committed if an accepted token ends the generation.
        sent_ahead: the draft was sent before the answer to the previous round came.
        verify_seconds: the target's forward, and the wait for its batch.
        travel_seconds: a frame's way there and its answer's way back, without the target's time.
        fingerprint: of the target's numerics; empty: not known.
        numerics_changed: tokens before these come from a target with other numerics.
    """

    draft: Draft
    acceptance: Acceptance
    sent_ahead: bool = False
    verify_seconds: float = 0.0
    travel_seconds: float = 0.0
    fingerprint: str = ""
    numerics_changed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """What one target forward says about a draft.

    ``logits[0]`` follows the last committed token, ``logits[i + 1]`` follows node ``i``.
    ``extras`` holds what drafters declared as needs, with the same first dimension.
    ``pseudo_logits`` follow the pseudo tokens of a drafter that has some.
    If the target is on another machine, there is a ``verdict``, and ``logits`` has no rows.
    """

    logits: torch.Tensor  # [num_nodes + 1, vocab_size]
    extras: Mapping[Need, torch.Tensor] = field(default_factory=dict)
    pseudo_logits: torch.Tensor | None = None  # [num_pseudo, vocab_size]
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a round did to a session.

    ``token_ids`` are the tokens this round committed, in order. Stop conditions may cut them
    short, so ``len(token_ids) <= len(path) + 1``. The first ``num_accepted`` of them came from
    the draft; a further one, if there, is the target's own (bonus or recovered) token.
    """

    draft: Draft
    path: tuple[int, ...]
    next_token: int
    token_ids: tuple[int, ...]
    num_accepted: int
    verification: Verification
    finish_reason: str | None = None


class ShadowDraft:
    """A draft that is not verified: the tokens that AR commits meanwhile tell how good it was.

    Attributes:
        length: committed tokens of the session that it follows.
        budget: what it is made for.
        draft: None until it is there; nothing waits for it.
        failed: it will not come.
        num_judged: nodes of it that were right, as far as the controller has looked.
    """

    __slots__ = ("budget", "draft", "failed", "length", "num_judged")

    def __init__(self, length: int, budget: Budget) -> None:
        self.length = length
        self.budget = budget
        self.draft: Draft | None = None
        self.failed = False
        self.num_judged = 0

    def arrived(self, future: Future[Draft]) -> None:
        """Take the draft of a drafter elsewhere."""
        if future.cancelled() or future.exception() is not None:
            self.failed = True
        else:
            self.draft = future.result()


class Pick(NamedTuple):
    """What a round verifies: a draft of this depth by this drafter; None: no draft.

    Attributes:
        probe: another drafter that drafts beside it, unverified, to be judged by what is committed.
    """

    drafter: str | None
    depth: int
    probe: tuple[str, int] | None = None


class Asked(NamedTuple):
    """What a drafter was asked for: a draft of ``depth`` tokens after ``length`` committed ones.

    Attributes:
        together: sessions for which it drafted at once while all others waited; 0: it drafted in
            another process, and none waited.
    """

    length: int
    depth: int
    together: int = 0


class Portfolio(Protocol):
    """One session's choice among several drafters, round by round (method ``auto``)."""

    def leaving(self, session: Any) -> Sequence[str]:
        """Drafters that the session no longer wants; each is named once.

        Args:
            session: a :class:`paceline.view.SessionView`, which this module must not know.
        """
        ...

    def asks(self, drafter: str) -> int:
        """Depth of the draft to ask a quick drafter for; 0: none in this round."""
        ...

    def found(self, drafter: str, draft: Draft, seconds: float) -> None:
        """Take a quick drafter's draft, and what it cost."""
        ...

    def pick(self, drafters: Sequence[str]) -> Pick:
        """Choose among the drafts found and what each of ``drafters`` would draft."""
        ...

    def drafted(self, drafter: str, draft: Draft, seconds: float, asked: Asked) -> int:
        """Take the draft of a drafter, and what it cost: 0 if another session has counted that.

        It may be that of an earlier round.

        Returns:
            How many looked-up tokens may follow it.
        """
        ...

    def extended(self, draft: Draft, behind: list[int]) -> int:
        """How many of the looked-up tokens after a draft to verify."""
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to draft in a round. Depth 0 means plain AR for that round.

    Attributes:
        shadow: (at depth 0) a draft to make beside the round.
        portfolio: chooses among the drafters of method ``auto``, within depth and nodes.
        patience_s: seconds to wait for a draft of another process, before the round begins without
            one; None: as long as the drafter takes or until it fails.
        beside: verify what was drafted during the last round, if anything, and draft during this
            one, where the drafter can (:class:`paceline.engine.ahead.DraftingAhead`).
    """

    depth: int
    nodes: int
    exit_layer: int | None = None
    shadow: ShadowDraft | None = None
    portfolio: Portfolio | None = None
    patience_s: float | None = None
    beside: bool = False

    @property
    def asked(self) -> Budget:
        """What the drafter is asked for: the draft to verify, or the shadow draft."""
        return self if self.shadow is None else self.shadow.budget


@dataclass(frozen=True, slots=True)
class Load:
    """What a length controller may know about the engine when it decides.

    ``context_tokens`` counts the committed tokens of all running sessions.
    """

    num_running: int
    num_waiting: int
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A token that was just added to a chain draft, for controllers that stop token by token.

    Attributes:
        depth: 1 for the first drafted token.
        token_id: the drafted token.
        scores: the drafter's processed logits (over temperature, where above 0, and with the
            noise of coupled sampling where the token was chosen with it); the token is their
            argmax unless it was drawn from q.  # [k]
        hidden: the draft model's last hidden state that gave ``scores``, where
            the controller asks for it with ``wants_hidden``.  # [hidden_size] or None
        acceptance: the drafter's own estimate, where it makes one, of how likely the target accepts
            the token.
    """

    depth: int
    token_id: int
    scores: npt.NDArray[np.floating[Any]]
    hidden: torch.Tensor | None = None
    acceptance: float | None = None


class StopRule(ABC):
    """Ends a chain draft early, token by token, in the process that drafts.

    Attributes:
        wants_hidden: whether it reads :attr:`DraftStep.hidden`.
        drops: whether a draft ends before the token at which the rule ends it, not behind it.
    """

    wants_hidden: bool = False
    drops: bool = False

    @abstractmethod
    def stop_after(self, step: DraftStep) -> bool:
        """Whether the draft ends with this token (or before it, if the rule ``drops``)."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn what became of the last draft; does nothing where the rule does not learn."""


class DepthPolicy(Protocol):
    """Chooses layers by the place of a token among the generated ones."""

    def layers_at(self, index: int, length: int, num_layers: int) -> Sequence[int]:
        """Layers, in order, for a generated token.

        Args:
            index: 0 for the last prompt token, whose output is the first generated one.
            length: tokens that will be generated at most.
        """
        ...


class RoundCosts(Protocol):
    """What forwards and drafts cost on a machine, in seconds.

    Attributes:
        methods: those whose drafts were measured.
        read_seconds: what a drafter takes to read a token that it has not drafted.
    """

    @property
    def methods(self) -> tuple[str, ...]: ...

    @property
    def read_seconds(self) -> float: ...

    def verify(self, nodes: float, batch: int) -> float:
        """A target forward over ``nodes`` tokens of each of ``batch`` sessions."""
        ...

    def draft(self, depth: int, batch: int) -> float:
        """Drafts of ``depth`` for ``batch`` sessions."""
        ...
