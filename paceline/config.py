"""SpeculationConfig: the one schema for "how to speculate".

The same schema is a library argument, a field of a gRPC or HTTP request, a block of the Serve
YAML, the values of the Helm chart, a point of the search space and the output of a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import InvalidArgument

MAX_DEPTH = 64
MAX_NODES = 256


class SpeculationConfig(BaseModel):
    """A method of the catalogue and its knobs. ``None`` means the method's own default.

    Unknown keys, and knobs that the chosen method does not have, are errors. A knob that is a list
    is a ``tuple[...] | None`` with ``Field(strict=False, min_length=1, ...)``: JSON and YAML bring
    lists, and a tuple keeps the config hashable.
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
        default=None,
        ge=1,
        le=16,
        description="Width of a tree: children of each node (`kary`; `dyspec`: at most), nodes "
        "expanded in a level and children of each (`confidence`), beams (`rsd_s`) or sequences "
        "(`iid`).",
    )
    branching_vector: tuple[Annotated[int, Field(ge=1, le=16)], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=MAX_DEPTH,
        description="Children of each node, level by level from the root, in the shape `rsd_c`.",
    )
    template: (
        str
        | Annotated[
            tuple[
                Annotated[
                    tuple[Annotated[int, Field(ge=0, le=63)], ...],
                    Field(strict=False, min_length=1, max_length=MAX_DEPTH),
                ],
                ...,
            ],
            Field(strict=False, min_length=1, max_length=MAX_NODES),
        ]
        | None
    ) = Field(
        default=None,
        description="Tree of the shape `template`: `medusa_63`, `token_recycling_80`, or the "
        "paths of its nodes as lists of ranks, a parent before its children.",
    )
    rank_acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=16,
        description="Probability that the drafter's first, second, ... candidate is the accepted "
        "one, from which the shape `sequoia` makes its tree.",
    )
    acceptance: str | None = Field(default=None, description="Acceptance rule.")
    length: str | None = Field(default=None, description="Length controller.")
    length_min: int | None = Field(
        default=None, ge=0, le=MAX_DEPTH, description="Shortest draft that a controller may choose."
    )
    length_max: int | None = Field(
        default=None, ge=0, le=MAX_DEPTH, description="Longest draft that a controller may choose."
    )
    stop_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="When a controller ends a draft: acceptance less likely than this "
        "(`confidence`, `disco`), or a rejection likelier than this (`specdecpp`).",
    )
    draft_support: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Most likely tokens that a sampled draft is drawn from (rejection sampling).",
    )
    ngram_max: int | None = Field(
        default=None, ge=1, le=16, description="Longest suffix of the context that is looked up."
    )
    ngram_min: int | None = Field(
        default=None, ge=1, le=16, description="Shortest suffix that prompt lookup searches for."
    )
    window_size: int | None = Field(
        default=None, ge=1, le=32, description="Columns of the window of lookahead decoding (W)."
    )
    ngram_size: int | None = Field(
        default=None, ge=2, le=16, description="Tokens of an n-gram of lookahead decoding (N)."
    )
    pool_guesses: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="N-grams kept and tried for each first token in lookahead decoding (G).",
    )
    pool_from_prompt: bool | None = Field(
        default=None, description="Put the prompt's n-grams into the pool of lookahead decoding."
    )
    parallel_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Generated tokens that hybrid Jacobi decoding refines in blocks before it "
        "goes on as AR; default: the length of the prompt.",
    )
    search_iterations: int | None = Field(
        default=None, ge=1, le=1000, description="Iterations of ADED's tree search in each round."
    )
    exit_layer: int | None = Field(
        default=None,
        ge=1,
        description="Layers of the target that draft for it; default: a third of them.",
    )
    exit_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=32,
        description="Exits that the controller `del` chooses from (default: evenly spread ones), "
        "or those of the draft model in `s2d` (default: all of its layers, halved over and over).",
    )
    exit_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Probability from which on a shallow sub-model's token is taken in `s2d`; 0 is "
        "always the shallowest, 1 always the deepest.",
    )
    speedup_ratio: float | None = Field(
        default=None,
        ge=1.0,
        le=64.0,
        description="Unified layer skipping keeps the target's layers divided by this.",
    )
    min_layers: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of the layers that the last token has at least (`skipdecode`, `d3`).",
    )
    max_layers: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of the layers that the first token has (`skipdecode`).",
    )
    depth_decay: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Factor by which D3 takes fewer layers for each further token.",
    )
    drafters: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=8,
        description="Drafters whose trees `combined` merges, in the order in which they draft.",
    )
    prune_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Least probability that the draft model gives a retrieved token in `rasd`.",
    )
    stage_tokens: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="Tokens that n-grams guess ahead of the draft model in `staged`; 0: none.",
    )
    min_match: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Tokens at the end that must have occurred before, for a copy.",
    )
    corpus_bias: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Tokens by which a match in earlier outputs must be longer than one in the "
        "session's own tokens.",
    )
    draft_per_match: float | None = Field(
        default=None,
        ge=0.0,
        le=64.0,
        description="Drafted tokens at most for each token of the match (alpha).",
    )
    draft_offset: int | None = Field(
        default=None, ge=0, le=64, description="Drafted tokens allowed beside `draft_per_match`."
    )
    min_token_prob: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Least estimated probability of a token that suffix decoding drafts.",
    )
    min_score: float | None = Field(
        default=None,
        ge=0.0,
        le=256.0,
        description="Least expected number of accepted tokens for which a draft of suffix "
        "decoding is used and not its fallback's.",
    )
    use_tree: bool | None = Field(
        default=None, description="Suffix decoding drafts a tree, best-first, and not a chain."
    )
    fallback_depth: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DEPTH,
        description="Depth of the drafts of a copying drafter's fallback.",
    )
    relay_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DEPTH,
        description="Tokens copied at most behind a draft of the fallback, where its end has "
        "occurred before.",
    )
    typical_epsilon: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Probability that the rule `typical` never asks a token to exceed.",
    )
    typical_delta: float | None = Field(
        default=None,
        ge=0.0,
        le=1e6,
        description="The rule `typical` wants more than this times exp(-entropy), up to epsilon.",
    )
    tolerance_beta: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="The rule `tolerance` accepts tokens among so many best; 1 is exact.",
    )
    tolerance_tau: float | None = Field(
        default=None,
        ge=0.0,
        le=1e6,
        description="The rule `tolerance` accepts scores so far below the best one; 0 is exact.",
    )
    allow_lossy: bool = Field(
        default=False, description="Permit rows and rules that can change the target's output."
    )

    def overrides(self) -> dict[str, Any]:
        """The fields that were set, as a mapping that :func:`parse_speculation` accepts."""
        return self.model_dump(exclude_none=True, exclude_defaults=False)


def keys_at(schema: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The keys that the block at ``path`` of a nested schema knows."""
    for part in path:
        inner = schema.model_fields[str(part)].annotation
        # An optional block is a union of its schema and None.
        kinds = [k for k in (inner, *get_args(inner)) if isinstance(k, type)]
        schema = next(kind for kind in kinds if issubclass(kind, BaseModel))
    return sorted(schema.model_fields)


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
            allowed = "one of the keys " + ", ".join(keys_at(SpeculationConfig, ()))
            raise InvalidArgument(f"{prefix}.{key}", first["input"], allowed) from None
        raise InvalidArgument(f"{prefix}.{key}", first["input"], first["msg"]) from None
