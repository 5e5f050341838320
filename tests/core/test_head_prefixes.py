"""A head begins with the prompt that an earlier session read, and drafts what it would have."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import DRAFTERS
from paceline.engine import Engine, EngineLimits
from paceline.engine.events import RoundEvent
from paceline.engine.intake import AGAIN_SHARE, LONGEST_READ, MOST_AGAIN, MOST_AGAIN_OF_LONG
from paceline.lengths.experience import CROWD
from paceline.loading import load_runner
from paceline.model_names import resolve_model
from paceline.models.heads import HeadLibrary, heads_folder
from paceline.models.llama import LlamaRunner
from paceline.models.prefix_cache import BLOCK
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget

PROMPT = list(range(200, 200 + 3 * BLOCK + 5))
OTHER = [*PROMPT[: 2 * BLOCK], *range(900, 900 + BLOCK + 3)]
CACHED = 3 * BLOCK
HEADS = ("eagle", "fspad", "auto")


@cache
def demo_runner() -> LlamaRunner:
    runner = load_runner(resolve_model("demo"), kv_tokens=4096)
    assert isinstance(runner, LlamaRunner)
    return runner


def make(**limits: Any) -> Engine:
    """An engine with the demo target, its heads, and an empty prefix cache.

    All share the target's weights and memory: the one that was made last has them.
    """
    folder, runner = resolve_model("demo"), demo_runner()
    prefixes = runner._pool.prefixes
    runner._pool._free += prefixes.evict(10_000)
    assert runner.num_free == runner.kv_capacity and prefixes.num_idle == 0
    return Engine(
        ModelTarget(runner), heads=HeadLibrary(heads_folder(folder), folder, runner),
        limits=EngineLimits(**limits),
    )  # fmt: skip


def config(method: str) -> SpeculationConfig:
    if method == "auto":
        return SpeculationConfig(method="auto", drafters=("eagle",))
    return SpeculationConfig(method=method, length="fixed", num_speculative_tokens=4)


class Run:
    """A session: what the prefix cache had for it, and what it drafted and committed."""

    def __init__(self, engine: Engine, prompt: list[int], method: str, **request: Any) -> None:
        prefixes = engine.local_target.prefixes
        before = 0 if prefixes is None else prefixes.num_hit
        self.drafts: list[list[int]] = []
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        asked = Request(prompt, params, config(method), **request)
        session = engine.submit(asked, on_event=self._note)
        while not session.finished:
            engine.step()
        assert session.error is None
        assert method == "ar" or session.drafter != "none", "the drafter failed"
        self.tokens = session.output_ids
        self.hit = 0 if prefixes is None else prefixes.num_hit - before

    def _note(self, event: RoundEvent) -> None:
        if event.outcome is not None:
            self.drafts.append(event.outcome.draft.token_ids.tolist())


@pytest.fixture(scope="module")
def expected() -> dict[str, Run]:
    """What each method does with an empty cache, and AR."""
    return {method: Run(make(), PROMPT, method) for method in ("ar", *HEADS)}


@pytest.mark.parametrize("method", HEADS)
def test_it_drafts_the_same_after_a_cached_prompt(method: str, expected: dict[str, Run]) -> None:
    engine = make()
    assert Run(engine, PROMPT, method).hit == 0
    again = Run(engine, PROMPT, method)
    assert again.hit == CACHED
    assert again.tokens == expected["ar"].tokens
    if method != "auto":  # which learns from one session to the next
        assert again.drafts == expected[method].drafts


def test_it_begins_where_prompts_differ(expected: dict[str, Run]) -> None:
    first = Run(make(), OTHER, "eagle")
    engine = make()
    Run(engine, PROMPT, "eagle")
    second = Run(engine, OTHER, "eagle")
    # A head's entry knows the next token, too: the block before the difference is not the same.
    assert second.hit == BLOCK
    assert (second.tokens, second.drafts) == (first.tokens, first.drafts)


def test_the_target_computes_again_what_no_head_has_read(expected: dict[str, Run]) -> None:
    engine = make()
    Run(engine, PROMPT, "ar")  # leaves the target's entries, and none of the head
    session = Run(engine, PROMPT, "eagle")
    assert session.hit == 0
    assert session.drafts == expected["eagle"].drafts


def test_a_head_that_knows_more_than_the_target(expected: dict[str, Run]) -> None:
    """The target's memory was needed; the head reads only what is new to it."""
    engine = make()
    Run(engine, PROMPT, "eagle")
    prefixes = engine.local_target.prefixes
    assert prefixes is not None
    pool = engine.local_target.runner._pool  # type: ignore[attr-defined]
    pool._free += prefixes.evict(10_000)
    session = Run(engine, PROMPT, "eagle")
    assert session.hit == 0
    assert session.drafts == expected["eagle"].drafts


