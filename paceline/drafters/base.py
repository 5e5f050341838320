"""The drafter interface, and what several drafters share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from paceline.acceptance.base import PathLogits
from paceline.errors import InvalidArgument
from paceline.knobs import MAX_DEPTH, Knob, Knobs
from paceline.lengths.base import ConfidenceStop
from paceline.sampling import (
    Probs,
    argmax_rows,
    coupled_sample,
    gumbel_at,
    process_logits,
    scaled_scores,
)
from paceline.shapes.kary import chain
from paceline.tree import align, is_chain, path_to, subset
from paceline.types import (
    EMPTY_DRAFT,
    Budget,
    Draft,
    Draws,
    FloatArray,
    Need,
    Outcome,
    StatesLayout,
    StopRule,
    Verification,
)

if TYPE_CHECKING:
    import torch

    from paceline.models.base import PseudoTokens
    from paceline.models.heads.base import Head
    from paceline.shapes.base import Expander, Shape
    from paceline.target import ModelTarget
    from paceline.view import SessionView


NGRAM_MAX = Knob[int](
    "ngram_max", int, 3, "Longest suffix of the context to look up.",
    ge=1, le=16, search=(2, 3, 4, 5),
)  # fmt: skip
NGRAM_MIN = Knob[int](
    "ngram_min", int, 1, "Shortest suffix that prompt lookup looks up.", ge=1, le=16, search=(1, 2)
)
MIN_MATCH = Knob[int](
    "min_match", int, 3, "Copy only if at least this many last tokens have occurred before.",
    ge=1, le=64, search=(2, 3, 5, 8),
)  # fmt: skip
DRAFT_PER_MATCH = Knob[float | None](
    "draft_per_match", float, None, "Most drafted tokens for each token of the match (alpha).",
    ge=0.0, le=64.0, search=(1.0, 2.0, 4.0),
)  # fmt: skip
FALLBACK_DEPTH = Knob[int | None](
    "fallback_depth", int, None, "Draft depth of a copying drafter's fallback.",
    ge=0, le=MAX_DEPTH, search=(3, 5, 8),
)  # fmt: skip
DRAFTERS = Knob[tuple[str, ...] | None](
    "drafters", tuple[str, ...], None,
    "Drafters whose trees `combined` merges, in the order in which they draft; or among which "
    "`auto` chooses, by default all that are loaded.",
    max_length=8, costs=True,
)  # fmt: skip
RELAY_TOKENS = Knob[int](
    "relay_tokens", int, 0,
    "Most tokens to copy behind a fallback's draft whose last tokens have occurred before.",
    ge=0, le=MAX_DEPTH, search=(0, 4, 8),
)  # fmt: skip


def fit_ngrams(values: dict[str, Any]) -> None:
    """Check the bounds of drafters that look up n-grams.

    Raises:
        InvalidArgument: the shortest is longer than the longest.
    """
    shortest, longest = values[NGRAM_MIN.name], values[NGRAM_MAX.name]
    if shortest > longest:
        raise InvalidArgument(NGRAM_MIN.name, shortest, f"<= {NGRAM_MAX.name} ({longest})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPart:
    """A drafter as the catalogue lists it.

    Attributes:
        make: the drafter, for the first request of an engine that uses it; None: the engine's
            caller provides it (a draft model, a client).
        knobs: those that the drafter reads, with its defaults.
        fit: checks values of knobs that depend on one another, and sets those that follow from
            them.
        replay: how a simulation can repeat the drafter's drafts from a recording. ``prefix``: a
            shape expands it, and what follows a token depends on the tokens before it alone,
            committed or drafted. ``tree``: a shape expands it, and what follows a node depends on
            the node's ancestors. ``lookup``: it makes whole drafts, asking twice gives the same
            one, and a rejection changes nothing. ``composite``: like ``lookup``, but models take
            part, so asking costs. None: what it drafts depends on what was drafted before.
        remembers: it drafts from earlier sessions, too.
        halves: of a lookup with a fallback, the methods that do either alone.
        passes_on: it consists of the drafters that the knob ``drafters`` names, and a round's
            draft is that of one of them: heads, which read their own drafts' states, may be parts.
        reads_sent_states: what it needs of the target are states that can be sent, so that it can
            draft in another process (:attr:`Drafter.states`).
    """

    make: Callable[[DrafterContext], Drafter] | None = None
    knobs: tuple[Knob[Any], ...] = ()
    fit: Callable[[dict[str, Any]], None] | None = None
    replay: Literal["prefix", "tree", "lookup", "composite"] | None = None
    remembers: bool = False
    halves: tuple[str, str] | None = None
    passes_on: bool = False
    reads_sent_states: bool = False


class Drafter(ABC):
    """Proposes token trees. Batch-first: it gets all sessions of a step at once.

    A drafter declares what it can do; the desk (:mod:`paceline.engine.drafting`) reads nothing else
    of it, and the loop does not know where it lives.

    Attributes:
        needs: what it reads from the target; the engine computes only that.
        elsewhere: another process makes its drafts, from tokens alone. The engine requests them
            early, and only the session that a draft is for waits for it.
        from_client: the session's client makes the drafts and sends one after each round's result.
            The drafter keeps none of a session's tokens.
        recovers: a draft that fails with DrafterUnavailable costs its session that round only.
        rewinds: a session's tokens may differ between one call of ``propose`` or ``observe`` and
            the next: such a drafter can draft ahead on a guess.
        shadows: drafts may stay unverified: `observe` then reports a round with an empty draft.
            See :class:`paceline.types.ShadowDraft`.
        copies: its drafts are chains of tokens that it found, so longer ones cost nothing: the
            engine can request what follows a guess along with the draft.
        quick: to ask it costs next to nothing and changes nothing.
        drafts_on: it can draft behind tokens that no target has seen, although it reads what the
            target computes (:meth:`draft_on`).
        states: which states of the target it can read with :meth:`read_states`, as it must where
            the target is in another process; None: it cannot draft there if it needs some.
        forwards: (of one elsewhere) what it passes on of the target's forwards, so that its
            sessions' methods may need it.
    """

    needs: frozenset[Need] = frozenset()
    states: StatesLayout | None = None
    forwards: frozenset[Need] = frozenset()
    elsewhere: bool = False
    from_client: bool = False
    recovers: bool = False
    rewinds: bool = False
    shadows: bool = False
    copies: bool = False
    quick: bool = False
    drafts_on: bool = False

    def check_knobs(self, knobs: Knobs) -> None:  # noqa: B027
        """Check the knobs that depend on the models that are loaded.

        Raises:
            InvalidArgument: its model cannot serve the request.
        """

    def open(self, session: SessionView) -> None:  # noqa: B027
        """Prepare state for a session, which holds its prompt. Called once, before any round."""

    def close(self, session: SessionView) -> None:  # noqa: B027
        """Free the state of a session; unknown sessions are ignored."""

    def adopt(self, session: SessionView) -> int:
        """Begin an opened session with what earlier ones have left of its first tokens.

        Returns:
            How many of the first tokens the target need not compute for this drafter.
        """
        return 0

    def num_known(self, prompt_ids: Sequence[int], tenant: str, adapter: str) -> int:
        """What :meth:`adopt` would return for a request."""
        return 0

    def read_prompt(self, session: SessionView, read: Verification) -> None:  # noqa: B027
        """Read what the target computed for the next prompt tokens, chunk by chunk after ``open``.

        The first round delivers what it computed for the last prompt token.

        Args:
            read: without logits; a row of each extra for each prompt token of the chunk.
        """

    def read_states(self, session: SessionView, states: torch.Tensor) -> None:
        """Read the target's states for the session's next tokens, where they come from afar.

        This takes the place of :meth:`read_prompt` and :meth:`observe`. A draft needs the states
        of all committed tokens but the last; the first ones may be missing.

        Args:
            states: as :attr:`states` says.  # float32 [num_tokens, num_values]
        """
        raise NotImplementedError(f"{type(self).__name__} reads no states from afar")

    @abstractmethod
    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> Sequence[Draft | Future[Draft]]:
        """One draft for each session, at most as deep and large as its budget; or its future.

        If a future fails, its session continues as AR. For a drafter elsewhere with ``shadows``,
        :attr:`Budget.asked` marks shadow drafts.
        """

    def follow(self, session: SessionView, drafted: list[int], room: int) -> list[int]:
        """Up to ``room`` tokens that may follow the session's and ``drafted``, where one that looks
        up finds any."""
        return []

    def draft_on(self, session: SessionView, budget: Budget) -> Draft:
        """A chain behind a session's tokens, the last of which no target has seen.

        Only where :attr:`drafts_on` says so.
        """
        raise NotImplementedError(f"{type(self).__name__} needs what a target has computed")

    def pseudo_tokens(self, session: SessionView, draft: Draft) -> PseudoTokens | None:
        """Pseudo tokens that the target computes in the forward that verifies ``draft``.

        Parents count as in a verification: 0 is the last committed token, ``i + 1`` is node i, and
        from ``num_nodes + 1`` on it is the pseudo tokens. Their logits are the outcome's
        :attr:`Verification.pseudo_logits`.
        """
        return None

    def observe(  # noqa: B027
        self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]
    ) -> None:
        """Learn the outcomes of the last drafts; the sessions already hold the new tokens."""

    def suspend(self, session: SessionView, draft: Draft | Future[Draft] | None) -> None:
        """The session gives up its place; the engine opens it again later.

        Args:
            draft: a requested draft that no round will verify.
        """
        self.close(session)
        if isinstance(draft, Future):
            draft.cancel()


def kept_rows(outcome: Outcome) -> list[int] | slice:
    """The rows of a round's verification whose tokens have KV entries now, in order.

    Those are all tokens that the round began with or committed but the last one. A slice, where
    they are the first ones, takes a tenth of the time of an index.
    """
    rows = [0, *(node + 1 for node in outcome.path[: len(outcome.token_ids) - 1])]
    return slice(len(rows)) if rows[-1] == len(rows) - 1 else rows


def at_once(
    proposed: Sequence[Draft | Future[Draft]], timeout_s: float | None = None
) -> list[Draft]:
    """Drafts without futures: waits for those of drafters in other processes.

    Raises:
        TimeoutError: a draft did not arrive in time.
    """
    return [each.result(timeout_s) if isinstance(each, Future) else each for each in proposed]


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What an engine passes to the drafters that it builds.

    Attributes:
        vocab_size: of the target.
        drafter: another drafter of the same engine by name; raises InvalidArgument where it is
            not loaded, or lives elsewhere.
        find_target: the target, for drafters that draft with it; raises InvalidArgument away from
            it.
        head: a trained head by kind; raises InvalidArgument where there is none.
        remote: the engine's drafters that draft in another process of the deployment, by name.
        corpus: texts to copy from, as token ids.
    """

    vocab_size: int
    drafter: Callable[[str], Drafter]
    find_target: Callable[[], ModelTarget]
    head: Callable[[str], Head]
    remote: Mapping[str, Drafter] = field(default_factory=dict)
    corpus: Sequence[Sequence[int]] = ()

    @property
    def target(self) -> ModelTarget:
        """The target in this process."""
        return self.find_target()


