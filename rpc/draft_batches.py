"""Frames that wait at a drafter at the same time get their drafts from one forward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.rpc.gen.paceline.v1 import draft_pb2
from paceline.rpc.mirrors import DraftHost, Mirrors, Step

APART_S = 10.0
"""Seconds for which frames are drafted for one by one after a failure, so that those of the target
that caused it fail alone."""
_PAUSE_SHARE, _PAUSE_S = 0.05, 0.002
"""Time after a forward for streams to send their answers and to read the frames that have come
meanwhile: those then share the next forward. As a share of the forward's time, and at most."""


class DraftBatches:
    """The frames of all streams that wait for drafts.

    ``Drafter.propose`` runs on the event loop. While it runs, frames gather; all of them are in the
    next call.
    """

    def __init__(self, host: DraftHost) -> None:
        self._host = host
        self._waiting: list[tuple[Step, asyncio.Future[float]]] = []
        self._apart_until = 0.0
        self._next_at = 0.0  # in the loop's time

    @property
    def busy(self) -> bool:
        """Whether a frame waits."""
        return bool(self._waiting)

    def add(self, step: Step) -> asyncio.Future[float]:
        """Completes when the frame's drafts are made, with the seconds of their computation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[float] = loop.create_future()
        if not (step.asking or step.observed):
            future.set_result(0.0)
            return future
        if not self._waiting:  # the streams whose frames are here already come first
            loop.call_at(self._next_at, self._run)
        self._waiting.append((step, future))
        return future

    def drop(self, mirrors: Mirrors) -> None:
        """Forget the frames of a stream that has ended."""
        self._waiting = [each for each in self._waiting if each[0].mirrors is not mirrors]

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        apart = time.monotonic() < self._apart_until
        for batch in [[each] for each in waiting] if apart else [waiting]:
            started = time.perf_counter()
            if not self._host.draft([step for step, _ in batch]) and len(batch) > 1:
                self._apart_until = time.monotonic() + APART_S
            seconds = time.perf_counter() - started
            for _, future in batch:
                if not future.done():  # its stream may just end
                    future.set_result(seconds)
            pause = min(seconds * _PAUSE_SHARE, _PAUSE_S)
            self._next_at = asyncio.get_running_loop().time() + pause


@dataclass(slots=True, eq=False)
class Begun:
    """A frame whose tokens the mirrors have.

    Attributes:
        drafted: completes with its drafts.
        over: set when it is answered, and nothing more is done for its sessions.
    """

    frame: draft_pb2.ProposeFrame
    step: Step
    drafted: asyncio.Future[float]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class FrameReader:
    """Reads the frames of one stream while earlier ones wait for their drafts.

    A frame begins when earlier frames that name one of its sessions are over.
    """

    def __init__(self, mirrors: Mirrors, batches: DraftBatches) -> None:
        self._mirrors = mirrors
        self._batches = batches
        self._begun: asyncio.Queue[Begun | Exception | None] = asyncio.Queue()
        self._last: dict[str, Begun] = {}  # by session, the last frame that names it

    async def read(
        self, frames: AsyncIterator[draft_pb2.ProposeFrame]
    ) -> AsyncGenerator[Begun, None]:
        """The frames in their order, each with its drafts; raises what reading them raises."""
        reading = asyncio.create_task(self._read(frames))
        try:
            while (found := await self._begun.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                await found.drafted
                yield found
                self._end(found)
        finally:
            self._batches.drop(self._mirrors)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _read(self, frames: AsyncIterator[draft_pb2.ProposeFrame]) -> None:
        try:
            async for frame in frames:
                names = {item.session_id for item in frame.items}
                while earlier := [self._last[name] for name in names & self._last.keys()]:
                    await earlier[0].over.wait()
                step = self._mirrors.begin(frame.items)
                begun = Begun(frame, step, self._batches.add(step))
                self._last.update(dict.fromkeys(names, begun))
                self._begun.put_nowait(begun)
        except Exception as error:
            self._begun.put_nowait(error)
        else:
            self._begun.put_nowait(None)

    def _end(self, begun: Begun) -> None:
        for item in begun.frame.items:
            self._last.pop(item.session_id, None)
        begun.over.set()
