"""SpeculationConfig: the one schema for "how to speculate".

The same schema is a library argument, a field of a gRPC or HTTP request, a block of the Serve
YAML, the values of the Helm chart, a point of the search space and the output of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import InvalidArgument

MAX_DEPTH = 64
MAX_NODES = 256


class SpeculationConfig(BaseModel):
    """A method of the catalogue and its knobs. ``None`` means the method's own default.

    Unknown keys, and knobs that the chosen method does not have, are errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = Field(
        default="draft_model", description="A row of the catalogue (`paceline methods`)."
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=0, le=MAX_DEPTH, description="Depth of the draft; 0 is plain AR decoding."
    )
    node_budget: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NODES,
        description="Nodes of the draft at most; default: the depth.",
    )
    shape: str | None = Field(default=None, description="Tree shape of an expanding drafter.")
    branching: int | None = Field(
        default=None, ge=1, le=16, description="Children of each node in the shape `kary`."
    )
    acceptance: str | None = Field(default=None, description="Acceptance rule.")
    length: str | None = Field(default=None, description="Length controller.")
    draft_support: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Most likely tokens that a sampled draft is drawn from (rejection sampling).",
    )
    ngram_max: int | None = Field(
        default=None, ge=1, le=16, description="Longest suffix that prompt lookup searches for."
    )
    ngram_min: int | None = Field(
        default=None, ge=1, le=16, description="Shortest suffix that prompt lookup searches for."
    )
    allow_lossy: bool = Field(
        default=False, description="Permit rows and rules that can change the target's output."
    )

    def overrides(self) -> dict[str, Any]:
        """The fields that were set, as a mapping that :func:`parse_speculation` accepts."""
        return self.model_dump(exclude_none=True, exclude_defaults=False)


def parse_speculation(
    value: Mapping[str, Any] | None, prefix: str = "speculation"
) -> SpeculationConfig:
    """Build a SpeculationConfig from untrusted keys and values.

    Raises:
        InvalidArgument: naming the first offending key as ``prefix.key`` and what is allowed.
    """
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument(prefix, value, "a mapping from knobs to values")
    try:
        return SpeculationConfig.model_validate(dict(value or {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            allowed = "one of the keys " + ", ".join(sorted(SpeculationConfig.model_fields))
            raise InvalidArgument(f"{prefix}.{key}", first["input"], allowed) from None
        raise InvalidArgument(f"{prefix}.{key}", first["input"], first["msg"]) from None
