"""What a drafter is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from paceline.types import Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session


class Drafter(Protocol):
    """Proposes token trees. Batch-first: it gets all sessions of a step at once.

    Attributes:
        needs: what it wants from the target; the engine computes just that.
    """

    needs: frozenset[Need]

    def open(self, session: Session) -> None:
        """Prepare state for a session, which holds its prompt. Called once, before any round."""
        ...

    def close(self, session: Session) -> None:
        """Free the state of a session; unknown sessions are ignored."""
        ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft for each session, at most as deep and large as its budget."""
        ...

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """Learn what became of the last drafts; the sessions hold the new tokens already."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What an engine tells a drafter that it makes.

    Attributes:
        vocab_size: of the target.
        drafter: another drafter of the same engine by name; raises InvalidArgument where it is
            not loaded, or lives elsewhere.
    """

    vocab_size: int
    drafter: Callable[[str], Drafter]


class AsyncDrafter(Protocol):
    """A drafter that lives elsewhere: drafts arrive later, and the target does not wait for them.

    Everything else is as in :class:`Drafter`.
    """

    needs: frozenset[Need]

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def propose_async(
        self, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        """One future for each session. A future that fails turns its session to AR."""
        ...

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...


def is_remote(drafter: Drafter | AsyncDrafter) -> TypeGuard[AsyncDrafter]:
    """Whether drafts arrive later. (``isinstance`` with a Protocol costs 25 µs a call.)"""
    return hasattr(drafter, "propose_async")


def is_local(drafter: Drafter | AsyncDrafter) -> TypeGuard[Drafter]:
    """Whether drafts are made on the spot."""
    return hasattr(drafter, "propose")
