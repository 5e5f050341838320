"""The catalogue: one row for each paper, assembled here and nowhere else.

A row names a drafter, a shape, an acceptance rule and a length controller. There is no
registration by import: a fresh worker process sees the same rows. To add a paper, write the one
file that is new in it and add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.acceptance.base import AcceptanceRule
from paceline.acceptance.exact_match import Coupled, Greedy
from paceline.acceptance.rejection import Rejection
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.lengths.base import LengthController
from paceline.lengths.fixed import FixedLength
from paceline.shapes.base import Shape
from paceline.shapes.kary import Kary, chain
from paceline.types import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row.

    Attributes:
        name: what users write.
        paper: title, year and arXiv id.
        drafter, shape, acceptance, length: names of the four parts; shape is None for a lookup
            drafter, which finds whole drafts by itself.
        defaults: values for the knobs of this row; a knob that is absent here (and is not one of
            ``COMMON_KNOBS``) does not exist for this row.
        needs: what the drafter wants from the target.
        uses: other drafters that this row's drafter is made of, by name.
    """

    name: str
    paper: str
    drafter: str
    shape: str | None
    acceptance: str
    length: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()
    uses: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool:
        return ACCEPTANCE_RULES[self.acceptance].lossless

    def as_dict(self) -> dict[str, Any]:
        """The row as `paceline methods --json` prints it."""
        return {
            "name": self.name,
            "paper": self.paper,
            "summary": self.summary,
            "drafter": self.drafter,
            "shape": self.shape,
            "acceptance": self.acceptance,
            "length": self.length,
            "lossless": self.lossless,
            "needs": sorted(need.value for need in self.needs),
            "knobs": dict(self.defaults),
        }


ACCEPTANCE_RULES: Mapping[str, AcceptanceRule] = {
    rule.name: rule for rule in (Coupled(), Greedy(), Rejection())
}

SHAPES: Mapping[str, Callable[[SpeculationConfig], Shape]] = {
    "chain": lambda config: chain(),
    "kary": lambda config: Kary(config.branching or 2),
}

LENGTHS: Mapping[str, Callable[[SpeculationConfig], LengthController]] = {
    "fixed": lambda config: FixedLength(config.num_speculative_tokens or 0, config.node_budget or 0)
}

# Drafters that an engine makes by itself, the first time that a request wants them. The others
# (a draft model, a client) are given to it.
DRAFTERS: Mapping[str, Callable[[DrafterContext], Drafter]] = {
    "prompt_lookup": lambda context: PromptLookup(),
}

COMMON_KNOBS = frozenset({"method", "acceptance", "length", "allow_lossy"})

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="ar",
            paper="Autoregressive decoding (the baseline)",
            summary="One token per target forward.",
            drafter="none",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 0, "node_budget": 0},
        ),
        Method(
            name="draft_model",
            paper="Daliri, Musco, Suresh: Coupling without Communication, 2024, arXiv 2408.07978",
            summary="A small model drafts a chain with the target's own noise.",
            drafter="draft_model",
            shape="chain",
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 6, "node_budget": None, "branching": None},
        ),
        Method(
            name="draft_model_tree",
            paper="Miao et al.: SpecInfer, 2023, arXiv 2305.09781",
            summary="A small model drafts a k-ary token tree.",
            drafter="draft_model",
            shape="kary",
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 4, "node_budget": 14, "branching": 2},
        ),
        Method(
            name="speculative_sampling",
            paper="Leviathan, Kalman, Matias: Fast Inference via Speculative Decoding, 2022, "
            "arXiv 2211.17192; Chen et al., 2023, arXiv 2302.01318",
            summary="A small model samples a chain; rejection sampling corrects it.",
            drafter="draft_model",
            shape="chain",
            acceptance="rejection",
            length="fixed",
            defaults={
                "num_speculative_tokens": 4,
                "node_budget": None,
                "branching": None,
                "draft_support": 64,
            },
        ),
        Method(
            name="prompt_lookup",
            paper="Saxena: Prompt Lookup Decoding, 2023, github.com/apoorvumang/"
            "prompt-lookup-decoding",
            summary="Copies what followed the last occurrence of the current suffix.",
            drafter="prompt_lookup",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={
                "num_speculative_tokens": 10,
                "node_budget": None,
                "ngram_max": 3,
                "ngram_min": 1,
            },
        ),
    )
}
