"""Engines over the small random model, with everything that a test wants to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.drafters.base import AsyncDrafter, Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.methods import Method
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from tests.fakes import WITH_FAKES

LOCAL_METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup", "speculative_sampling")


@dataclass
class Small:
    """An engine over a random target, whose drafter is the same model: right at temperature 0."""

    engine: Engine
    target: LlamaRunner
    drafter: LlamaRunner

    def assert_nothing_is_left(self) -> None:
        """No session, no KV entry, no drafter state: what an idle engine looks like."""
        engine = self.engine
        assert not engine.sessions
        assert not engine.has_work
        for name in ("_waiting", "_reserved", "_futures", "_handlers", "_text_sent"):
            assert not getattr(engine, name), name
        assert not engine._draft_started
        assert self.target.num_free == self.target.kv_capacity
        assert self.drafter.num_free == self.drafter.kv_capacity
        for name, drafter in engine.drafters.items():
            for attribute in ("_states", "_indexes", "_open", "_waiting", "_offered", "opened"):
                assert not getattr(drafter, attribute, None), f"{name}.{attribute}"


def small_engine(
    folder: Path,
    *,
    kv_tokens: int = 4000,
    limits: EngineLimits | None = None,
    drafters: Mapping[str, Drafter | AsyncDrafter] | None = None,
    catalogue: Mapping[str, Method] = WITH_FAKES,
    eos_token_ids: Sequence[int] = (),
) -> Small:
    target = LlamaRunner(folder, kv_tokens=kv_tokens)
    drafter = LlamaRunner(folder, kv_tokens=kv_tokens)
    engine = Engine(
        ModelTarget(target),
        {"draft_model": DraftModel(drafter), **(drafters or {})},
        tokenizer=load_tokenizer(folder),
        eos_token_ids=eos_token_ids,
        limits=limits,
        catalogue=catalogue,
    )
    return Small(engine, target, drafter)


class Reference:
    """What AR generates, computed once for each prompt and parameters, each alone."""

    def __init__(self, folder: Path) -> None:
        self._small = small_engine(folder)
        self._known: dict[str, list[int]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        key = repr((list(prompt), params))
        if key not in self._known:
            ar = SpeculationConfig(method="ar")
            self._known[key] = self._small.engine.generate([prompt], params, ar)[0].output_ids
        return self._known[key]
