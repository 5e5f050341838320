"""Every method that promises AR's tokens, on the demo pair, against AR's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters.base import Drafter
from paceline.engine import Engine, EngineLimits
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS, Method
from paceline.models.heads import HeadLibrary
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from tests.core.prompts import code_prompts
from tests.fakes import WITH_FAKES, AlwaysRight, Mix, NeverRight
from tests.heads import UntrainedHeads, untrained_heads, untrained_judge
from tests.masked import masked_drafters

BASE = SamplingParams(ignore_eos=True)
SAMPLED = replace(BASE, temperature=1.0)
VARIANTS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (
        BASE,
        BASE,
        replace(BASE, repetition_penalty=1.3),
        replace(BASE, logit_bias={10: 4.0, 200: -4.0, 300: 6.0}),
    ),
    "sampled": (
        SAMPLED,
        replace(SAMPLED, temperature=0.6, top_k=20),
        replace(SAMPLED, top_p=0.9, repetition_penalty=1.2),
        replace(SAMPLED, temperature=1.4, min_p=0.05, logit_bias={10: 3.0, 300: -2.0}),
    ),
}
FAKES = ("always_right", "never_right", "mix_3", "mix_8")
LOSSY = [name for name, method in METHODS.items() if not method.lossless]


def same_tokens_as_ar(method: Method, variant: str) -> bool:
    """True when this method promises AR's tokens; other lossless methods promise its law."""
    if not method.lossless:
        return False
    return method.acceptance == "coupled" or variant == "greedy"


# Adding a method to METHODS adds it here: to the first list when its tokens must be AR's, else to
# the second, where it has to run, end and leave nothing behind.
CASES = [
    (name, variant)
    for variant in VARIANTS
    for name, method in METHODS.items()
    if same_tokens_as_ar(method, variant)
] + [(name, variant) for variant in VARIANTS for name in FAKES]
# The methods that all others are variations of, and the fakes: these run longest at night.
CORE_METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup", "speculative_sampling")
CORE_CASES = [case for case in CASES if case[0] in (*CORE_METHODS, *FAKES)]
OTHER_LOSSLESS_CASES = [case for case in CASES if case not in CORE_CASES]
OTHER_CASES = [
    (name, variant)
    for variant in VARIANTS
    for name, method in METHODS.items()
    if not same_tokens_as_ar(method, variant)
    and not (method.acceptance == "greedy" and variant == "sampled")  # refused
]


def count_for(batch: int, *, core: bool = False) -> int | None:
    """How many prompts of an everyday suite: few one at a time, which costs the most a token.

    Args:
        core: each of a variant's sampling parameters once.
    """
    return (4 if core else 2) if batch == 1 else None


