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

    Unknown keys, and knobs that the chosen method does not have, are errors. A list knob has the
    type ``tuple[...] | None`` with ``Field(strict=False, min_length=1, ...)``: JSON and YAML give
    lists, and a tuple keeps the config hashable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = Field(
        default="draft_model", description="A method of the catalogue (`paceline methods`)."
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=0, le=MAX_DEPTH, description="Depth of the draft; 0 is plain AR decoding."
    )
    node_budget: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NODES,
        description="Most nodes in a draft; default: its depth.",
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
        description="Probability that the drafter's first, second, ... candidate is accepted. The "
        "shape `sequoia` builds its tree from it.",
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
        description="A controller ends a draft when acceptance is less likely than this "
        "(`confidence`, `disco`) or a rejection is likelier than this (`specdecpp`).",
    )
    draft_support: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="How many of the most likely tokens a sampled draft is drawn from (rejection "
        "sampling).",
    )
    ngram_max: int | None = Field(
        default=None, ge=1, le=16, description="Longest suffix of the context to look up."
    )
    ngram_min: int | None = Field(
        default=None, ge=1, le=16, description="Shortest suffix that prompt lookup looks up."
    )
    window_size: int | None = Field(
        default=None, ge=1, le=32, description="Columns of the window of lookahead decoding (W)."
    )
    ngram_size: int | None = Field(
        default=None, ge=2, le=16, description="Tokens in each n-gram of lookahead decoding (N)."
    )
    pool_guesses: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="N-grams that lookahead decoding keeps and tries for each first token (G).",
    )
    pool_from_prompt: bool | None = Field(
        default=None, description="Put the prompt's n-grams into the pool of lookahead decoding."
    )
    parallel_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Generated tokens that hybrid Jacobi decoding refines in blocks before it "
        "continues as AR; default: the length of the prompt.",
    )
    search_iterations: int | None = Field(
        default=None, ge=1, le=1000, description="Iterations of ADED's tree search in each round."
    )
    exit_layer: int | None = Field(
        default=None,
        ge=1,
        description="How many of the target's first layers draft; default: a third of all.",
    )
    exit_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        max_length=32,
        description="Exit layers: of the target, for the controller `del` to choose from (default: "
        "evenly spread), or of the draft model in `s2d` (default: its number of layers, halved "
        "again and again).",
    )
    exit_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Least probability at which `s2d` takes a shallow sub-model's token; 0 always "
        "takes the shallowest sub-model, 1 always the deepest.",
    )
    speedup_ratio: float | None = Field(
        default=None,
        ge=1.0,
        le=64.0,
        description="Unified layer skipping keeps the number of the target's layers divided by "
        "this.",
    )
    min_layers: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Least share of the layers that computes a token (`skipdecode`, `d3`).",
    )
    max_layers: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of the layers for the first token (`skipdecode`).",
    )
    depth_decay: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Factor by which D3 shrinks the number of layers with each further token.",
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
        description="`rasd` drops retrieved tokens to which the draft model gives less than this "
        "probability.",
    )
    stage_tokens: int | None = Field(
        default=None,
        ge=0,
        le=16,
        description="Tokens that n-grams draft for the draft model in `staged`; 0: none.",
    )
    min_match: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Copy only if at least this many last tokens have occurred before.",
    )
    corpus_bias: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="A match in earlier outputs must be this many tokens longer than one in the "
        "session's own tokens.",
    )
    draft_per_match: float | None = Field(
        default=None,
        ge=0.0,
        le=64.0,
        description="Most drafted tokens for each token of the match (alpha).",
    )
    draft_offset: int | None = Field(
        default=None, ge=0, le=64, description="Drafted tokens on top of `draft_per_match`."
    )
    min_token_prob: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Suffix decoding drafts only tokens with at least this estimated probability.",
    )
    min_score: float | None = Field(
        default=None,
        ge=0.0,
        le=256.0,
        description="Least number of accepted tokens that a draft of suffix decoding must promise; "
        "otherwise the fallback drafts.",
    )
    use_tree: bool | None = Field(
        default=None, description="Suffix decoding drafts a tree, best first, instead of a chain."
    )
    fallback_depth: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DEPTH,
        description="Draft depth of a copying drafter's fallback.",
    )
    relay_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_DEPTH,
        description="Most tokens to copy behind a fallback's draft whose last tokens have occurred "
        "before.",
    )
    typical_epsilon: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Upper limit of the probability that the rule `typical` requires (epsilon).",
    )
    typical_delta: float | None = Field(
        default=None,
        ge=0.0,
        le=1e6,
        description="The rule `typical` requires a probability above this times exp(-entropy), up "
        "to epsilon.",
    )
    tolerance_beta: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="The rule `tolerance` accepts a token among this many best ones; 1 is exact.",
    )
    tolerance_tau: float | None = Field(
        default=None,
        ge=0.0,
        le=1e6,
        description="The rule `tolerance` accepts scores up to this far below the best; 0 is "
        "exact.",
    )
    allow_lossy: bool = Field(
        default=False, description="Permit methods and rules that can change the target's output."
    )

    def overrides(self) -> dict[str, Any]:
        """The fields that are set, as a mapping that :func:`parse_speculation` accepts."""
        return self.model_dump(exclude_none=True, exclude_defaults=False)


def keys_at(schema: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The keys that a nested schema accepts in the block at ``path``."""
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
        InvalidArgument: names the first offending key as ``prefix.key``, and what is allowed.
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
