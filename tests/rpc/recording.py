"""A drafter's servicer that remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.gen.paceline.v1 import draft_pb2


class Recording(DraftServicer):
    """Remembers the frames of all streams."""

    frames: list[draft_pb2.ProposeFrame]

    async def Propose(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.frames = getattr(self, "frames", [])

        async def recorded() -> AsyncIterator[draft_pb2.ProposeFrame]:
            async for frame in request_iterator:
                self.frames.append(frame)
                yield frame

        replies: Any = super().Propose(recorded(), context)
        try:
            async for reply in replies:
                yield reply
        finally:
            await replies.aclose()

    @property
    def items_with_states(self) -> list[draft_pb2.ProposeItem]:
        """Those that brought the target's states, in their order."""
        frames = getattr(self, "frames", [])
        return [item for frame in frames for item in frame.items if item.HasField("states")]
