"""The catalogue: one method for each paper, assembled here and nowhere else.

A method names a drafter, a shape, an acceptance rule and a length controller. Methods are not
registered by imports, so a fresh worker process sees the same ones. To add a paper, write the file
for its new part and add a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.acceptance.base import AcceptanceRule
from paceline.acceptance.block import BlockVerification
from paceline.acceptance.exact_match import Coupled, Greedy
from paceline.acceptance.judge import Judge
from paceline.acceptance.k_seq import KSeq
from paceline.acceptance.rejection import RecursiveRejection, Rejection
from paceline.acceptance.tolerance import Tolerance
from paceline.acceptance.typical import Typical
from paceline.acceptance.unverified import Unverified
from paceline.drafters.aded import ADED
from paceline.drafters.aggressive import AGGRESSIVE
from paceline.drafters.auto import AUTO as AUTO_PART
from paceline.drafters.base import Drafter, DrafterContext, DrafterPart
from paceline.drafters.combined import COMBINED
from paceline.drafters.copyspec import COPYSPEC, COPYSPEC_OR_DRAFT_MODEL
from paceline.drafters.denoising import DENOISING
from paceline.drafters.diffuspec import DIFFUSPEC
from paceline.drafters.forced import FORCED, FORCED_OR_DRAFT_MODEL
from paceline.drafters.jacobi import GAUSS_SEIDEL, HYBRID_JACOBI, JACOBI
from paceline.drafters.lookahead import LOOKAHEAD
from paceline.drafters.non_autoregressive import NON_AUTOREGRESSIVE
from paceline.drafters.predicted_outputs import (
    PREDICTED_OUTPUTS,
    PREDICTED_OUTPUTS_OR_DRAFT_MODEL,
)
from paceline.drafters.prompt_lookup import PROMPT_LOOKUP
from paceline.drafters.rasd import RASD
from paceline.drafters.s2d import S2D_PART
from paceline.drafters.sam import SAM, SAM_OR_EAGLE, SAM_OR_TOKEN_RECYCLING
from paceline.drafters.self_drafter import EARLY_EXIT, FEWER_LAYERS
from paceline.drafters.staged import STAGED
from paceline.drafters.stand import STAND
from paceline.drafters.suffix import SUFFIX, SUFFIX_OR_DRAFT_MODEL, SUFFIX_OR_EAGLE3
from paceline.knobs import HasKnobs, Knob, Knobs
from paceline.lengths.adl import ADL
from paceline.lengths.auto import AUTO
from paceline.lengths.base import LengthPart
from paceline.lengths.bass import BASS
from paceline.lengths.confidence import CONFIDENCE
from paceline.lengths.del_ import DEL
from paceline.lengths.disco import DISCO
from paceline.lengths.fixed import FIXED
from paceline.lengths.goodput import GOODPUT
from paceline.lengths.heuristic import HEURISTIC
from paceline.lengths.ldlp import LDLP
from paceline.lengths.lexical_unit import LEXICAL_UNIT
from paceline.lengths.pearl import PEARL
from paceline.lengths.round_trip import ROUND_TRIP
from paceline.lengths.specdecpp import SPECDECPP
from paceline.lengths.tapout import TAPOUT
from paceline.models.exits import D3_PART, SKIPDECODE, UNIFIED, PolicyPart
from paceline.shapes.base import BRANCHING, DRAFT_SUPPORT, ShapePart
from paceline.shapes.confidence import BEST_FIRST
from paceline.shapes.confidence import CONFIDENCE as CONFIDENCE_TREE
from paceline.shapes.dyspec import DYSPEC
from paceline.shapes.iid import IID
from paceline.shapes.kary import CHAIN, KARY
from paceline.shapes.rsd_c import RSD_C
from paceline.shapes.rsd_s import RSD_S
from paceline.shapes.sequoia import FIRST_RATES, RANK_ACCEPTANCE, sequoia_paths
from paceline.shapes.template import TEMPLATE, Template
from paceline.types import Need

if TYPE_CHECKING:
    from paceline.drafters.draft_model import DraftModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An entry of the catalogue.

    Attributes:
        name: what users write.
        paper: title, year and arXiv id.
        drafter, shape, acceptance, length: names of the four parts; shape is None for a lookup
            drafter, which finds whole drafts by itself.
        defaults: values of knobs where the method's differ from its parts'. It has the knobs of
            its parts, and those that every method has.
        needs: what the drafter needs from the target.
        optional_needs: those of ``needs`` without which the drafter still works, but learns less.
        uses: names of other drafters that the drafter consists of.
        head: kind of trained head that drafts.
        depth_policy: which layers of the target compute a token. The drafter is then the target
            with fewer layers or, if it is ``none``, the target itself decodes so (lossy).
        engine: which engine runs it: Paceline's own, "vllm" with a drafter of vLLM's, or
            "diffusion", where it is a schedule of the denoise loop.
        makes_trees: the drafter branches even for rules that verify only chains, so those rules
            are refused. (Other drafters make chains for such rules.)
        reads_prediction: the drafter uses the prediction that comes with a request.
        reads_constraint: the drafter drafts from the request's constraint; it may lack one.
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
    optional_needs: frozenset[Need] = frozenset()
    uses: tuple[str, ...] = ()
    head: str | None = None
    depth_policy: str | None = None
    makes_trees: bool = False
    reads_prediction: bool = False
    reads_constraint: bool = False
    engine: Literal["paceline", "vllm", "diffusion"] = "paceline"

    @property
    def knob_defaults(self) -> dict[str, Any]:
        """The knobs of its drafter and depth policy with the method's defaults."""
        # An engine's caller may bring a drafter that the catalogue does not list.
        parts: list[DrafterPart | PolicyPart] = [DRAFTER_PARTS.get(self.drafter, DrafterPart())]
        if self.depth_policy is not None:
            parts.append(DEPTH_POLICIES[self.depth_policy])
        return {knob.name: knob.default for part in parts for knob in part.knobs} | dict(
            self.defaults
        )

    @property
    def lossless(self) -> bool:
        whole = self.depth_policy is None or self.drafter != "none"
        return whole and ACCEPTANCE_RULES[self.acceptance].lossless

    def as_dict(self) -> dict[str, Any]:
        """The method as `paceline methods --json` prints it."""
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
            "engine": self.engine,
            "knobs": dict(self.defaults),
        }


