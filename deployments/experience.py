"""Keeps what an engine's sessions have learnt in a file, for the next start and other replicas.

That is the experience of method ``auto``, and the acceptance by rank that trees are built from.

The file lies in the cache folder, one for each model: replicas of a node share it, and so do those
of several nodes whose cache folder is a shared volume. `paceline generate` and `chat` have one of
their own. It holds numbers only, nothing of any text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.cache import cache_folder, locked
from paceline.errors import InvalidArgument
from paceline.lengths.experience import experience_of

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.engine import Engine, EngineThread

INTERVAL_S = 60.0
"""Seconds between two exchanges with the file."""
LARGEST_BYTES = 16 * 2**20
_TIMEOUT_S = 10.0  # for an engine that is in a long step

logger = logging.getLogger(__name__)


_Use = Callable[["Engine"], dict[str, Any]]


class ExperienceFile:
    """Exchanges an engine's experience with the file of its model.

    Args:
        on_engine: calls a function with the engine, between two steps, and returns its result.
        model: tells the engine's target from others.
        first: JSON text of the document to begin with while there is no file.
    """

    def __init__(
        self, on_engine: Callable[[_Use], dict[str, Any]], model: str, first: str | None = None
    ) -> None:
        name = hashlib.sha256(model.encode()).hexdigest()[:32]
        self.path = cache_folder("experience") / f"{name}.json"
        self._on_engine = on_engine
        self._first = first
        self._written = ""
        self._works = True

    @staticmethod
    def of_thread(
        thread: EngineThread, fingerprint: str, first: str | None = None
    ) -> ExperienceFile:
        """That of an engine on a thread of its own.

        Args:
            fingerprint: of its target.
            first: as of the constructor.
        """
        return ExperienceFile(lambda use: thread.call(use).result(_TIMEOUT_S), fingerprint, first)

    def exchange(self) -> None:
        """Learn what others have added to the file, and write what is known now.

        An unreadable file is replaced; a folder that cannot be written is reported once.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_suffix(".lock")):
                found = self._read()
                known = self._on_engine(lambda engine: _merged(engine, found))
                text = json.dumps(known)
                part = self.path.with_suffix(f".{os.getpid()}.tmp")
                part.write_text(text, "utf-8")
                part.replace(self.path)
                self._written = text
        except OSError as error:
            if self._works:
                logger.warning("what is learnt starts anew after a restart: %s", error)
            self._works = False

    def _read(self) -> Any:
        """The document in the file, or the first one; None if this replica knows it."""
        first, self._first = self._first, None  # once, even if no file can be written
        if not self.path.exists():
            return None if first is None else json.loads(first)
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > LARGEST_BYTES:
                logger.warning("%s is too large to be read, and replaced", self.path)
                return None
            text = self.path.read_text("utf-8", errors="replace")
            if text != self._written:
                try:
                    return json.loads(text)
                except ValueError as error:
                    logger.warning("%s is no JSON, and replaced: %s", self.path, error)
        return None

    async def run(self) -> None:
        """Exchange every :data:`INTERVAL_S` seconds until cancelled, and then once more."""
        try:
            while True:
                await asyncio.to_thread(self.try_to_exchange)
                await asyncio.sleep(INTERVAL_S)
        finally:
            await asyncio.to_thread(self.try_to_exchange)

    def try_to_exchange(self) -> None:
        """Exchange; a failure is logged."""
        try:
            self.exchange()
        except Exception:  # serving does not depend on it
            logger.exception("cannot exchange experience with %s", self.path)


@contextlib.contextmanager
def kept_experience(engine: Engine, config: SpeculationConfig) -> Iterator[None]:
    """Begin with what was learnt before with this target, and keep what is learnt inside.

    Args:
        config: of the requests; method ``auto`` learns, and trees that follow measured ranks.
    """
    # These load torch, which who builds an application has not.
    from paceline.plan import resolve
    from paceline.profile import LoadCosts

    costs = engine.length_context.measure
    learns = config.method == "auto" or resolve(config).measures_ranks
    if not learns or not isinstance(costs, LoadCosts):
        yield
        return
    # A fingerprint would be better, but takes a reading of all weights.
    file = ExperienceFile(lambda use: use(engine), json.dumps(costs.key, sort_keys=True))
    file.try_to_exchange()
    try:
        yield
    finally:
        file.try_to_exchange()


def _merged(engine: Engine, found: Any) -> dict[str, Any]:
    """The engine's experience with that of a document added; between two steps."""
    experience = experience_of(engine.length_context)
    if found is not None:
        try:
            experience.merge(found)
        except InvalidArgument as error:
            logger.warning("the experience of another version is not used: %s", error)
    return experience.document()
