"""The target: the model whose output counts, with one KV sequence for each session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.models.base import KVSequence, ModelRunner, Segment
from paceline.session import Session
from paceline.tree import is_chain
from paceline.types import Draft, Need, Verification


class ModelTarget:
    """Verifies drafts with one packed forward for all sessions of a step.

    The KV cache of a session holds its committed tokens but the last, which is computed together
    with the next draft.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._sequences: dict[str, KVSequence] = {}

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def context_length(self) -> int:
        return self.runner.context_length

    @property
    def kv_capacity(self) -> int:
        return self.runner.kv_capacity

    @property
    def num_free(self) -> int:
        """KV entries that no session uses."""
        return self.runner.num_free

    def open(self, session: Session) -> None:
        """Give a session an empty KV sequence."""
        self._sequences[session.session_id] = self.runner.new_sequence()

    def close(self, session: Session) -> None:
        """Free a session's KV entries; a session that is not open is ignored."""
        sequence = self._sequences.pop(session.session_id, None)
        if sequence is not None:
            self.runner.free(sequence)

    def prefill_left(self, session: Session) -> int:
        """Committed tokens that have no KV entry yet, without the last one."""
        return session.length - 1 - self._sequences[session.session_id].length

    def verify(
        self,
        sessions: Sequence[Session],
        drafts: Sequence[Draft],
        wants: frozenset[Need] = frozenset(),
        prefill: Sequence[tuple[Session, int]] = (),
    ) -> list[Verification]:
        """One forward over the last committed token and all nodes of each draft.

        ``prefill`` names sessions whose next ``count`` prompt tokens are computed (and committed
        to the KV cache) in the same forward. Logits come back for the drafts only.
        """
        segments = []
        for session, count in prefill:
            sequence = self._sequences[session.session_id]
            chunk = session.token_ids[sequence.length : sequence.length + count]
            segments.append(Segment(sequence, np.asarray(chunk, np.int64), logits="none"))
        for session, draft in zip(sessions, drafts, strict=True):
            sequence = self._sequences[session.session_id]
            ids = np.concatenate([[session.token_ids[-1]], draft.token_ids])
            parents = None
            if not is_chain(draft.parent_indices):
                parents = np.concatenate([[-1], draft.parent_indices + 1]).astype(np.int32)
            segments.append(Segment(sequence, ids, parents))
        result = self.runner.forward(segments, wants)
        for session, count in prefill:
            self.runner.commit(self._sequences[session.session_id], range(count))
        verifications = []
        for i in range(len(prefill), len(segments)):
            rows = result.rows(i)
            extras = {need: tensor[rows] for need, tensor in result.extras.items()}
            verifications.append(Verification(result.logits[rows], extras))
        return verifications

    def commit(self, session: Session, path: Sequence[int]) -> None:
        """Keep the KV entries of the last committed token and of the accepted ``path``."""
        sequence = self._sequences[session.session_id]
        self.runner.commit(sequence, [0, *(node + 1 for node in path)])

    def truncate(self, session: Session, length: int) -> None:
        """Forget everything after the first ``length`` committed tokens.

        Call it before the session's own tokens are cut. The last token that stays is computed
        again with the next draft.
        """
        sequence = self._sequences[session.session_id]
        self.runner.truncate(sequence, min(length - 1, sequence.length))