ACCEPTANCE_RULES: Mapping[str, AcceptanceRule] = {
    rule.name: rule  # with the defaults of its knobs
    for rule in (
        Coupled(),
        Greedy(),
        Rejection(),
        BlockVerification(),
        RecursiveRejection(),
        KSeq(),
        Typical(),
        Tolerance(),
        Judge(),
        Unverified(),
    )
}

SHAPES: Mapping[str, ShapePart] = {
    "chain": CHAIN,
    "kary": KARY,
    "template": TEMPLATE,
    "confidence": CONFIDENCE_TREE,
    "best_first": BEST_FIRST,
    "sequoia": ShapePart(
        make=lambda knobs: Template(
            sequoia_paths(
                knobs[RANK_ACCEPTANCE] or FIRST_RATES,
                knobs.node_budget or 1,
                knobs.num_speculative_tokens or 1,
            )
        ),
        nodes=lambda knobs, depth: 3 * depth,
        knobs=(RANK_ACCEPTANCE,),
    ),
    "dyspec": DYSPEC,
    "rsd_c": RSD_C,
    "rsd_s": RSD_S,
    "iid": IID,
}

LENGTHS: Mapping[str, LengthPart] = {
    "fixed": FIXED,
    "goodput": GOODPUT,
    "heuristic": HEURISTIC,
    "confidence": CONFIDENCE,
    "bass": BASS,
    "adl": ADL,
    "disco": DISCO,
    "specdecpp": SPECDECPP,
    "ldlp": LDLP,
    "lexical_unit": LEXICAL_UNIT,
    "round_trip": ROUND_TRIP,
    "pearl": PEARL,
    "del": DEL,
    "tapout": TAPOUT,
    "auto": AUTO,
}

# Which layers compute a token, by its place among the generated ones.
DEPTH_POLICIES: Mapping[str, PolicyPart] = {
    "unified": UNIFIED,
    "skipdecode": SKIPDECODE,
    "d3": D3_PART,
}

# No part imports torch before it is made: a process that only reads the catalogue (client, gateway,
# command line) starts a second sooner without it.


def _with_head(kind: str) -> DrafterPart:
    def make(context: DrafterContext) -> Drafter:
        from paceline.drafters.head import HeadDrafter

        return HeadDrafter(context.head(kind))

    return DrafterPart(make=make, replay="tree", reads_sent_states=True)


def _with_memory(kind: str) -> DrafterPart:
    def make(context: DrafterContext) -> Drafter:
        from paceline.drafters.head import MemoryHeadDrafter
        from paceline.target import last_layer_entries

        return MemoryHeadDrafter(context.head(kind), partial(last_layer_entries, context.target))

    return DrafterPart(make=make)


def _with_pseudo_tokens(kind: str) -> DrafterPart:
    def make(context: DrafterContext) -> Drafter:
        from paceline.drafters.pseudo import PseudoTokenDrafter

        return PseudoTokenDrafter(context.head(kind))

    return DrafterPart(make=make)


def _token_recycling(context: DrafterContext) -> Drafter:
    from paceline.drafters.token_recycling import TokenRecycling

    return TokenRecycling(context.vocab_size)


def _omnidraft(context: DrafterContext) -> Drafter:
    from paceline.drafters.omnidraft import OmniDraft

    return OmniDraft(cast("DraftModel", context.drafter("draft_model")))


DRAFTER_PARTS: Mapping[str, DrafterPart] = {
    "none": DrafterPart(),
    "client": DrafterPart(),
    "vllm": DrafterPart(),
    "denoising": DENOISING,
    "draft_model": DrafterPart(replay="prefix"),
    "prompt_lookup": PROMPT_LOOKUP,
    "suffix": SUFFIX,
    "suffix_or_draft_model": SUFFIX_OR_DRAFT_MODEL,
    "suffix_or_eagle3": SUFFIX_OR_EAGLE3,
    "sam": SAM,
    "sam_or_token_recycling": SAM_OR_TOKEN_RECYCLING,
    "sam_or_eagle": SAM_OR_EAGLE,
    "copyspec": COPYSPEC,
    "copyspec_or_draft_model": COPYSPEC_OR_DRAFT_MODEL,
    "predicted_outputs": PREDICTED_OUTPUTS,
    "predicted_outputs_or_draft_model": PREDICTED_OUTPUTS_OR_DRAFT_MODEL,
    "forced": FORCED,
    "forced_or_draft_model": FORCED_OR_DRAFT_MODEL,
    "lookahead": LOOKAHEAD,
    "jacobi": JACOBI,
    "gauss_seidel": GAUSS_SEIDEL,
    "hybrid_jacobi": HYBRID_JACOBI,
    "aggressive": AGGRESSIVE,
    "token_recycling": DrafterPart(make=_token_recycling),
    "stand": STAND,
    "aded": ADED,
    "medusa": _with_head("medusa"),
    "blockwise": _with_head("blockwise"),
    "hydra": _with_head("hydra"),
    "hydra_pp": _with_head("hydra_pp"),
    "eagle": _with_head("eagle"),
    "eagle3": _with_head("eagle3"),
    "peagle": _with_head("peagle"),
    "mtp": _with_head("mtp"),
    "dflash": _with_head("dflash"),
    "dflash2": _with_head("dflash2"),
    "dspark": _with_head("dspark"),
    "xpress": _with_head("xpress"),
    "chimera": _with_head("chimera"),
    "fspad": _with_head("fspad"),
    "falcon": _with_head("falcon"),
    "dovetail": _with_head("dovetail"),
    "moa": _with_head("moa"),
    "longspec": _with_memory("longspec"),
    "linearized": _with_head("linearized"),
    "ppd": _with_pseudo_tokens("ppd"),
    "hidden_transfer": _with_pseudo_tokens("hidden_transfer"),
    "early_exit": EARLY_EXIT,
    "fewer_layers": FEWER_LAYERS,
    "staged": STAGED,
    "rasd": RASD,
    "s2d": S2D_PART,
    "diffuspec": DIFFUSPEC,
    "non_autoregressive": NON_AUTOREGRESSIVE,
    "combined": COMBINED,
    "auto": AUTO_PART,
    # Wraps a draft model with the target's tokenizer; the caller gives the engine any other.
    "omnidraft": DrafterPart(make=_omnidraft),
}

