"""The target: the model whose tokens count, with one KV sequence for each session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, cast

import numpy as np
import torch

from paceline.batching import BatchStrategy, run_segments
from paceline.models.base import KVSequence, LayeredRunner, ModelRunner, PseudoTokens, Segment
from paceline.models.exits import layers_of
from paceline.models.llama import LlamaRunner
from paceline.models.prefix_cache import PrefixCache
from paceline.numerics import Fingerprint
from paceline.tree import is_chain
from paceline.types import STATES, Draft, FloatArray, IntArray, Need, Verification
from paceline.view import SessionView


class Target(Protocol):
    """What the loop and the engine require of a target, wherever its model is.

    :class:`ModelTarget` has the model in this process and documents the members;
    :class:`paceline.rpc.remote_target.RemoteTarget` has it on a server.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def head_layers(self) -> float: ...

    @property
    def provides(self) -> frozenset[Need]: ...

    @property
    def context_length(self) -> int: ...

    @property
    def kv_capacity(self) -> int: ...

    @property
    def adapters(self) -> tuple[str, ...]: ...

    def open(self, session: SessionView) -> None: ...

    def close(self, session: SessionView) -> None: ...

    def prefill_left(self, session: SessionView) -> int: ...

    def verify(
        self,
        sessions: Sequence[SessionView],
        drafts: Sequence[Draft],
        wants: frozenset[Need] = frozenset(),
        prefill: Sequence[tuple[SessionView, int]] = (),
        pseudo: Sequence[PseudoTokens | None] = (),
    ) -> list[Verification]: ...

    def commit(self, session: SessionView, path: Sequence[int]) -> None: ...

    def truncate(self, session: SessionView, length: int) -> None: ...

    def exit_logits(self, states: torch.Tensor) -> torch.Tensor: ...


def _shareable(session: SessionView) -> bool:
    """Whether all layers compute all of the session's KV entries."""
    return session.target_depth is None


def _scores_prompt(session: SessionView) -> bool:
    return session.params.prompt_logprobs is not None


def _num_read(sequence: KVSequence) -> int:
    return sequence.length + sequence.num_pending


def _next_tokens(sequence: KVSequence, session: SessionView, count: int) -> Segment:
    """The next ``count`` tokens of a prompt, and of the branches behind it if there are any.

    Branches, and prompt tokens that are read together with some, stay pending.
    """
    tree = session.branches
    first = _num_read(sequence)
    ids = np.asarray(session.token_ids[first : first + count], np.int64)
    scored: Literal["all", "none"] = "all" if _scores_prompt(session) else "none"
    if tree is None or first + count < session.length:
        return Segment(sequence, ids, logits=scored)
    read = max(0, first - session.length)
    nodes = slice(read, read + count - len(ids))
    # The prompt's last token is pending, too, unless it was read before.
    above = tree.parent_indices[nodes] + np.int32(session.length - sequence.length)
    chain = np.arange(len(ids), dtype=np.int32) + np.int32(sequence.num_pending - 1)
    return Segment(
        sequence, np.concatenate([ids, tree.token_ids[nodes]]), np.concatenate([chain, above])
    )


def num_cached(target: Target, token_ids: Sequence[int], tenant: str, adapter: str) -> int:
    """How many of a prompt's first tokens a target's prefix cache has for a tenant's request."""
    prefixes = target.prefixes if isinstance(target, ModelTarget) else None
    if prefixes is None:
        return 0
    # Entries are kept by the adapter's number, as sequences have it; -1 is none.
    number = target.adapters.index(adapter) if adapter else -1
    return prefixes.count(token_ids, (number, tenant))


def _layered(runner: ModelRunner) -> LayeredRunner | None:
    return cast(LayeredRunner, runner) if Need.SHARED_MODEL in runner.provides else None


def why_lacking(target: Target, needs: frozenset[Need]) -> str:
    """Why a target does not give what it lacks of ``needs``, with a colon before; "" if unknown."""
    lacks_exits = Need.SHARED_MODEL in needs - target.provides
    runner = target.runner if isinstance(target, ModelTarget) else None
    why = getattr(runner, "why_no_exits", "") if lacks_exits else ""
    return f": {why}" if why else ""


def _new_sequence(runner: ModelRunner, session: SessionView) -> KVSequence:
    if not session.adapter:
        return runner.new_sequence()
    assert isinstance(runner, LlamaRunner)
    return runner.new_sequence(session.adapter)


def _keep_prompt(runner: ModelRunner, session: SessionView, sequence: KVSequence) -> None:
    """Commit what is pending of the prompt, and forget its branches."""
    runner.commit(sequence, range(min(sequence.num_pending, session.length - sequence.length)))


