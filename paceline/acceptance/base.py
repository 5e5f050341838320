"""What an acceptance rule is, and what it may look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.sampling import Row, process_logits
from paceline.types import Acceptance, Draft, Draws

if TYPE_CHECKING:
    import torch

    from paceline.sampling import SamplingParams


class PathLogits:
    """The target's logits along the path that a rule walks, processed only where it looks.

    Penalties and constraints depend on the tokens before a position, and those are known only
    once the path to it is; processing lazily therefore sees exactly the prefix that AR would
    have seen.

    Args:
        logits: raw, row 0 at the root and row ``i + 1`` at node ``i``.  # [num_nodes + 1, vocab]
        params: the request's sampling parameters.
        history: the committed tokens.
        argmaxes: argmax of each row where somebody computed them for the whole batch at once.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        history: list[int],
        argmaxes: Sequence[int] | None = None,
    ) -> None:
        self.params = params
        self.position = len(history)
        self._logits = logits
        self._history = history
        self._argmaxes = argmaxes if params.is_plain_argmax else None

    def row(self, path_tokens: list[int], node: int) -> Row:
        """Processed logits after ``node`` (-1: the root), reached over ``path_tokens``."""
        row: Row = self._logits[node + 1].float().cpu().numpy()
        history = self._history + path_tokens if self.params.depends_on_history else self._history
        return process_logits(row, self.params, history)

    def argmax(self, path_tokens: list[int], node: int) -> int:
        """Argmax of :meth:`row`."""
        if self._argmaxes is not None:
            return self._argmaxes[node + 1]
        return int(np.argmax(self.row(path_tokens, node)))


class AcceptanceRule(Protocol):
    """A pure function of a draft, the target's logits and the seed.

    Attributes:
        name: as in the catalogue.
        lossless: the output law (or, for coupled and greedy, the output itself) is the target's.
        chain_only: refuses drafts with more than one branch.
        draws: how it wants the children of a node to be chosen.
    """

    name: str
    lossless: bool
    chain_only: bool
    draws: Draws

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        """The accepted path (node indices, root side first) and the target's next token."""
        ...
