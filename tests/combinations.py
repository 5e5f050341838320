"""What users may ask for and what they may not: the same over library, command line and gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.methods import ACCEPTANCE_RULES, METHODS
from paceline.sampling import SamplingParams


@dataclass(frozen=True)
class Combination:
    """A request that is refused, and what the error says.

    Attributes:
        speculation: method and knobs.
        field: what the error names.
        words: what its message contains: the value, and what is allowed or would work.
    """

    speculation: Mapping[str, Any]
    field: str
    words: tuple[str, ...]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=4))

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.speculation.items())


IMPOSSIBLE = (
    Combination({"method": "magic"}, "method", ("'magic'", "one of", "draft_model", *METHODS)),
    Combination(
        {"method": "prompt_lookup", "branching": 2},
        "branching",
        ("2", "a knob of method 'prompt_lookup'", "ngram_max"),
    ),
    Combination(
        {"method": "prompt_lookup", "shape": "kary"},
        "shape",
        ("'kary'", "a knob of method 'prompt_lookup'"),
    ),
    Combination(
        {"method": "prompt_lookup", "ngram_min": 4, "ngram_max": 2},
        "ngram_min",
        ("4", "<= ngram_max (2)"),
    ),
    Combination({"method": "draft_model", "shape": "pyramid"}, "shape", ("'pyramid'", "chain")),
    Combination({"method": "draft_model", "length": "hope"}, "length", ("'hope'", "fixed")),
    Combination(
        {"method": "draft_model", "acceptance": "faith"}, "acceptance", ("'faith'", "coupled")
    ),
    Combination(
        {"method": "draft_model_tree", "acceptance": "rejection"},
        "acceptance",
        ("'rejection'", "coupled", "shape"),
    ),
    Combination(
        {"method": "draft_model", "acceptance": "greedy"},
        "acceptance",
        ("'greedy'", "coupled", "temperature"),
        SamplingParams(max_tokens=4, temperature=0.7),
    ),
    *(
        Combination({"method": name}, "acceptance", (method.acceptance, "allow_lossy"))
        if not ACCEPTANCE_RULES[method.acceptance].lossless
        else Combination({"method": name}, "method", (name, "allow_lossy"))
        for name, method in METHODS.items()
        if not method.lossless
    ),
)

# Values that do not fit their knob: the same key is named everywhere, the words are the schema's.
BAD_VALUES: tuple[tuple[str, Any], ...] = (
    ("num_speculative_tokens", 65),
    ("num_speculative_tokens", "many"),
    ("node_budget", 1.5),
    ("allow_lossy", 1),
    ("depth", 3),
)
"""Pairs of key and value."""

# Requests that differ in method and knobs only, so all of them have the same tokens.
POSSIBLE: tuple[Mapping[str, Any], ...] = (
    {"method": "ar"},
    {"method": "draft_model"},
    {"method": "draft_model", "num_speculative_tokens": 2, "shape": "kary", "branching": 3},
    {"method": "draft_model_tree", "node_budget": 7},
    {"method": "prompt_lookup", "ngram_max": 2, "num_speculative_tokens": 3},
    {"method": "prompt_lookup", "num_speculative_tokens": 0},
)