# The drafters that an engine makes itself, for the first request that uses them. Its caller gives
# it the others (a draft model, a client).
DRAFTERS: Mapping[str, Callable[[DrafterContext], Drafter]] = {
    name: part.make for name, part in DRAFTER_PARTS.items() if part.make is not None
}

COMMON_KNOBS = frozenset({"method", "acceptance", "length", "allow_lossy"})
# Every method has these, too, with defaults of its own.
SIZE_KNOBS = frozenset({"num_speculative_tokens", "node_budget"})


def _all_knobs() -> Iterator[Knob[Any]]:
    yield from (BRANCHING, DRAFT_SUPPORT)
    parts: tuple[HasKnobs, ...] = (
        *SHAPES.values(),
        *LENGTHS.values(),
        *ACCEPTANCE_RULES.values(),
        *DEPTH_POLICIES.values(),
        *DRAFTER_PARTS.values(),
    )
    for part in parts:
        yield from part.knobs


def _collect(knobs: Iterable[Knob[Any]]) -> Mapping[str, Knob[Any]]:
    """The knobs by name.

    Raises:
        ValueError: two parts declare a knob of one name differently.
    """
    found: dict[str, Knob[Any]] = {}
    for knob in knobs:
        first = found.setdefault(knob.name, knob)
        if knob.name in Knobs.model_fields or not first.is_same(knob):
            raise ValueError(
                f"knob {knob.name!r} is declared twice, with another type, bounds or help: share "
                "one declaration, and change the default with `but`"
            )
    return found


AUTO_CHOICES = (
    ("forced",),
    ("predicted_outputs",),
    ("suffix_decoding",),
    ("copyspec",),
    ("prompt_lookup",),
    ("eagle3", "eagle"),
    ("draft_model",),
)
"""Methods among whose drafters ``auto`` chooses: of each group, the first that can draft here."""