def grow(
    expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
) -> list[Draft]:
    """``propose`` of an expanding drafter: each shape grows the trees of all of its sessions."""
    drafts = [EMPTY_DRAFT] * len(sessions)
    by_shape: dict[Shape, list[int]] = {}
    for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
        if min(budget.depth, budget.nodes) > 0:
            assert session.shape is not None  # every method with an expanding drafter has one
            by_shape.setdefault(session.shape, []).append(i)
    for shape, members in by_shape.items():
        grown = shape.build(expander, [sessions[i] for i in members], [budgets[i] for i in members])
        for i, draft in zip(members, grown, strict=True):
            drafts[i] = draft
    return drafts


def padded(logits: torch.Tensor, padding: int) -> torch.Tensor:
    """A draft model's logits with ``padding`` impossible tokens behind; a negative number cuts.

    Models of one family often pad the same vocabulary to different sizes.
    """
    import torch.nn.functional as F

    return F.pad(logits, (0, padding), value=-math.inf) if padding else logits


def greedy_chain_depth(
    sessions: Sequence[SessionView], budgets: Sequence[Budget], *, stops: bool = False
) -> int:
    """Depth of the deepest draft if all are argmax chains that nothing ends early; otherwise 0.

    One kernel call can make all such drafts at that depth; each is then cut to its own.

    Args:
        stops: the kernel can end chains where the confidence is low (:func:`stop_below`).
    """
    depths = [min(budget.depth, budget.nodes) for budget in budgets]
    depth = max(depths, default=0)
    plain = all(
        # there is room for the tokens that are cut afterwards
        (own == depth or session.remaining > depth)
        and session.shape == chain()
        and session.params.is_plain_argmax
        and _runs_on(session.stop_rule, stops)
        for session, own in zip(sessions, depths, strict=True)
    )
    return depth if plain else 0


