"""Drafts what a constraint forces; where it leaves a choice, another drafter drafts.

A JSON schema fixes most of a text that only fills in values: braces, keys, colons. Servers commit
such text without asking the model ("jump-forward decoding", Zheng et al. 2023, SGLang, arXiv
2312.07104; llguidance's fast-forward tokens), which changes the tokens where the model would have
cut the text into other ones. Here it is a draft, so the output stays that of plain decoding under
the same constraint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters.base import FALLBACK_DEPTH, RELAY_TOKENS, DrafterPart, LookupDrafter
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView


class Forced(LookupDrafter[None]):
    """A chain of the tokens that have to come next (:mod:`paceline.constraint_text`)."""

    finds_chains = True

    def start(self, session: SessionView) -> None:
        return None

    def find(self, session: SessionView, state: None, budget: Budget) -> Draft | None:
        tokens = session.forced_ids([], min(budget.depth, budget.nodes))
        return Draft.chain(tokens) if tokens else None

    def find_behind(
        self, session: SessionView, state: None, drafted: list[int], room: int
    ) -> list[int]:
        return session.forced_ids(drafted, room)


FORCED = DrafterPart(make=lambda context: Forced(), replay="lookup")
FORCED_OR_DRAFT_MODEL = DrafterPart(
    make=lambda context: Forced(context.drafter("draft_model")),
    knobs=(FALLBACK_DEPTH.but(5), RELAY_TOKENS.but(8)),
    halves=("forced", "draft_model"),
)