KNOBS: Mapping[str, Knob[Any]] = _collect(_all_knobs())
"""The knobs of all parts; those that every method has are fields of :class:`Knobs`."""

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
            summary="A small model drafts a chain with the same noise as the target.",
            drafter="draft_model",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 8},
        ),
        Method(
            name="pearl",
            paper="Liu et al.: PEARL, 2024, arXiv 2408.11850",
            summary="The draft model drafts ahead while the target verifies.",
            drafter="draft_model",
            shape="chain",
            acceptance="coupled",
            length="pearl",
            defaults={"num_speculative_tokens": 5},
        ),
        Method(
            name="tapout",
            paper="Sridhar et al.: TapOut, 2025, arXiv 2511.02017",
            summary="A small model drafts; a bandit chooses the rule that ends each of its drafts.",
            drafter="draft_model",
            shape="chain",
            acceptance="coupled",
            length="tapout",
            defaults={"num_speculative_tokens": 8},
        ),
        Method(
            name="omnidraft",
            paper="Ramakrishnan et al.: OmniDraft, 2025, arXiv 2507.02659",
            summary="A small model with another tokenizer drafts; n-grams are translated.",
            drafter="omnidraft",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 8},
            uses=("draft_model",),
        ),
        Method(
            name="draft_model_tree",
            paper="Miao et al.: SpecInfer, 2023, arXiv 2305.09781",
            summary="A small model drafts a k-ary token tree.",
            drafter="draft_model",
            shape="kary",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4, "node_budget": 14},
        ),
        Method(
            name="draft_model_confidence",
            paper="Li et al.: EAGLE-2, 2024, arXiv 2406.16858",
            summary="A small model drafts a tree of its most confident tokens.",
            drafter="draft_model",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 8},
        ),
        Method(
            name="sequoia",
            paper="Chen et al.: Sequoia, 2024, arXiv 2402.12374",
            summary="A small model drafts the fixed tree that is best for its acceptance rates.",
            drafter="draft_model",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 8},
        ),
        Method(
            name="dyspec",
            paper="Xiong et al.: DySpec, 2024, arXiv 2410.11744",
            summary="A small model grows a tree at the node that verification most likely reaches.",
            drafter="draft_model",
            shape="dyspec",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 10},
        ),
        Method(
            name="speculative_sampling",
            paper="Leviathan, Kalman, Matias: Fast Inference via Speculative Decoding, 2022, "
            "arXiv 2211.17192; Chen et al., 2023, arXiv 2302.01318",
            summary="A small model samples a chain; rejection sampling corrects it.",
            drafter="draft_model",
            shape="chain",
            acceptance="rejection",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
        ),
        Method(
            name="rsd_c",
            paper="Jeon et al.: Recursive Speculative Decoding, 2024, arXiv 2402.14160",
            summary="A small model samples a tree without replacement, its widths set per level.",
            drafter="draft_model",
            shape="rsd_c",
            acceptance="recursive_rejection",
            length="goodput",
            defaults={"branching_vector": (2, 2, 1, 1)},
        ),
        Method(
            name="rsd_s",
            paper="Jeon et al.: Recursive Speculative Decoding, 2024, arXiv 2402.14160",
            summary="A small model samples a tree by stochastic beam search.",
            drafter="draft_model",
            shape="rsd_s",
            acceptance="recursive_rejection",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
        ),
        Method(
            name="spectr",
            paper="Sun et al.: SpecTr, 2023, arXiv 2310.15141",
            summary="A small model samples independent sequences; k-SEQ picks among them.",
            drafter="draft_model",
            shape="iid",
            acceptance="k_seq",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
        ),
        Method(
            name="block_verification",
            paper="Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh: Block Verification "
            "Accelerates Speculative Decoding, 2024, arXiv 2403.10444",
            summary="A small model samples a chain, which is verified as a whole.",
            drafter="draft_model",
            shape="chain",
            acceptance="block",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
        ),
        Method(
            name="typical_acceptance",
            paper="Cai et al.: Medusa, 2024, arXiv 2401.10774",
            summary="Accepts a small model's tokens that the target finds plausible (lossy).",
            drafter="draft_model",
            shape="kary",
            acceptance="typical",
            length="fixed",
            defaults={"num_speculative_tokens": 4, "node_budget": 14},
        ),
        Method(
            name="judge_decoding",
            paper="Bachmann et al.: Judge Decoding, 2025, arXiv 2501.19309",
            summary="Accepts a small model's tokens that a trained judge finds right (lossy).",
            drafter="draft_model",
            shape="chain",
            acceptance="judge",
            length="fixed",
            defaults={"num_speculative_tokens": 8},
        ),
        Method(
            name="prompt_lookup",
            paper="Saxena: Prompt Lookup Decoding, 2023, github.com/apoorvumang/"
            "prompt-lookup-decoding",
            summary="Copies what followed the last occurrence of the current suffix.",
            drafter="prompt_lookup",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 10},
        ),
        Method(
            name="suffix_decoding",
            paper="Oliaro et al.: SuffixDecoding, 2024, arXiv 2411.04975",
            summary="Drafts what most often followed the longest known suffixes.",
            drafter="suffix",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 24},
        ),
        Method(
            name="suffix_decoding_tree",
            paper="Oliaro et al.: SuffixDecoding, 2024, arXiv 2411.04975",
            summary="Suffix decoding with the most probable tree of continuations.",
            drafter="suffix",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 24, "node_budget": 32, "use_tree": True},
        ),
        Method(
            name="suffix_decoding_hybrid",
            paper="Oliaro et al.: SuffixDecoding, 2024, arXiv 2411.04975",
            summary="Suffix decoding where its match promises much, else a small model's chain.",
            drafter="suffix_or_draft_model",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 24},
            uses=("draft_model",),
        ),
        Method(
            name="suffix_decoding_eagle3",
            paper="Oliaro et al.: SuffixDecoding, 2024, arXiv 2411.04975",
            summary="Suffix decoding where its match promises much, else EAGLE-3's chain.",
            drafter="suffix_or_eagle3",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 16},
            needs=frozenset({Need.LAYER_STATES}),
            uses=("eagle3",),
            head="eagle3",
        ),
        Method(
            name="sam_decoding",
            paper="Hu et al.: SAM Decoding: Speculative Decoding via Suffix Automaton, 2024, "
            "arXiv 2411.10666",
            summary="Copies what followed the longest suffix, in this text or in earlier outputs.",
            drafter="sam",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 60},
        ),
        Method(
            name="sam_token_recycling",
            paper="Hu et al.: SAM Decoding: Speculative Decoding via Suffix Automaton, 2024, "
            "arXiv 2411.10666",
            summary="Copies after a long match, else token recycling drafts a tree.",
            drafter="sam_or_token_recycling",
            shape="template",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 40, "node_budget": 24},
            needs=frozenset({Need.TREE_LOGITS}),
            uses=("token_recycling",),
        ),
        Method(
            name="sam_eagle2",
            paper="Hu et al.: SAM Decoding: Speculative Decoding via Suffix Automaton, 2024, "
            "arXiv 2411.10666",
            summary="Copies after a long match, else EAGLE-2 drafts a tree.",
            drafter="sam_or_eagle",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 40, "node_budget": 24},
            needs=frozenset({Need.HIDDEN_STATES}),
            uses=("eagle",),
            head="eagle",
        ),
        Method(
            name="copyspec",
            paper="Dumitru et al.: CopySpec, 2025, arXiv 2502.08923",
            summary="Copies what followed the first occurrence of the last tokens.",
            drafter="copyspec",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 10},
        ),
        Method(
            name="copyspec_draft_model",
            paper="Dumitru et al.: CopySpec, 2025, arXiv 2502.08923",
            summary="CopySpec where the last tokens occurred before, else a small model's chain.",
            drafter="copyspec_or_draft_model",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 10},
            uses=("draft_model",),
        ),
        Method(
            name="copy_relay",
            paper="Dumitru et al.: CopySpec, 2025, arXiv 2502.08923",
            summary="CopySpec and a small model alternate within a draft: an edit, then the copy.",
            drafter="copyspec_or_draft_model",
            shape="chain",
            acceptance="coupled",
            length="confidence",
            defaults={
                "num_speculative_tokens": 15,
                "length_max": 15,
                "stop_threshold": 0.2,
                "min_match": 6,
                "fallback_depth": 8,
                "relay_tokens": 8,
            },
            uses=("draft_model",),
        ),
        Method(
            name="predicted_outputs",
            paper="Yang et al.: Inference with Reference (LLMA), 2023, arXiv 2304.04487",
            summary="Copies the prediction that comes with the request; AR without one.",
            drafter="predicted_outputs",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 16},
            reads_prediction=True,
        ),
        Method(
            name="predicted_outputs_draft_model",
            paper="Yang et al.: Inference with Reference (LLMA), 2023, arXiv 2304.04487",
            summary="Copies the request's prediction; away from it, a small model drafts a chain.",
            drafter="predicted_outputs_or_draft_model",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 16},
            uses=("draft_model",),
            reads_prediction=True,
        ),
        Method(
            name="forced",
            paper="Zheng et al.: SGLang, 2023, arXiv 2312.07104",
            summary="Drafts what the request's constraint leaves no choice about; else AR.",
            drafter="forced",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 16},
            reads_constraint=True,
        ),
        Method(
            name="forced_draft_model",
            paper="Zheng et al.: SGLang, 2023, arXiv 2312.07104",
            summary="Drafts what the constraint forces; elsewhere a small model drafts a chain.",
            drafter="forced_or_draft_model",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 16},
            uses=("draft_model",),
            reads_constraint=True,
        ),
        Method(
            name="aggressive_tolerance",
            paper="Ge, Xia, Sun, Chen, Wei: Lossless Acceleration for Seq2seq Generation with "
            "Aggressive Decoding, 2022, arXiv 2205.10350",
            summary="Copies from the context; accepts tokens that are nearly the best (lossy).",
            drafter="prompt_lookup",
            shape=None,
            acceptance="tolerance",
            length="fixed",
            defaults={"num_speculative_tokens": 10, "tolerance_beta": 5, "tolerance_tau": 3.0},
        ),
        Method(
            name="lookahead",
            paper="Fu, Bailis, Stoica, Zhang: Lookahead Decoding, 2024, arXiv 2402.02057",
            summary="Drafts n-grams that the target itself made in a window of Jacobi iterations.",
            drafter="lookahead",
            shape=None,
            acceptance="coupled",
            length="goodput",
            needs=frozenset({Need.TREE_LOGITS}),
            makes_trees=True,
        ),
        Method(
            name="jacobi",
            paper="Santilli et al.: Accelerating Transformer Inference for Translation via "
            "Parallel Decoding, 2023, arXiv 2305.10427",
            summary="Refines the target's guesses for all next positions at once.",
            drafter="jacobi",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 16},
            needs=frozenset({Need.TREE_LOGITS}),
        ),
        Method(
            name="gauss_seidel",
            paper="Santilli et al.: Accelerating Transformer Inference for Translation via "
            "Parallel Decoding, 2023, arXiv 2305.10427",
            summary="Refines guesses block by block; a block has one token more than the draft.",
            drafter="gauss_seidel",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
            needs=frozenset({Need.TREE_LOGITS}),
        ),
        Method(
            name="hybrid_jacobi",
            paper="Santilli et al.: Accelerating Transformer Inference for Translation via "
            "Parallel Decoding, 2023, arXiv 2305.10427",
            summary="Refines guesses block by block for an estimated length, then continues as AR.",
            drafter="hybrid_jacobi",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4},
            needs=frozenset({Need.TREE_LOGITS}),
        ),
        Method(
            name="aggressive",
            paper="Ge et al.: Lossless Acceleration for Seq2seq Generation with Aggressive "
            "Decoding, 2022, arXiv 2205.10350",
            summary="Copies the prompt (rewriting tasks) and finds its place again after an edit.",
            drafter="aggressive",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 32},
        ),
        Method(
            name="generalized_aggressive",
            paper="Ge et al.: Lossless Acceleration for Seq2seq Generation with Aggressive "
            "Decoding, 2022, arXiv 2205.10350",
            summary="A model without order fills a block of masks behind the text in one forward.",
            drafter="non_autoregressive",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 25},
        ),
        Method(
            name="generalized_aggressive_tolerance",
            paper="Ge et al.: Lossless Acceleration for Seq2seq Generation with Aggressive "
            "Decoding, 2022, arXiv 2205.10350",
            summary="Like generalized_aggressive; accepts tokens that are nearly the best (lossy).",
            drafter="non_autoregressive",
            shape=None,
            acceptance="tolerance",
            length="fixed",
            defaults={"num_speculative_tokens": 25, "tolerance_beta": 5, "tolerance_tau": 3.0},
        ),
        Method(
            name="token_recycling",
            paper="Luo et al.: Turning Trash into Treasure: Accelerating Inference of Large "
            "Language Models with Token Recycling, 2024, arXiv 2408.08696",
            summary="Drafts the successors that the target last ranked best for each token.",
            drafter="token_recycling",
            shape="template",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 24},
            needs=frozenset({Need.TREE_LOGITS}),
            optional_needs=frozenset({Need.TREE_LOGITS}),
        ),
        Method(
            name="stand",
            paper="Song et al.: Accelerated Test-Time Scaling with Model-Free Speculative "
            "Sampling, 2025, arXiv 2506.04708",
            summary="Drafts from the target's averaged distributions after an n-gram.",
            drafter="stand",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 8},
            needs=frozenset({Need.TREE_LOGITS}),
        ),
        Method(
            name="aded",
            paper="Liu et al.: Adaptive Draft-Verification for Efficient Large Language Model "
            "Decoding, 2024, arXiv 2407.12021",
            summary="Searches a table of trigrams that weighs the latest context more.",
            drafter="aded",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 64},
        ),
        Method(
            name="staged",
            paper="Spector, Ré: Accelerating LLM Inference with Staged Speculative Decoding, 2023, "
            "arXiv 2308.04623",
            summary="N-grams draft for the draft model, which drafts for the target.",
            drafter="staged",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 12},
            uses=("draft_model",),
        ),
        Method(
            name="rasd",
            paper="Quan et al.: RASD: Retrieval-Augmented Speculative Decoding, 2025, "
            "arXiv 2503.03434",
            summary="Merges the draft model's tree with a retrieved one that it has pruned.",
            drafter="rasd",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 10},
            uses=("draft_model",),
        ),
        Method(
            name="combined",
            paper="Paceline: several drafters, one verified tree",
            summary="Merges the trees of several drafters under one node budget.",
            drafter="combined",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 16},
            uses=("prompt_lookup", "draft_model"),
        ),
        Method(
            name="auto",
            paper="Paceline: the best drafter and length for each round, after Liu et al.: Not a "
            "Bandit: Provably No-Regret Drafter Selection, 2025, arXiv 2510.20064",
            summary="Chooses among the drafters that are loaded, and AR, in every round.",
            drafter="auto",
            shape="chain",
            acceptance="coupled",
            length="auto",
            defaults={"num_speculative_tokens": 16, "min_match": 6},
        ),
        Method(
            name="layer_skip",
            paper="Elhoushi et al.: LayerSkip, 2024, arXiv 2404.16710",
            summary="The target's first layers draft a chain; verification continues from them.",
            drafter="early_exit",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.SHARED_MODEL}),
        ),
        Method(
            name="del",
            paper="Entezari Zarch et al.: DEL, 2025, arXiv 2504.05598",
            summary="Like layer_skip, at the exit layer and length with most tokens per layer.",
            drafter="early_exit",
            shape="chain",
            acceptance="coupled",
            length="del",
            defaults={"num_speculative_tokens": 8},
            needs=frozenset({Need.SHARED_MODEL}),  # in some rounds also what its controller needs
        ),
        Method(
            name="diffuspec",
            paper="Li et al.: DiffuSpec, 2025, arXiv 2510.02358",
            summary="A masked-diffusion model drafts in one forward; n-grams choose its path.",
            drafter="diffuspec",
            shape=None,
            acceptance="coupled",
            length="adl",
            defaults={"num_speculative_tokens": 8},
        ),
        Method(
            name="s2d",
            paper="S2D: Sorted Speculative Decoding, 2024, arXiv 2407.01955",
            summary="Each token comes from the draft model's shallowest exit that is sure of it.",
            drafter="s2d",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6},
            uses=("draft_model",),
        ),
        Method(
            name="unified_layer_skipping",
            paper="Liu et al.: Unified Layer Skipping, 2024, arXiv 2404.06954",
            summary="Evenly spread layers of the target draft a chain.",
            drafter="fewer_layers",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="unified",
        ),
        Method(
            name="unified_layer_skipping_lossy",
            paper="Liu et al.: Unified Layer Skipping, 2024, arXiv 2404.06954",
            summary="Evenly spread layers alone compute every token (lossy).",
            drafter="none",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 0, "node_budget": 0},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="unified",
        ),
        Method(
            name="skipdecode",
            paper="Del Corro et al.: SkipDecode, 2023, arXiv 2307.02628",
            summary="The target's upper layers draft a chain, with fewer layers for later tokens.",
            drafter="fewer_layers",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="skipdecode",
        ),
        Method(
            name="skipdecode_lossy",
            paper="Del Corro et al.: SkipDecode, 2023, arXiv 2307.02628",
            summary="The upper layers alone compute every token, fewer for later ones (lossy).",
            drafter="none",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 0, "node_budget": 0},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="skipdecode",
        ),
        Method(
            name="d3",
            paper="D3, 2025, arXiv 2503.08524",
            summary="The first and last layers draft a chain, fewer by a power law later on.",
            drafter="fewer_layers",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="d3",
        ),
        Method(
            name="d3_lossy",
            paper="D3, 2025, arXiv 2503.08524",
            summary="The first and last layers compute a token, fewer by a power law (lossy).",
            drafter="none",
            shape=None,
            acceptance="coupled",
            length="fixed",
            defaults={"num_speculative_tokens": 0, "node_budget": 0},
            needs=frozenset({Need.SHARED_MODEL}),
            depth_policy="d3",
        ),
        Method(
            name="medusa",
            paper="Cai et al.: Medusa, 2024, arXiv 2401.10774",
            summary="Independent heads on the target's hidden state each predict a later token.",
            drafter="medusa",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="medusa",
        ),
        Method(
            name="lexical_units",
            paper="Sun et al.: Lexical Unit Decoding, 2024, arXiv 2405.15208",
            summary="Writes what Medusa's heads are sure of without verification (lossy).",
            drafter="medusa",
            shape="chain",
            acceptance="unverified",
            length="lexical_unit",
            defaults={"num_speculative_tokens": 5},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="medusa",
        ),
        Method(
            name="blockwise",
            paper="Stern, Shazeer, Uszkoreit: Blockwise Parallel Decoding, 2018, arXiv 1811.03115",
            summary="A layer on the target's hidden state predicts the next block of tokens.",
            drafter="blockwise",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="blockwise",
        ),
        Method(
            name="hydra",
            paper="Ankner et al.: Hydra, 2024, arXiv 2402.05109",
            summary="Heads on the target's hidden state; each sees the tokens drafted before it.",
            drafter="hydra",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="hydra",
        ),
        Method(
            name="hydra_pp",
            paper="Ankner et al.: Hydra++, 2024, arXiv 2402.05109",
            summary="Deeper Hydra heads with a decoder layer over the target's hidden states.",
            drafter="hydra_pp",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="hydra_pp",
        ),
        Method(
            name="chimera",
            paper="Zeng et al.: Chimera, 2024, arXiv 2402.15758",
            summary="A decoder layer attends to the target's hidden states and to trigrams.",
            drafter="chimera",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 4, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="chimera",
        ),
        Method(
            name="eagle",
            paper="Li et al.: EAGLE, 2024, arXiv 2401.15077",
            summary="One decoder layer predicts the target's hidden states and drafts a chain.",
            drafter="eagle",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 7},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="eagle",
        ),
        Method(
            name="eagle2",
            paper="Li et al.: EAGLE-2, 2024, arXiv 2406.16858",
            summary="EAGLE's layer drafts a tree of its most confident tokens.",
            drafter="eagle",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="eagle",
        ),
        Method(
            name="eagle3",
            paper="Li et al.: EAGLE-3, 2025, arXiv 2503.01840",
            summary="A layer over three of the target's layers drafts a chain, or a tree.",
            drafter="eagle3",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5},
            needs=frozenset({Need.LAYER_STATES}),
            head="eagle3",
        ),
        Method(
            name="peagle",
            paper="Hui et al.: P-EAGLE, 2026, arXiv 2602.01469",
            summary="EAGLE-3's layers draft all tokens in one pass, behind mask tokens.",
            drafter="peagle",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 7},
            needs=frozenset({Need.LAYER_STATES}),
            head="peagle",
        ),
        Method(
            name="mtp",
            paper="Gloeckle et al.: Better & Faster Large Language Models via Multi-token "
            "Prediction, 2024, arXiv 2404.19737",
            summary="The layer that a model was trained with for the token after next drafts on.",
            drafter="mtp",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="mtp",
        ),
        Method(
            name="dflash",
            paper="Chen et al.: DFlash, 2026, arXiv 2602.06036",
            summary="A diffusion model over the target's layers drafts a block in one pass.",
            drafter="dflash",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 15},
            needs=frozenset({Need.LAYER_STATES}),
            head="dflash",
        ),
        Method(
            name="ddtree",
            paper="Ringel, Romano: DDTree, 2026, arXiv 2604.12989",
            summary="DFlash's block drafts the tree of its most probable paths.",
            drafter="dflash",
            shape="best_first",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 15, "node_budget": 24},
            needs=frozenset({Need.LAYER_STATES}),
            head="dflash",
        ),
        Method(
            name="dflash2",
            paper="Z Lab: DFlash 2, 2026, github.com/z-lab/dflash",
            summary="DFlash with convolutions, whose tokens are chosen by the one before.",
            drafter="dflash2",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 7},
            needs=frozenset({Need.LAYER_STATES}),
            head="dflash2",
        ),
        Method(
            name="dspark",
            paper="Cheng et al.: DSpark, 2026, arXiv 2607.05147",
            summary="DFlash's block, whose tokens depend on the one before; ends when unsure.",
            drafter="dspark",
            shape="chain",
            acceptance="coupled",
            length="confidence",
            defaults={"num_speculative_tokens": 7},
            needs=frozenset({Need.LAYER_STATES}),
            head="dspark",
        ),
        Method(
            name="xpress",
            paper="xPress: Parallel Refinement for Diffusion Drafters in Speculative Decoding, "
            "2026, arXiv 2608.02438",
            summary="DFlash's block, corrected by its own tokens in a few passes.",
            drafter="xpress",
            shape="chain",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 15},
            needs=frozenset({Need.LAYER_STATES}),
            head="xpress",
        ),
        Method(
            name="fspad",
            paper="Gui et al.: FSPAD, 2024, arXiv 2408.15562",
            summary="EAGLE-2's tree; tokens sample features, and logits have their own output.",
            drafter="fspad",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="fspad",
        ),
        Method(
            name="falcon",
            paper="Gao et al.: Falcon, 2024, arXiv 2412.12639",
            summary="An LSTM and a layer draft features in blocks, two tokens in each pass.",
            drafter="falcon",
            shape="sequoia",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 12},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="falcon",
        ),
        Method(
            name="dovetail",
            paper="Zhang et al.: Dovetail, 2024, arXiv 2412.18934",
            summary="A small EAGLE-2 tree; a gate mixes feature and token, and two layers draft.",
            drafter="dovetail",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 6, "branching": 3},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="dovetail",
        ),
        Method(
            name="moa",
            paper="Zimmer et al.: Mixture of Attentions, 2024, arXiv 2410.03804",
            summary="Drafts from a vector of all layers for each verified token, and from tokens.",
            drafter="moa",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 6, "node_budget": 10},
            needs=frozenset({Need.LAYER_STATES}),
            head="moa",
        ),
        Method(
            name="longspec",
            paper="Yang et al.: LongSpec, 2025, arXiv 2502.17421",
            summary="A block with a window of its own that reads the target's KV entries.",
            drafter="longspec",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 10},
            needs=frozenset({Need.HIDDEN_STATES, Need.KV_ENTRIES}),
            head="longspec",
        ),
        Method(
            name="linearized",
            paper="You et al.: When Linear Attention Meets Autoregressive Decoding, 2024, "
            "arXiv 2406.07368",
            summary="A tree of features from augmented linear attention, whose memory is constant.",
            drafter="linearized",
            shape="confidence",
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 5, "node_budget": 8},
            needs=frozenset({Need.HIDDEN_STATES}),
            head="linearized",
        ),
        Method(
            name="ppd",
            paper="Chen et al.: Hardware-Aware Parallel Prompt Decoding, 2024, arXiv 2405.18628",
            summary="Trained prompt tokens behind each node make the target predict ahead.",
            drafter="ppd",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3, "node_budget": 12},
            needs=frozenset({Need.SHARED_MODEL}),
            head="ppd",
            makes_trees=True,
        ),
        Method(
            name="hidden_transfer",
            paper="Wu et al.: Parallel Decoding via Hidden Transfer, 2024, arXiv 2404.12022",
            summary="Maps inside the target predict the hidden states of the tokens to come.",
            drafter="hidden_transfer",
            shape=None,
            acceptance="coupled",
            length="goodput",
            defaults={"num_speculative_tokens": 3, "node_budget": 12},
            needs=frozenset({Need.SHARED_MODEL}),
            head="hidden_transfer",
            makes_trees=True,
        ),
    )
}