def _runs_on(rule: StopRule | None, stops: bool) -> bool:
    return rule is None or (stops and isinstance(rule, ConfidenceStop))


def stop_below(sessions: Sequence[SessionView], depth: int) -> FloatArray | None:
    """Confidence below which a token ends its draft; None if no draft has such a limit.

    # [depth, num_sessions]
    """
    rules = [session.stop_rule for session in sessions]
    table = np.zeros((depth, len(rules)), np.float32)
    for i, rule in enumerate(rules):
        if isinstance(rule, ConfidenceStop):
            table[max(0, rule.shortest - 1) :, i] = rule.threshold
    return table if table.any() else None


def target_tokens(session: SessionView, outcome: Outcome, nodes: Iterable[int]) -> list[int]:
    """The token that the target has after each of ``nodes`` (-1: the root), given its path.

    For ``observe``: the session holds the round's tokens already. At temperature 0 it is the
    argmax, above 0 the token of coupled sampling at the place after the node.
    """
    draft, params = outcome.draft, session.params
    logits = outcome.verification.logits
    if params.is_plain_argmax:
        argmaxes = argmax_rows(logits)
        return [argmaxes[node + 1] for node in nodes]
    history = session.token_ids[: session.length - len(outcome.token_ids)]
    target = PathLogits(
        logits, params, history, prompt_length=session.prompt_length, stop_ids=session.stop_ids
    )
    tokens = []
    for node in nodes:
        path = draft.token_ids[list(path_to(draft.parent_indices, node))].tolist()
        row = target.row(path, node)
        tokens.append(coupled_sample(row, params, len(history) + len(path)))
    return tokens


