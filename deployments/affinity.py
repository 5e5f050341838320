"""Which target a session goes to: one that has read its prompt's beginning, and no standby.

The gateway remembers which replica read which beginnings (:class:`PrefixTable`), and prefers the
one that read the longest. Serve routes there (:class:`AffinityRouter`), unless that replica has too
many sessions more than another one. Gateways do not share their tables: a prompt that comes through
another gateway may be read once more.

With ``target.standby`` some replicas get sessions only while another one is gone or full. Gateways
agree on which, without a word: those whose ids sort last.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from ray.serve.request_router import (
    LocalityMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from paceline.rpc.access import CACHE_SCOPE
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2

STEP_BYTES = 256
"""A beginning is known at every multiple of this: some 64 tokens."""
MOST_STEPS = 256
"""Longer prompts are told apart by their first 64 kB."""
MOST_KEYS = 65_536
SLACK = 4
"""How many sessions more than the least busy replica the preferred one may have."""
MISSING_S = 120.0
"""Seconds after which fewer replicas are all that are wanted: Serve starts no other one."""


def prefix_keys(prompt: bytes, scope: str = "") -> tuple[bytes, ...]:
    """Digests of the beginnings of a prompt, shortest first.

    Args:
        prompt: text, or token ids in four bytes each.
        scope: whose prompt it is; replicas share cached entries only within it.
    """
    digest = hashlib.blake2b(scope.encode(), digest_size=12)
    keys = []
    for end in range(STEP_BYTES, min(len(prompt), STEP_BYTES * MOST_STEPS) + 1, STEP_BYTES):
        digest.update(prompt[end - STEP_BYTES : end])
        keys.append(digest.copy().digest())
    return tuple(keys)


def message_keys(
    message: generate_pb2.GenerateRequest | verify_pb2.OpenRequest,
    metadata: Iterable[tuple[str, str]],
) -> tuple[bytes, ...]:
    """The keys of a request's prompt.

    Args:
        metadata: of the call to the target.
    """
    scope = dict(metadata).get(CACHE_SCOPE, "")
    if message.adapter:  # its cached entries are its own
        scope = f"{scope}\n{message.adapter}"
    if isinstance(message, verify_pb2.OpenRequest):
        token_ids = message.token_ids
    elif message.WhichOneof("prompt") == "text":
        return prefix_keys(message.text.encode(), scope)
    else:
        token_ids = message.token_ids.token_ids
    longest = STEP_BYTES * MOST_STEPS // 4
    return prefix_keys(np.asarray(token_ids[:longest], "<i4").tobytes(), scope)


class PrefixTable:
    """Which replica has read which beginning last."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> str:
        """Id of the replica that has read the longest of these beginnings; "" if none has."""
        for key in reversed(keys):
            replica = self._replicas.get(key)
            if replica is not None:
                return replica
        return ""

    def note(self, keys: Sequence[bytes], replica_id: str) -> None:
        """A replica reads a prompt with these beginnings."""
        for key in keys:
            self._replicas[key] = replica_id
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)


class AffinityRouter(LocalityMixin, RequestRouter):
    """The preferred replica if it is not too busy, else the less busy of two at random.

    The caller names the preferred replica by its unique id in the keyword argument ``prefer``.
    """

    _standby = 0
    _num_replicas = 0  # the most that there were lately
    _seen_at = 0.0

    def initialize_state(self, standby: int = 0) -> None:
        """Serve calls this with the ``request_router_kwargs``.

        Args:
            standby: how many replicas get sessions only while another one is gone or full.
        """
        self._standby = standby

    def _active(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Those that are not on standby now."""
        now = time.monotonic()
        if len(replicas) >= self._num_replicas or now - self._seen_at > MISSING_S:
            self._num_replicas, self._seen_at = len(replicas), now
        replicas = sorted(replicas, key=lambda each: each.replica_id.unique_id)
        return replicas[: max(1, self._num_replicas - self._standby)]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The ranks of replicas among which Serve chooses: it takes the first that has room."""
        active = self._active(candidate_replicas)
        candidates = active
        if pending_request is not None:
            near = self.apply_locality_routing(pending_request=pending_request)
            candidates = [each for each in active if each.replica_id in near] or active
        usual = random.sample(candidates, min(2, len(candidates)))
        standby = [each for each in candidate_replicas if each not in active]
        wanted = "" if pending_request is None else pending_request.kwargs.get("prefer", "")
        preferred = [each for each in active if each.replica_id.unique_id == wanted]
        ranks = [usual, standby] if standby else [usual]
        if not preferred or not usual:
            return ranks
        lengths = {
            each.replica_id: self.replica_queue_len_cache.get(each.replica_id) or 0
            for each in active
        }
        busy = lengths[preferred[0].replica_id] > min(lengths.values()) + SLACK
        return ranks if busy else [preferred, *ranks]