def _vllm(name: str, paper: str, summary: str, **defaults: Any) -> Method:
    """A method whose drafter is vLLM's own."""
    return Method(
        name=f"vllm_{name}", paper=paper, summary=summary,
        drafter="vllm", shape=None, acceptance="coupled", length="fixed",
        defaults={"num_speculative_tokens": 5, **defaults},
        engine="vllm",
    )  # fmt: skip


VLLM_METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        _vllm(
            "ngram", "Saxena: Prompt Lookup Decoding, 2023",
            "vLLM copies what followed an earlier occurrence of the last tokens.",
            ngram_max=5, ngram_min=5,
        ),
        _vllm(
            "suffix", "Oliaro et al.: SuffixDecoding, 2024, arXiv 2411.04975",
            "vLLM drafts from suffix trees of earlier requests (arctic-inference).",
            num_speculative_tokens=24, draft_per_match=1.0, min_token_prob=0.1,
        ),
        _vllm(
            "draft_model", "Leviathan et al.: Fast Inference from Transformers via Speculative "
            "Decoding, 2022, arXiv 2211.17192", "A small model in vLLM's own worker drafts.",
        ),
        _vllm(
            "medusa", "Cai et al.: Medusa, 2024, arXiv 2401.10774",
            "A Medusa checkpoint of vLLM's kind (`model.heads`).",
        ),
        _vllm(
            "mlp_speculator", "Wertheimer et al.: Accelerating Production LLMs with Combined "
            "Token/Embedding Speculators, 2024, arXiv 2404.19124",
            "An MLP speculator checkpoint (`model.heads`).",
        ),
        _vllm(
            "eagle", "Li et al.: EAGLE, 2024, arXiv 2401.15077",
            "An EAGLE checkpoint of vLLM's kind (`model.heads`).",
        ),
        _vllm(
            "eagle3", "Li et al.: EAGLE-3, 2025, arXiv 2503.01840",
            "An EAGLE-3 checkpoint of vLLM's kind (`model.heads`).",
        ),
        _vllm(
            "dflash", "Chen et al.: DFlash, 2026, arXiv 2602.06036",
            "A DFlash checkpoint, also one that `paceline export` wrote (`model.heads`).",
        ),
        _vllm(
            "dspark", "Cheng et al.: DSpark, 2026, arXiv 2607.05147",
            "A DSpark checkpoint, also one that `paceline export` wrote (`model.heads`).",
        ),
        _vllm(
            "mtp", "Gloeckle et al.: Better & Faster Large Language Models via Multi-token "
            "Prediction, 2024, arXiv 2404.19737",
            "The target's own multi-token prediction layers.",
        ),
    )
}  # fmt: skip
"""vLLM's own methods, all of which draft chains. A deployment with ``engine: vllm`` runs either one
of these for all requests, or Paceline's methods, which each request chooses by itself."""