def test_sessions_share_a_prompt_while_they_run(expected: dict[str, Run]) -> None:
    engine = make()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first = engine.submit(Request(PROMPT, params, config("eagle")))
    while first.stats.num_rounds < 2:
        engine.step()
    second = Run(engine, PROMPT, "eagle")
    assert second.hit == CACHED
    assert second.drafts == expected["eagle"].drafts


def test_tenants_share_nothing() -> None:
    engine = make()
    Run(engine, PROMPT, "eagle", tenant="a")
    pool = engine.drafters["eagle"]._head.stack.pool  # type: ignore[attr-defined]
    before = pool.prefixes.num_hit
    assert Run(engine, PROMPT, "eagle", tenant="b").hit == 0
    assert pool.prefixes.num_hit == before
    assert Run(engine, PROMPT, "eagle", tenant="b").hit == CACHED


def test_without_a_prefix_cache_a_head_keeps_nothing(expected: dict[str, Run]) -> None:
    engine = make(prefix_cache=False)
    for _ in range(2):
        assert Run(engine, PROMPT, "eagle").drafts == expected["eagle"].drafts
    pool = engine.drafters["eagle"]._head.stack.pool  # type: ignore[attr-defined]
    assert pool.prefixes.num_idle == 0


def test_a_truncated_session_leaves_only_its_prompt(expected: dict[str, Run]) -> None:
    """What a head reads after a cut does not begin with the prompt."""
    engine = make()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    session = engine.submit(Request(PROMPT, params, config("eagle")))
    while session.length < len(PROMPT) + 6:  # before the next block is full
        engine.step()
    engine.truncate(session.session_id, len(PROMPT) + 3)
    while engine.has_work:
        engine.step()
    assert session.output_ids[:24] == expected["ar"].tokens
    longer = session.token_ids[: len(PROMPT) + BLOCK + 4]
    assert Run(engine, longer, "eagle").drafts == Run(make(), longer, "eagle").drafts


def joins(engine: Engine, prompt: list[int], max_tokens: int = 2) -> bool:
    """Whether a session of method auto has the head."""
    params = SamplingParams(max_tokens=max_tokens)
    session = engine.submit(Request(prompt, params, SpeculationConfig(method="auto")))
    drafters = session.config[DRAFTERS]
    engine.cancel(session.session_id)
    return drafters is not None and "eagle" in drafters


def test_in_a_long_conversation_it_reads_what_is_new() -> None:
    engine = make()
    conversation = [*PROMPT, *range(300, 300 + LONGEST_READ)]
    assert not joins(engine, conversation)
    Run(engine, conversation[:LONGEST_READ], "eagle")
    assert joins(engine, conversation)


def test_the_target_does_not_compute_much_again_for_it() -> None:
    engine = make()
    prompt = list(range(100, 100 + MOST_AGAIN + BLOCK + 1))
    Run(engine, prompt[: MOST_AGAIN + 1], "ar")
    assert joins(engine, prompt)
    Run(engine, prompt, "ar")
    assert not joins(engine, prompt)
    Run(engine, prompt, "eagle")
    assert joins(engine, prompt)


def test_for_a_long_answer_it_computes_more_again() -> None:
    engine = make()
    prompt = list(range(100, 100 + MOST_AGAIN_OF_LONG + BLOCK + 1))
    Run(engine, prompt[: 2 * BLOCK + 1], "ar")
    assert not joins(engine, prompt, max_tokens=int(2 * BLOCK / AGAIN_SHARE) - 1)
    assert joins(engine, prompt, max_tokens=int(2 * BLOCK / AGAIN_SHARE))
    others = [
        engine.submit(Request([7, 8, n], SamplingParams(max_tokens=2), config("ar")))
        for n in range(CROWD)
    ]
    assert not joins(engine, prompt, max_tokens=128)  # the others would wait for it
    for session in others:
        engine.cancel(session.session_id)
    Run(engine, prompt, "ar")
    assert not joins(engine, prompt, max_tokens=10_000)
