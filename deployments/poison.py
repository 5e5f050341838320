"""Requests whose targets died: each is tried on one more, and then refused for a while.

A target's death loses the work of all its sessions, and says nothing about which of them caused it.
Suspects are those whose request the target had taken and whose first token had not come since. They
are tried again one at a time, so that a second death names one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

from paceline.rpc.errors import PoisonRequest
from paceline.rpc.gen.paceline.v1 import generate_pb2

MAX_DEATHS = 2
REFUSED_S = 600.0
"""Seconds for which deaths are remembered, and a request is refused."""
_MAX_KNOWN = 4096


def digest_of(request: generate_pb2.GenerateRequest) -> str:
    """32 hex digits of what a request asks for; its seed and what came so far do not count."""
    same = generate_pb2.GenerateRequest()
    same.CopyFrom(request)
    for name in ("committed_token_ids", "fingerprint", "numerics_mismatch"):
        same.ClearField(name)
    same.sampling.ClearField("seed")
    return hashlib.sha256(same.SerializeToString(deterministic=True)).hexdigest()[:32]


class Poison:
    """What one gateway knows of requests whose targets died. Lives on its event loop.

    Attributes:
        turn: held while a suspect is tried again, until its first token.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        # The dead replicas of each digest, and when it is forgotten.
        self._deaths: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()

    def is_suspect(self, digest: str) -> bool:
        """Whether a target died with this request, and no other has answered it since."""
        return digest in self._deaths

    def check(self, digest: str) -> None:
        """Refuse a request that has killed too many.

        Raises:
            PoisonRequest: names the digest, and the seconds for which it is refused.
        """
        dead, until = self._deaths.get(digest, (frozenset(), 0.0))
        left = until - time.monotonic()
        if left <= 0:
            self._deaths.pop(digest, None)
        elif len(dead) >= MAX_DEATHS:
            raise PoisonRequest(
                f"{len(dead)} target processes died as they served this request (digest "
                f"{digest}): it is refused for {left:.0f} s. Change it, or ask the operator for "
                "the targets' logs",
                digest,
            )

    def died(self, digest: str, replica: str) -> None:
        """A target died with the request before the first token.

        Args:
            replica: which one; the choices of one request may have been on the same.

        Raises:
            PoisonRequest: as :meth:`check`.
        """
        dead, until = self._deaths.pop(digest, (frozenset[str](), 0.0))
        now = time.monotonic()
        dead = (dead if until > now else frozenset()) | {replica}
        self._deaths[digest] = (dead, now + REFUSED_S)
        if len(self._deaths) > _MAX_KNOWN:
            self._deaths.popitem(last=False)
        self.check(digest)

    def lives(self, digest: str) -> None:
        """The request got a token: it did not kill the target that died before."""
        known = self._deaths.get(digest)
        if known is not None and len(known[0]) < MAX_DEATHS:
            del self._deaths[digest]