def _schedule(name: str, paper: str, summary: str, *, lossless: bool = False) -> Method:
    """A schedule of the denoise loop.

    Args:
        lossless: the text is that of ``static``.
    """
    return Method(
        name=name, paper=paper, summary=summary,
        drafter="denoising", shape=None, length="fixed",
        acceptance="coupled" if lossless else "unverified",
        defaults={"num_speculative_tokens": 0, "node_budget": 0},
        engine="diffusion",
    )  # fmt: skip


DIFFUSION_METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        _schedule(
            "static", "LLaDA, 2025, arXiv 2502.09992",
            "Commits the most confident positions, equally many in each step.", lossless=True,
        ),
        _schedule(
            "confidence", "Dimple, 2025, arXiv 2505.16990",
            "Commits the positions that are more probable than a threshold.",
        ),
        _schedule(
            "freedave", "FreeDave, 2025, arXiv 2510.00294",
            "The text of `static`, several of its steps in one forward.", lossless=True,
        ),
        _schedule(
            "prophet", "Prophet, 2025, arXiv 2508.19982",
            "Commits a whole block once the margins of its last rows are wide.",
        ),
        _schedule(
            "sched", "SchED, 2025, arXiv 2512.02892",
            "Commits a whole block once the mean margin reaches a bound that falls.",
        ),
        _schedule(
            "dparallel", "dParallel, 2025, arXiv 2509.26488",
            "Commits the positions whose entropy is small.",
        ),
        _schedule(
            "set_block", "Set Block Decoding, 2025, arXiv 2509.04185",
            "Commits the surest positions while their entropies add up to little.",
        ),
        _schedule(
            "learn2pd", "Learn2PD, 2025, arXiv 2509.25188",
            "Commits the positions that a trained filter takes for final.",
        ),
        _schedule(
            "apd", "APD, 2025, arXiv 2506.00413",
            "Commits from left to right, as far as a model that reads in order agrees.",
        ),
        _schedule(
            "remask", "Discrete Diffusion VLA, 2025, arXiv 2508.20072",
            "A fixed number of steps, which may mask committed tokens again.",
        ),
    )
}  # fmt: skip
"""The schedules of the denoise loop. A deployment with ``engine: diffusion`` runs each of them, and
no other method."""
