"""Judge Decoding: a trained judge keeps drafted tokens that the standard rule rejects (lossy).

Bachmann et al. 2025 (arXiv 2501.19309): the last hidden state that the target has at a drafted
token says whether a text that goes on from there is still right, even if the target itself would
have chosen another token. A linear head reads it. A token is accepted if it is the target's own or
if the judge is sure enough of it; the first one that fails both ends the draft.

The paper trains the head on tokens that people labelled. ``paceline train judge`` makes the labels
with the target alone (:mod:`paceline.train.judge`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.acceptance.base import PathLogits, walk
from paceline.exact_math import log_of, sum64
from paceline.knobs import Knob
from paceline.lengths.base import LengthContext, load_head
from paceline.types import Acceptance, Draft, Draws, FloatArray, Need

THRESHOLD = Knob[float](
    "judge_threshold", float, 0.5,
    "The rule `judge` accepts a token that its head finds right with more than this probability; 1 "
    "is exact, 0 accepts every draft.",
    ge=0.0, le=1.0, search=(0.5, 0.7, 0.9),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class JudgeHead:
    """A linear head on the target's last hidden state.

    Attributes:
        weight: # [hidden_size]
        bias: of the score, whose sigmoid is the probability that the token is right.
    """

    weight: FloatArray
    bias: float

    def score(self, state: FloatArray) -> float:
        """Log-odds that a token is right, given the state at it.  # [hidden_size]"""
        return sum64(self.weight * state) + self.bias


@dataclass(frozen=True, slots=True)
class Judge:
    """Walk down the tree as long as a child is the target's own token or passes the judge.

    Attributes:
        head: None: only the target's own tokens are accepted.
    """

    judge_threshold: float = THRESHOLD.default
    head: JudgeHead | None = None

    knobs = (THRESHOLD,)
    name = "judge"
    lossless = False
    chain_only = False
    draws = Draws.COUPLED
    needs = frozenset({Need.HIDDEN_STATES})

    def trained(self, context: LengthContext) -> Judge:
        """The rule with the head of this pair of models.

        Raises:
            InvalidArgument: the pair has none, or it was trained for another target.
        """
        weights = load_head(context, "judge", field="acceptance")
        return replace(self, head=JudgeHead(weights["weight"], float(weights["bias"][0])))

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        def preferred(nodes: list[int], own: int, tokens: list[int], parent: int) -> int:
            """The child that the judge prefers, or -1."""
            if self.head is None:
                return -1
            best, least = -1, _log_odds(self.judge_threshold)
            row = target.row(tokens, parent)
            for child in nodes:
                state = target.state(child)
                assert state is not None  # the loop asks for what a rule needs
                score = self.head.score(state)
                # A constraint or a mask forbids a token whatever the judge says.
                if score > least and row[draft.token_ids[child]] > -math.inf:
                    best, least = child, score
            return best

        return walk(draft, target.token, preferred)


def _log_odds(chance: float) -> float:
    if chance in (0.0, 1.0):  # below and above every score
        return -math.inf if chance == 0.0 else math.inf
    return log_of(chance / (1.0 - chance))