class Suite:
    """The demo pair, prompts, and AR's answers (computed ``batch`` at a time, once).

    Args:
        folder: of another target, if the engine has one.
    """

    def __init__(
        self,
        demo: Engine,
        num_prompts: int,
        num_tokens: int,
        *,
        batch: int,
        folder: Path = TARGET_DIR,
    ) -> None:
        assert demo.tokenizer is not None
        self.demo, self._folder = demo, folder
        self.prompts = code_prompts(demo.tokenizer, num_prompts)
        self.num_tokens = num_tokens
        self._batch = batch
        self._expected: dict[str, list[list[int]]] = {}

    def params(self, variant: str) -> list[SamplingParams]:
        choices, size = VARIANTS[variant], self.demo.target.vocab_size
        return [
            replace(
                choice, seed=1000 + i, max_tokens=self.num_tokens,
                logit_bias={token % size: bias for token, bias in choice.logit_bias.items()},
            )
            for i, choice in enumerate(choices[i % len(choices)] for i in range(len(self.prompts)))
        ]  # fmt: skip

    def expected(self, variant: str) -> list[list[int]]:
        if variant not in self._expected:
            sessions = self.generate("ar", variant, self._batch)
            self._expected[variant] = [session.output_ids for session in sessions]
        return self._expected[variant]

    def engine(self, method: str, variant: str, batch: int, **drafters: Drafter) -> Engine:
        """A fresh engine over the demo target that has ``method``; ``drafters`` replace its own."""
        catalogue = dict(WITH_FAKES) | {
            name: replace(WITH_FAKES["mix"], name=name, drafter=name) for name in ("mix_3", "mix_8")
        }
        fakes = self.fakes(variant) if method in FAKES else {}
        return Engine(
            ModelTarget(self.demo.target.runner),
            {**self._masked(), **self.demo.drafters, **fakes, **drafters},
            tokenizer=self.demo.tokenizer,
            limits=EngineLimits(max_sessions=batch),
            catalogue=catalogue,
            length_context=self._context(),
            heads=self._heads(),
        )

    def _masked(self) -> dict[str, Drafter]:
        """Random models that fill masks; the demo's target has one for `diffuspec` already."""
        return masked_drafters(self.demo.target.vocab_size)

    def _context(self) -> LengthContext | None:
        """What trained rules belong to the target; None: those that ship for the demo pair."""
        if self._folder == TARGET_DIR:
            return None
        return LengthContext(heads=untrained_judge(self._folder))

    def _heads(self) -> HeadLibrary:
        runner = self.demo.target.runner
        if self._folder == TARGET_DIR:
            return HeadLibrary(untrained_heads(TARGET_DIR), TARGET_DIR, runner)
        assert isinstance(runner, LlamaRunner)
        return UntrainedHeads(self._folder, runner)

    def speculation(self, method: str) -> SpeculationConfig:
        """The method with its defaults, but always drafting; the fakes draft trees."""
        if method in FAKES:
            return SpeculationConfig(method=method, node_budget=12)
        # A controller that finds drafts not worth their time would leave little to compare.
        length = "auto" if method == "auto" else "fixed"
        return SpeculationConfig(method=method, length=length, allow_lossy=method in LOSSY)

    def generate(
        self, method: str, variant: str, batch: int, count: int | None = None
    ) -> list[Session]:
        """The first ``count`` prompts with a method, ``batch`` of them at a time."""
        prompts, params = self.prompts[:count], self.params(variant)[:count]
        engine = self.engine(method, variant, batch)
        return engine.generate(prompts, params, self.speculation(method))

    def fakes(self, variant: str) -> dict[str, Drafter]:
        size = self.demo.target.vocab_size
        truth = {
            tuple(prompt): tokens
            for prompt, tokens in zip(self.prompts, self.expected(variant), strict=True)
        }
        return {
            "always_right": AlwaysRight(truth, size),
            "never_right": NeverRight(truth, size),
            "mix_3": Mix(truth, size, rho=0.3),
            "mix_8": Mix(truth, size, rho=0.8),
        }

    def check(self, method: str, variant: str, batch: int, count: int | None = None) -> None:
        """Run a method and compare, token by token; also that it made progress in every forward."""
        sessions = self.check_progress(method, variant, batch, count)
        for i, session in enumerate(sessions):
            assert session.output_ids == self.expected(variant)[i], f"prompt {i}, {session.params}"
        drafted = sum(session.stats.num_drafted for session in sessions)
        rate = sum(session.stats.num_accepted for session in sessions) / max(1, drafted)
        if method == "always_right":
            assert rate == 1.0
        if method == "never_right":
            assert rate == 0.0
        if method == "mix_8":
            assert rate > 0.4

    def check_progress(
        self, method: str, variant: str, batch: int, count: int | None = None
    ) -> list[Session]:
        """Run a method: it ends with the number of tokens asked for, at least one a forward."""
        sessions = self.generate(method, variant, batch, count)
        assert sessions
        for session in sessions:
            assert session.error is None
            stats = session.stats
            assert not stats.drafter_lost
            assert stats.drafter_failures == 0
            assert session.finish_reason == "length"
            assert stats.num_target_forwards <= stats.num_tokens == self.num_tokens
            # Each forward gives one token of the target's own, and no more than one.
            assert stats.num_tokens <= stats.num_accepted + stats.num_target_forwards
            assert 1.0 <= stats.mean_accepted_length <= self._deepest(session) + 1
        return sessions

    @staticmethod
    def _deepest(session: Session) -> int:
        """The depth of the deepest draft that the session may have had."""
        return max(
            session.plan.config.num_speculative_tokens or 0, len(session.stats.drafted_by_depth)
        )
