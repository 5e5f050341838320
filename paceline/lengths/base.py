"""What a length controller is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.session import Session


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
    """

    depth: int
    token_id: int
    scores: npt.NDArray[np.floating[Any]]
    hidden: torch.Tensor | None = None


class StopRule(Protocol):
    """Ends a chain draft early, token by token.

    Attributes:
        wants_hidden: whether it reads :attr:`DraftStep.hidden`.
    """

    wants_hidden: bool

    def stop_after(self, step: DraftStep) -> bool:
        """Whether the draft ends with this token."""
        ...


class LengthController(Protocol):
    """Decides how much to draft. One instance for each session; a depth of 0 is legal.

    Attributes:
        needs: what it wants from the target's forwards, beside what the drafter wants.
        stop_rule: ends a draft of an expanding drafter early, on the machine that drafts; None
            where the length is known before drafting begins.
    """

    needs: frozenset[Need]
    stop_rule: StopRule | None

    def budget(self, session: Session, load: Load) -> Budget:
        """Depth and nodes for the next round of ``session``."""
        ...

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round: what became of the draft, and what it cost.

        Args:
            draft_seconds: until the draft was there, wherever it was made.
            verify_seconds: the forward that verified it, together with its batch mates' drafts.
        """
        ...