def _chain_entries(tokens: Sequence[int]) -> dict[tuple[int, int], int]:
    """Entries of a drafted chain by the entry before and their token; the last token has none."""
    return {(entry - 1, token): entry for entry, token in enumerate(tokens[:-1])}


def _verification(
    logits: torch.Tensor,
    extras: Mapping[Need, torch.Tensor],
    order: list[int] | None,
    pseudo: PseudoTokens | None,
) -> Verification:
    """What a segment's rows say about a draft.

    Args:
        order: of each node its row; None: they are in the order of the nodes.
        pseudo: pseudo tokens, whose rows come last.
    """
    guessed = None
    if pseudo is not None:
        real = len(logits) - len(pseudo.parent_indices)
        logits, guessed = logits[:real], logits[real:]
        extras = {need: tensor[:real] for need, tensor in extras.items()}
    if order is not None:
        logits = logits[order]
        extras = {need: tensor[order] for need, tensor in extras.items()}
    return Verification(logits, dict(extras), guessed)


class ModelTarget:
    """Verifies drafts with one packed forward for all sessions of a step.

    A session's KV cache holds all its committed tokens but the last, which is computed together
    with the next draft.

    Attributes:
        shares_prefixes: sessions begin with entries that earlier sessions have left in the prefix
            cache, if those are the same to the last bit.
        batch_strategy: how the rows of a step are laid out (:mod:`paceline.batching`).
        num_padding: rows that ``pad`` added to fill a batch.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.shares_prefixes = True
        self.batch_strategy: BatchStrategy = "ragged"
        self.num_padding = 0
        self._sequences: dict[str, KVSequence] = {}
        # Entries made by drafting with this model's own layers: (parent entry, token) -> entry.
        self._drafted: dict[str, dict[tuple[int, int], int]] = {}
        # Entries of the rows being verified, if they are not in the order of the nodes.
        self._entries: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of layers; 0 if the runner cannot run some of them alone."""
        return layered.num_layers if (layered := _layered(self.runner)) else 0

    @property
    def head_layers(self) -> float:
        """Size of the output layer, counted in layers; 0 if ``num_layers`` is 0."""
        return layered.head_layers if (layered := _layered(self.runner)) else 0.0

    @property
    def provides(self) -> frozenset[Need]:
        """The needs of drafters that this target can meet."""
        return self.runner.provides

    @property
    def context_length(self) -> int:
        return self.runner.context_length

    @property
    def kv_capacity(self) -> int:
        return self.runner.kv_capacity

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that sessions may decode with."""
        return self.runner.adapters if isinstance(self.runner, LlamaRunner) else ()

    @property
    def fingerprint(self) -> Fingerprint:
        """The numerics fingerprint of the model; the first use reads all weights."""
        return self.runner.fingerprint

    def fingerprint_of(self, adapter: str) -> Fingerprint:
        """As :attr:`fingerprint`, of the model with one of :attr:`adapters`; "" is none."""
        if not adapter:
            return self.fingerprint
        assert isinstance(self.runner, LlamaRunner)
        return self.runner.fingerprint_of(adapter)

    @property
    def num_free(self) -> int:
        """Number of KV entries that no session uses."""
        return self.runner.num_free

    def open(self, session: SessionView) -> None:
        """Give a session a KV sequence: an empty one, or one that begins with cached entries."""
        sequence = self._sequences[session.session_id] = _new_sequence(self.runner, session)
        # What reads the target's states or logits for the prompt must see them for all of it.
        end = session.num_known if session.needs & STATES else session.length - 1
        if self.prefixes is not None and _shareable(session) and not _scores_prompt(session):
            assert isinstance(self.runner, LlamaRunner)
            self.runner.adopt(sequence, session.token_ids[:end], session.tenant)

    def close(self, session: SessionView) -> None:
        """Free a session's KV entries; ignores a session that is not open.

        The entries stay in the prefix cache until their memory is needed, unless a step failed.
        """
        self._drafted.pop(session.session_id, None)
        self._entries.pop(session.session_id, None)
        sequence = self._sequences.get(session.session_id)
        if sequence is not None:
            try:
                if session.finish_reason != "error":
                    if session.branches is not None:
                        _keep_prompt(self.runner, session, sequence)
                    self.publish(session)
            finally:
                del self._sequences[session.session_id]
                self.runner.free(sequence)

    @property
    def prefixes(self) -> PrefixCache | None:
        """The prefix cache; None if the runner has none or it is switched off."""
        runner = self.runner
        return runner.prefixes if self.shares_prefixes and isinstance(runner, LlamaRunner) else None

    def publish(self, session: SessionView) -> None:
        """Let other sessions begin with the entries of an open one's committed tokens."""
        sequence = self._sequences[session.session_id]
        if self.prefixes is not None and _shareable(session):
            assert isinstance(self.runner, LlamaRunner)
            self.runner.publish(sequence, session.token_ids[: sequence.length], session.tenant)

    def prefill_left(self, session: SessionView) -> int:
        """Number of tokens to read (``session.num_to_read``) that have no KV entry."""
        return session.num_to_read - _num_read(self._sequences[session.session_id])

    def verify(
        self,
        sessions: Sequence[SessionView],
        drafts: Sequence[Draft],
        wants: frozenset[Need] = frozenset(),
        prefill: Sequence[tuple[SessionView, int]] = (),
        pseudo: Sequence[PseudoTokens | None] = (),
    ) -> list[Verification]:
        """One forward over the last committed token and all nodes of each draft.

        Nodes that this target's own first layers have drafted (:meth:`draft`) continue from there.

        Args:
            prefill: sessions, each with the number of its next prompt tokens to compute (and commit
                to the KV cache) in the same forward.
            pseudo: for each session, rows without tokens (see
                :class:`paceline.drafters.base.PseudoDrafter`).

        Returns:
            One verification for each session, then one for each entry of ``prefill``, with the
            extras of its prompt tokens, and their logits if the request asks for the prompt's
            log-probabilities.
        """
        segments = [
            _next_tokens(self._sequences[session.session_id], session, count)
            for session, count in prefill
        ]
        orders: list[list[int] | None] = []
        guesses = pseudo or [None] * len(sessions)
        for session, draft, guess in zip(sessions, drafts, guesses, strict=True):
            segment, order = self._segment(session, draft, guess)
            segments.append(segment)
            orders.append(order)
        results, num_padding = run_segments(
            self.runner, segments, self.batch_strategy, num_prefill=len(prefill), wants=wants
        )
        self.num_padding += num_padding
        for session, count in prefill:
            sequence = self._sequences[session.session_id]
            if session.branches is None:
                self.runner.commit(sequence, range(count))
            elif _num_read(sequence) <= session.length:
                _keep_prompt(self.runner, session, sequence)
            if sequence.length == session.length - 1:
                self.publish(session)
        verifications = [
            _verification(*results[i], order, guess)
            for i, (order, guess) in enumerate(zip(orders, guesses, strict=True), len(prefill))
        ]
        verifications += [Verification(*results[i]) for i in range(len(prefill))]
        return verifications

    def _segment(
        self, session: SessionView, draft: Draft, pseudo: PseudoTokens | None
    ) -> tuple[Segment, list[int] | None]:
        """The last committed token and a draft as rows, and the row of each of them.

        The order is None if the rows are in the order of the nodes.
        """
        sequence = self._sequences[session.session_id]
        ids = np.concatenate([[session.token_ids[-1]], draft.token_ids])
        policy = session.target_depth
        layers = None if policy is None else layers_of(policy, session, 0, self.num_layers)
        if sequence.num_pending and not self._drafted.get(session.session_id):
            self._forget_draft(session)  # verification can continue none of its entries
        if not sequence.num_pending:
            parents = None
            if not is_chain(draft.parent_indices):
                parents = np.concatenate([[-1], draft.parent_indices + 1]).astype(np.int32)
            self._entries.pop(session.session_id, None)
            return Segment(sequence, ids, parents, layers=layers, pseudo=pseudo), None
        assert pseudo is None, "self-drafting has no pseudo tokens"
        known = self._drafted.get(session.session_id, {})
        above = [-1, *(draft.parent_indices + 1).tolist()]
        entries, resumed, new_rows = _match(ids.tolist(), above, known, sequence.num_pending)
        self._entries[session.session_id] = entries
        new_parents = [-1 if above[row] < 0 else entries[above[row]] for row in new_rows]
        segment = Segment(
            sequence, ids[new_rows], np.asarray(new_parents, np.int32),
            layers=layers, resume=[entries[row] for row in resumed],
        )  # fmt: skip
        return segment, np.argsort([*resumed, *new_rows]).tolist()

    def commit(self, session: SessionView, path: Sequence[int]) -> None:
        """Keep the KV entries of the last committed token and of the accepted ``path``."""
        sequence = self._sequences[session.session_id]
        rows = [0, *(node + 1 for node in path)]
        entries = self._entries.pop(session.session_id, None)
        self.runner.commit(sequence, rows if entries is None else [entries[row] for row in rows])
        self._drafted.pop(session.session_id, None)

    # --- drafting with the target's own layers --------------------------------------------------

    def draft(
        self,
        sessions: Sequence[SessionView],
        steps: Sequence[Sequence[tuple[int, int]]],
        layers: Sequence[Sequence[int]],
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Compute drafted tokens with some of the target's layers, its norm and its head.

        If those are its first layers, verification continues their entries in the later layers, so
        no layer computes an accepted token twice.

        Args:
            steps: for each session, pairs of an earlier entry and the token after it. The first
                step of a round is ``(-1, the last committed token)``.
            layers: the layers to use, for each session.

        Returns:
            Logits after each token, sessions one after another.  # [num_tokens, vocab_size]
            The entry of each token.
        """
        segments, entries = [], []
        for session, pairs, chosen in zip(sessions, steps, layers, strict=True):
            sequence = self._sequences[session.session_id]
            if pairs and pairs[0][0] < 0:
                self._forget_draft(session)
            first = sequence.num_pending
            entries.append(list(range(first, first + len(pairs))))
            parents = np.asarray([parent for parent, _ in pairs], np.int32)
            tokens = np.asarray([token for _, token in pairs], np.int64)
            resumable = tuple(chosen) == tuple(range(len(chosen)))
            segments.append(Segment(sequence, tokens, parents, layers=chosen, resumable=resumable))
            if resumable:
                drafted = self._drafted.setdefault(session.session_id, {})
                drafted |= dict(zip(pairs, entries[-1], strict=True))
        return self.runner.forward(segments).logits, entries

    def exit_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the norm and the head to states after any layer; only if num_layers is not 0.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        return cast(LayeredRunner, self.runner).logits_of(states)

    def draft_chains(
        self,
        sessions: Sequence[SessionView],
        num_tokens: int,
        exit_layer: int,
        stop_below: FloatArray | None = None,
    ) -> list[IntArray] | None:
        """Draft argmax chains with the first layers in one call; None if the runner cannot.

        Args:
            stop_below: a chain ends after a token with a probability below this.
                # [num_tokens, num_sessions]

        Returns:
            Up to ``num_tokens`` tokens for each session.
        """
        runner = self.runner
        if not (isinstance(runner, LlamaRunner) and runner.drafts_chains):
            return None
        sequences = []
        for session in sessions:
            self._forget_draft(session)
            sequences.append(self._sequences[session.session_id])
        last = [session.token_ids[-1:] for session in sessions]
        tokens = runner.greedy_chain(sequences, last, num_tokens, exit_layer, stop_below)
        chains = [chain[chain >= 0] for chain in tokens.T]
        for session, begin, chain in zip(sessions, last, chains, strict=True):
            self._drafted[session.session_id] = _chain_entries([*begin, *chain.tolist()])
        return chains

    def _forget_draft(self, session: SessionView) -> None:
        """Free the entries of a draft that was not verified."""
        self._drafted.pop(session.session_id, None)
        sequence = self._sequences[session.session_id]
        if sequence.num_pending:
            self.runner.commit(sequence, ())

    def truncate(self, session: SessionView, length: int) -> None:
        """Forget everything after the first ``length`` committed tokens.

        Call it before cutting the session's own tokens. The last remaining token is computed again
        with the next draft.
        """
        self._forget_draft(session)
        sequence = self._sequences[session.session_id]
        self.runner.truncate(sequence, min(length - 1, sequence.length))


def last_layer_entries(
    target: ModelTarget, session: SessionView
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the last layer has of an open session's committed tokens.

    Only if num_layers is not 0.  # 2 x [length, kv_heads, head_dim]
    """
    assert isinstance(target.runner, LlamaRunner)
    sequence = target._sequences[session.session_id]
    keys, values = target.runner.keys_and_values(sequence, -1)
    return keys[0], values[0]


def _match(
    tokens: Sequence[int], above: Sequence[int], known: Mapping[tuple[int, int], int], first: int
) -> tuple[list[int], list[int], list[int]]:
    """Find the rows of a draft among entries that drafting has made.

    Args:
        tokens, above: of each row its token, and the row that it follows or -1.
        known: entries by the entry that they follow and their token.
        first: the first entry that is free for a new row.

    Returns:
        The entry of each row; the rows whose entry is known; the others.
    """
    left = dict(known)
    entries: list[int] = []
    resumed: list[int] = []
    new_rows: list[int] = []
    for row, (token, place) in enumerate(zip(tokens, above, strict=True)):
        parent = entries[place] if place >= 0 else -1
        entry = left.pop((parent, token), None)  # used once: two nodes may have the same path
        if entry is None:
            entry = first + len(new_rows)
            new_rows.append(row)
        else:
            resumed.append(row)
        entries.append(entry)
    return entries, resumed, new_rows