def position_values(session: SessionView, logits: FloatArray) -> list[Probs]:
    """What the tokens of positions that are drafted side by side are chosen by.

    Log-probabilities, perturbed by the target's own noise where the rule couples its draws.

    Args:
        logits: of the positions behind the session's tokens.  # [depth, vocab_size]
    """
    params, rows = session.params, []
    for place, row in enumerate(logits):
        processed = process_logits(
            row, params, session.token_ids, session.prompt_length, session.stop_ids
        )
        values = processed.astype(np.float64)
        if params.temperature > 0 and session.draws is Draws.COUPLED:
            values = scaled_scores(processed, params)
            likely = np.flatnonzero(np.isfinite(values))
            values[likely] += gumbel_at(params.seed, session.length + place, likely)
        rows.append(values)
    return rows


def until_stop(session: SessionView, tokens: list[int]) -> list[int]:
    """The tokens up to the first one that would end the generation, with it."""
    ends = (place for place, token in enumerate(tokens) if session.stops_at(token))
    return tokens[: next(ends, len(tokens)) + 1]


State = TypeVar("State")


class LookupDrafter(Drafter, Generic[State]):
    """Finds whole drafts in tokens it has seen; where it finds none, another drafter drafts.

    Args:
        fallback: drafts for the sessions for which :meth:`find` returns None; without one they run
            AR for that round. Its drafts are at most ``fallback_depth`` deep, and up to
            ``relay_tokens`` looked-up tokens follow them.

    Attributes:
        finds_chains: whether it finds chains that fill the budget when enough tokens follow.
    """

    finds_chains = False

    def __init__(self, fallback: Drafter | None = None) -> None:
        self.fallback = fallback
        self.needs = fallback.needs if fallback else frozenset()
        self.copies = self.finds_chains and fallback is None  # a fallback's tokens cost time
        self.quick = fallback is None
        self._states: dict[str, State] = {}
        self._fell_back: set[str] = set()

    @abstractmethod
    def start(self, session: SessionView) -> State:
        """The state to keep for a session, which holds its prompt."""

    @abstractmethod
    def find(self, session: SessionView, state: State, budget: Budget) -> Draft | None:
        """A draft within a budget of at least one token, or None."""

    def find_behind(
        self, session: SessionView, state: State, drafted: list[int], room: int
    ) -> list[int]:
        """Up to ``room`` tokens that may follow the session's and ``drafted``, a fallback's."""
        return []

    def follow(self, session: SessionView, drafted: list[int], room: int) -> list[int]:
        return self.find_behind(session, self._states[session.session_id], drafted, room)

    def finish(self, session: SessionView, state: State) -> None:
        """Called when a session closes."""

    def open(self, session: SessionView) -> None:
        if self.fallback is not None:
            self.fallback.open(session)
        self._states[session.session_id] = self.start(session)

    def close(self, session: SessionView) -> None:
        self._fell_back.discard(session.session_id)
        state = self._states.pop(session.session_id, None)
        try:
            if state is not None:
                self.finish(session, state)
        finally:
            if self.fallback is not None:
                self.fallback.close(session)

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        if self.fallback is not None:
            self.fallback.read_prompt(session, read)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        without: list[int] = []
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            if min(budget.depth, budget.nodes) <= 0:
                continue
            draft = self.find(session, self._states[session.session_id], budget)
            if draft is None:
                without.append(i)
            else:
                drafts[i] = draft
        if self.fallback is None or not without:
            return drafts
        members = [sessions[i] for i in without]
        self._fell_back.update(session.session_id for session in members)
        shallow = [_shallow(sessions[i], budgets[i]) for i in without]
        found = at_once(self.fallback.propose(members, shallow))
        for i, draft, limit in zip(without, found, shallow, strict=True):
            drafts[i] = self._relayed(sessions[i], draft, limit, budgets[i])
        return drafts

    def _relayed(self, session: SessionView, draft: Draft, limit: Budget, budget: Budget) -> Draft:
        """A fallback's draft of full length, continued with the tokens found after it."""
        size = min(limit.depth, limit.nodes)
        room = min(budget.depth, budget.nodes) - size
        room = min(room, session.config[RELAY_TOKENS])
        if room <= 0 or draft.num_nodes < size or not is_chain(draft.parent_indices):
            return draft
        drafted = draft.token_ids.tolist()
        state = self._states[session.session_id]
        return Draft.chain(drafted + self.find_behind(session, state, drafted, room))

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Show the fallback the outcomes of its own drafts, or all if it reads the target."""
        if self.fallback is None:
            return
        pairs = [
            (session, outcome)
            for session, outcome in zip(sessions, outcomes, strict=True)
            if self.needs or session.session_id in self._fell_back
        ]
        self._fell_back.difference_update(session.session_id for session in sessions)
        if pairs:
            self.fallback.observe([s for s, _ in pairs], [o for _, o in pairs])


def _shallow(session: SessionView, budget: Budget) -> Budget:
    depth = session.config[FALLBACK_DEPTH]
    return budget if depth is None else replace(budget, depth=min(budget.depth, depth))


def part_outcome(outcome: Outcome, draft: Draft, needs: frozenset[Need]) -> Outcome:
    """The outcome as one part of a composite drafter sees it: as if its own draft were verified.

    Args:
        outcome: of the merged draft.
        draft: what the part had proposed. Its numbering is kept; where the merged draft was cut,
            the part sees its own only up to the first node that is missing.
        needs: of the part. Without any, the verification is passed on as it is.

    Returns:
        ``path``, ``num_accepted`` and ``next_token`` are those of the part's draft. ``token_ids``
        stays what the round committed, which other parts may have made longer than the path.
    """
    if not outcome.draft.num_nodes and not draft.num_nodes and not needs:
        return replace(outcome, draft=draft)  # a round without a draft costs next to nothing
    whole, place = outcome.draft, align(draft, outcome.draft)
    missing = np.flatnonzero(place < 0)
    if len(missing):
        place = place[: missing[0]]
        draft = subset(draft, np.arange(missing[0]))
    below: dict[tuple[int, int], int] = {}
    for node, step in enumerate(zip(draft.parent_indices.tolist(), place.tolist(), strict=True)):
        below.setdefault(step, node)
    path: list[int] = []
    for taken in outcome.path:
        step = (path[-1] if path else -1, taken)
        if step not in below:
            break
        path.append(below[step])
    left = outcome.path[len(path) :]
    verification = outcome.verification
    if needs:
        rows = [0, *(place + 1).tolist()]
        verification = Verification(
            verification.logits[rows], {need: x[rows] for need, x in verification.extras.items()}
        )
    return Outcome(
        draft=draft,
        path=tuple(path),
        next_token=int(whole.token_ids[left[0]]) if left else outcome.next_token,
        token_ids=outcome.token_ids,
        num_accepted=min(outcome.num_accepted, len(path)),
        verification=verification,
        finish_reason=outcome.finish_reason,
    )
