"""Continuous batching: admission, fairness, prefill, cancellation, truncation, ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.errors import FailedPrecondition, ResourceExhausted, SessionNotFound
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.target import ModelTarget
from paceline.tree import depths
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome
from tests.core.engines import (
    LOCAL_METHODS,
    Reference,
    Small,
    has_tokens_of_ar,
    small_engine,
)
from tests.core.prompts import code_prompts
from tests.core.scripted import ScriptedRunner, chaotic, run, spoken
from tests.core.test_tree import trees
from tests.fakes import WITH_FAKES, AlwaysRight
from tests.modelzoo import make_model

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=4)
AR, TREE = SpeculationConfig(method="ar"), SpeculationConfig(method="draft_model_tree")
CLIENT = SpeculationConfig(method="client")


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([seed, count]).integers(0, 256, count)]


def finish(engine: Engine, most: int = 1000) -> None:
    for _ in range(most):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine makes no progress")


# --- admission -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "draft_model_tree", "prompt_lookup"])
def test_small_kv_memory_serves_all_in_turn(
    method: str, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, kv_tokens=150)
    engine, config = small.engine, SpeculationConfig(method=method)
    prompts = [tokens(5 + 7 * i % 40, seed=i) for i in range(14)]
    sessions = [engine.submit(Request(prompt, GREEDY, config)) for prompt in prompts]
    most = 0
    while engine.has_work:
        engine.step()
        used = small.target.kv_capacity - small.target.num_free
        most = max(most, used)
        assert used <= small.target.kv_capacity
    assert most > 0
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.finish_reason == "length"
        assert not session.stats.drafter_lost
        assert session.output_ids == reference(prompt, GREEDY)
    small.assert_nothing_is_left()


def test_a_request_that_can_never_fit_is_refused(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, kv_tokens=60)
    with pytest.raises(ResourceExhausted, match="60"):
        small.engine.submit(Request(tokens(40), replace(GREEDY, max_tokens=40), AR))
    small.assert_nothing_is_left()


def test_the_queue_is_bounded(tiny_folder: Path) -> None:
    """One runs, three wait (one that can run does not count as waiting), the fifth is refused."""
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=1, max_waiting=3))
    for _ in range(4):
        small.engine.submit(Request([1], GREEDY, AR))
    for _ in range(3):
        with pytest.raises(ResourceExhausted, match="3 sessions are waiting"):
            small.engine.submit(Request([1], GREEDY, AR))
    while len(small.engine.sessions) == 4:
        small.engine.step()
    small.engine.submit(Request([1], GREEDY, AR))  # one has ended, so there is room for one
    finish(small.engine)
    small.assert_nothing_is_left()


def test_a_long_request_is_not_overtaken_for_ever(tiny_folder: Path) -> None:
    """First come, first served, also for KV memory."""
    small = small_engine(tiny_folder, kv_tokens=100)
    order: list[str] = []

    def note(event: RoundEvent) -> None:
        if event.session.session_id not in order:
            order.append(event.session.session_id)

    engine = small.engine
    engine.submit(
        Request(tokens(20), replace(GREEDY, max_tokens=30), AR, session_id="a"), on_event=note
    )
    engine.step()
    engine.submit(
        Request(tokens(60), replace(GREEDY, max_tokens=30), AR, session_id="b"), on_event=note
    )
    for i in range(8):
        engine.submit(Request(tokens(3), GREEDY, AR, session_id=f"c{i}"), on_event=note)
    finish(engine)
    assert order[:2] == ["a", "b"]
    small.assert_nothing_is_left()


# --- prefill ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_any_chunk_size_gives_the_same_tokens(
    chunk: int, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(prefill_chunk=chunk))
    prompts = [tokens(n) for n in (1, 2, 3, 31, 90)]
    for params in (GREEDY, SAMPLED):
        sessions = small.engine.generate(prompts, params, TREE)
        for prompt, session in zip(prompts, sessions, strict=True):
            assert session.output_ids == reference(prompt, params)
    small.assert_nothing_is_left()


def test_a_long_prompt_does_not_stop_the_others(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(prefill_chunk=8))
    engine = small.engine
    first = engine.submit(Request([5], replace(GREEDY, max_tokens=40), AR))
    engine.step()
    late = engine.submit(Request(tokens(100), GREEDY, AR))
    steps = 0
    while not late.output_ids:
        before = len(first.output_ids)
        engine.step()
        steps += 1
        assert len(first.output_ids) == before + 1
    assert steps >= 100 // 8
    finish(engine)


# --- cancellation ----------------------------------------------------------------------------


def bring_to(engine: Engine, state: SessionState) -> Session:
    """A session in that state (between two steps no session is verifying)."""
    if state is SessionState.WAITING:
        return engine.submit(Request(tokens(30), GREEDY, TREE))
    if state is SessionState.PREFILLING:
        session = engine.submit(Request(tokens(100), GREEDY, TREE))
        engine.step(0)
    elif state is SessionState.DRAFTING:
        session = engine.submit(Request(tokens(3), GREEDY, CLIENT))
        engine.step(0)
        engine.step(0)
    else:
        session = engine.submit(Request(tokens(30), GREEDY, TREE))
        while not session.output_ids:
            engine.step(0)
    assert session.state is state
    return session


@pytest.mark.parametrize(
    "state",
    [SessionState.WAITING, SessionState.PREFILLING, SessionState.DRAFTING, SessionState.READY],
)
def test_cancel_frees_everything_at_once(
    state: SessionState, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(prefill_chunk=32))
    session = bring_to(small.engine, state)
    assert small.engine.cancel(session.session_id)
    assert (session.finish_reason, session.state) == ("cancelled", SessionState.FINISHED)
    small.assert_nothing_is_left()
    assert not small.engine.cancel(session.session_id)
    # The engine works on, and the id is free again.
    mate = small.engine.submit(Request(tokens(9), GREEDY, TREE, session_id=session.session_id))
    finish(small.engine)
    assert mate.output_ids == reference(tokens(9), GREEDY)


def test_cancelling_another_session_from_an_event(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    engine = small.engine
    engine.submit(Request(tokens(4), GREEDY, TREE), on_event=lambda event: engine.cancel("victim"))
    events: list[RoundEvent] = []
    engine.submit(Request(tokens(5), GREEDY, TREE, session_id="victim"), on_event=events.append)
    other = engine.submit(Request(tokens(6), GREEDY, TREE))
    finish(engine)
    assert [event.finished for event in events].count(True) == 1
    assert events[-1].session.finish_reason == "cancelled"
    assert other.output_ids == reference(tokens(6), GREEDY)
    small.assert_nothing_is_left()


# --- truncation ------------------------------------------------------------------------------


@pytest.mark.one_of(5, slow=3)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_truncate_and_go_on(
    method: str, params: SamplingParams, tiny_folder: Path, reference: Reference
) -> None:
    """The tokens that follow are those that a fresh session has after the same prefix."""
    small = small_engine(tiny_folder)
    prompt, engine = tokens(11), small.engine
    params = replace(params, max_tokens=40)
    knobs = {"length": "fixed"} if method == "draft_model" else {}  # it drafts on any machine
    config = SpeculationConfig(method=method, **knobs)
    session = engine.submit(Request(prompt, params, config))
    rng = random.Random(3)
    for _ in range(4):
        while len(session.output_ids) < 12:
            engine.step()
        engine.truncate(session.session_id, rng.randint(len(prompt), session.length))
    before = (session.stats.num_accepted, session.stats.num_drafted)
    finish(engine)
    if not has_tokens_of_ar(method, params):
        assert len(session.output_ids) == 40  # its tokens depend on where rounds begin
    else:
        assert session.output_ids == reference(prompt, params)
    if method == "draft_model":
        # The drafter is the same model: it must know that the tokens are gone to stay right.
        accepted = session.stats.num_accepted - before[0]
        assert accepted == session.stats.num_drafted - before[1] > 0
    small.assert_nothing_is_left()


def test_truncate_checks_its_arguments(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    engine, prompt = small.engine, tokens(6)
    session = engine.submit(Request(prompt, GREEDY, AR))
    while len(session.output_ids) < 3:
        engine.step()
    for length in (5, session.length + 1, -1):
        with pytest.raises(ValueError, match="length") as info:
            engine.truncate(session.session_id, length)
        assert str(length) in str(info.value)
    with pytest.raises(SessionNotFound):
        engine.truncate("unknown", 6)
    engine.truncate(session.session_id, 6)
    assert session.output_ids == []
    engine.cancel(session.session_id)


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.one_of(5, slow=5)
@pytest.mark.parametrize("method", LOCAL_METHODS)
@pytest.mark.parametrize("prompt_length", [40, 60, 63])
def test_a_full_context_ends_with_length(method: str, prompt_length: int, zoo: Path) -> None:
    folder = make_model("llama_gqa", zoo, num_hidden_layers=2, max_position_embeddings=64)
    small = small_engine(folder)
    prompt = tokens(prompt_length)
    params = replace(GREEDY, max_tokens=1000)
    config = SpeculationConfig(method=method, num_speculative_tokens=0 if method == "ar" else 9)
    session = small.engine.generate([prompt], params, config)[0]
    assert (session.length, session.finish_reason) == (64, "length")
    assert session.output_ids == Reference(folder)(prompt, params)
    small.assert_nothing_is_left()


@pytest.mark.one_of(3, slow=2)
@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_one_token(method: str, tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    params = replace(GREEDY, max_tokens=1)
    session = small.engine.generate([tokens(8)], params, SpeculationConfig(method=method))[0]
    assert session.output_ids == reference(tokens(8), params)
    assert (session.stats.num_rounds, session.stats.num_drafted) == (1, 0)
    small.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_inside_a_draft(
    how: str, place: int, tiny_folder: Path, reference: Reference
) -> None:
    prompt = tokens(10)
    ar = reference(prompt, GREEDY)
    stop = ar[place]
    end = ar.index(stop) + 1  # where AR meets it first
    small = small_engine(tiny_folder, eos_token_ids=(stop,) if how == "eos" else ())
    small.engine.drafters["always_right"] = AlwaysRight({tuple(prompt): ar}, 258)
    ids = () if how == "eos" else (stop,)
    params = replace(GREEDY, ignore_eos=False, stop_token_ids=ids)
    knobs = {"num_speculative_tokens": 5, "node_budget": 9}
    config = SpeculationConfig(method="always_right", **knobs)
    session = small.engine.generate([prompt], params, config)[0]
    assert session.output_ids == ar[:end]
    assert session.finish_reason == "stop"
    assert session.stats.num_tokens == end
    small.assert_nothing_is_left()
    if how == "eos":  # and ignored where that is wanted
        ignoring = small.engine.generate([prompt], GREEDY, config)[0]
        assert ignoring.output_ids == ar


class Arbitrary(Drafter):
    """Drafts whatever hypothesis thinks of: trees of any form, the end token anywhere in them."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, drafts: list[Draft]) -> None:
        self.drafts = drafts

    def open(self, session: Session) -> None:
        self.left = list(self.drafts)

    def close(self, session: Session) -> None:
        pass

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return [self.left.pop() if self.left else EMPTY_DRAFT for _ in sessions]

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(
    drafts=st.lists(trees(most=12, vocab=3), max_size=12),
    salt=st.integers(0, 99),
    max_tokens=st.integers(1, 14),
)
def test_whatever_is_drafted_the_tokens_are_those_of_ar(
    drafts: list[Draft], salt: int, max_tokens: int, temperature: float
) -> None:
    """Drafts that are empty, wide, full of end tokens, or deeper than what may still come.

    With three tokens many of them are right by chance. Each forward brings between one token and
    one more than the draft is deep.
    """
    end, anything = 2, chaotic(12)

    def function(token_ids: list[int]) -> int:
        token = anything([salt, *token_ids])
        return end if token == 11 else token % 2

    row = replace(WITH_FAKES["mix"], name="any", drafter="any")
    knobs = {"num_speculative_tokens": 12, "node_budget": 12}
    params = SamplingParams(temperature=temperature, seed=salt, max_tokens=max_tokens)

    def engine() -> Engine:
        runner = ScriptedRunner(function, 3, margin=1.0 if temperature else 10.0)
        return Engine(
            ModelTarget(runner),  # type: ignore[arg-type]
            {"any": Arbitrary(drafts)},
            eos_token_ids=[end],
            catalogue={**WITH_FAKES, "any": row},
        )

    expected, _ = run(engine(), [0], params, AR)
    if not temperature:
        truth = spoken(function, [0], max_tokens)
        assert expected.output_ids == truth[: truth.index(end) + 1 if end in truth else None]
    session, events = run(engine(), [0], params, SpeculationConfig(method="any", **knobs))
    assert session.output_ids == expected.output_ids
    assert session.finish_reason == expected.finish_reason
    assert session.stats.num_target_forwards == len(events) <= len(session.output_ids)
    left = max_tokens
    for event in events:
        assert event.outcome is not None
        deepest = max(depths(event.outcome.draft.parent_indices), default=0)
        assert deepest <= left - 1  # what could not be committed is not verified
        assert 1 <= len(event.token_ids) <= deepest + 1
        assert len(event.token_ids) - 1 <= event.num_accepted <= len(event.token_ids)
        left -= len(event.token_ids)


# --- text ------------------------------------------------------------------------------------


class Story:
    """What AR writes with the demo target, and engines that write it again."""

    def __init__(self, demo: Engine) -> None:
        assert demo.tokenizer is not None
        self.demo = demo
        self.params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=2)
        self.prompts = code_prompts(demo.tokenizer, 4, seed=9)
        sessions = self.engine().generate(self.prompts, self.params, AR)
        self.ids = [session.output_ids for session in sessions]
        self.texts = [session.text for session in sessions]

    def engine(self) -> Engine:
        return Engine(
            ModelTarget(self.demo.target.runner), self.demo.drafters, tokenizer=self.demo.tokenizer
        )

    def stream(
        self, story: int, stop: tuple[str, ...], config: SpeculationConfig
    ) -> tuple[Session, list[RoundEvent]]:
        events: list[RoundEvent] = []
        engine = self.engine()
        params = replace(self.params, stop=stop)
        session = engine.submit(
            Request(self.prompts[story], params, config), on_event=events.append
        )
        finish(engine)
        return session, events


@pytest.fixture(scope="module")
def story(demo: Engine) -> Story:
    return Story(demo)


def test_text_is_the_decoded_tokens(story: Story, demo: Engine) -> None:
    assert demo.tokenizer is not None
    for ids, text in zip(story.ids, story.texts, strict=True):
        assert text == demo.tokenizer.decode(ids)


@pytest.mark.parametrize("config", [AR, TREE], ids=["ar", "tree"])
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_stop_strings_cut_the_text_where_ar_would(
    length: int, config: SpeculationConfig, story: Story
) -> None:
    """Any piece of AR's own text, wherever the borders of its tokens are."""
    rng = random.Random(length)
    for which, text in enumerate(story.texts):
        start = rng.randrange(len(text) - length)
        stop = text[start : start + length]
        session, events = story.stream(which, (stop, "never in the text \0"), config)
        assert session.finish_reason == "stop"
        assert session.text == text[: text.find(stop)]
        assert session.output_ids == story.ids[which][: len(session.output_ids)]
        assert "".join(event.text for event in events) == session.text
        # Not a token more than it takes to see the stop string.
        assert story.demo.tokenizer is not None
        assert stop not in story.demo.tokenizer.decode(session.output_ids[:-1])


@pytest.mark.parametrize("config", [AR, TREE], ids=["ar", "tree"])
def test_streamed_text_is_never_taken_back(config: SpeculationConfig, story: Story) -> None:
    """Stop strings that begin like the text and then differ hold text back, but lose none."""
    for which, text in enumerate(story.texts):
        stops = tuple(text[i : i + 6] + "\0" for i in range(0, len(text) - 6, 5))
        session, events = story.stream(which, stops, config)
        shown = ""
        for event in events:
            shown += event.text
            assert text.startswith(shown)
        assert shown == session.text == text


def test_text_held_back_survives_a_truncation(story: Story) -> None:
    """What was held back when the tokens were cut is still to be sent."""
    text = story.texts[0]
    stops = tuple(text[i : i + 4] + "\0" for i in range(0, len(text) - 4, 3))
    events: list[RoundEvent] = []
    engine = story.engine()
    params = replace(story.params, stop=stops)
    session = engine.submit(Request(story.prompts[0], params, AR), on_event=events.append)
    while not session.finished:
        engine.truncate(session.session_id, session.length)  # cuts nothing
        engine.step()
    assert session.text == text
    assert "".join(event.text for event in events) == text


# --- events ----------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=5)
@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_events_tell_the_whole_story(method: str, tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    events: list[RoundEvent] = []
    config = SpeculationConfig(method=method)
    session = small.engine.submit(Request(tokens(20), SAMPLED, config), on_event=events.append)
    finish(small.engine)
    assert [event.round for event in events] == list(range(1, len(events) + 1))
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    assert [t for event in events for t in event.token_ids] == session.output_ids
    assert "".join(event.text for event in events) == session.text
    assert sum(event.num_accepted for event in events) == session.stats.num_accepted
    depth = session.plan.config.num_speculative_tokens or 0
    for event in events:
        assert event.outcome is not None
        assert 1 <= len(event.token_ids) <= event.num_accepted + 1 <= depth + 1
        accepted = event.outcome.draft.token_ids[list(event.outcome.path)].tolist()
        assert list(event.token_ids[: event.num_accepted]) == accepted[: event.num_accepted]
    stats = session.stats
    assert stats.num_target_forwards == stats.num_rounds == len(events)
    assert stats.num_tokens == len(session.output_ids)
    assert sum(stats.accepted_by_depth) == stats.num_accepted
    assert stats.mean_accepted_length == stats.num_tokens / stats.num_target_forwards


# --- sessions that a client drives -----------------------------------------------------------


def drive(small: Small, session: Session, offers: Callable[[int], Draft], *, early: bool) -> None:
    """Offer a draft for every round, before or after the engine asks for it."""
    client = small.engine.drafters["client"]
    for number in range(200):
        if session.finished:
            return
        if early:
            client.offer(session.session_id, offers(number))
        else:
            small.engine.step(0)
            client.offer(session.session_id, offers(number))
        rounds = session.stats.num_rounds
        small.engine.step(0)
        assert session.finished or session.stats.num_rounds == rounds + 1
    raise AssertionError("no end")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_client_driven_sessions(
    early: bool, params: SamplingParams, tiny_folder: Path, reference: Reference
) -> None:
    """Right, wrong, empty, wide and far too long drafts: always AR's tokens."""
    small = small_engine(tiny_folder)
    prompt = tokens(12)
    params = replace(params, max_tokens=60)
    ar = reference(prompt, params)
    session = small.engine.submit(Request(prompt, params, CLIENT))
    small.engine.step(0)
    small.engine.step(0)
    rng = np.random.default_rng(1)

    def offers(number: int) -> Draft:
        done = len(session.output_ids)
        if number % 5 == 0:
            return EMPTY_DRAFT
        if number % 5 == 1:
            return Draft.chain(ar[done : done + 5])
        if number % 5 == 2:
            return Draft.chain(rng.integers(0, 256, 70))
        count = 30
        parents = np.array([rng.integers(-1, i) for i in range(count)], np.int32)
        ids = rng.integers(0, 256, count)
        ids[0], parents[0] = ar[done], -1
        return Draft(ids, parents)

    drive(small, session, offers, early=early)
    assert session.output_ids == ar
    assert not session.stats.drafter_lost
    assert session.stats.num_accepted > 0
    small.assert_nothing_is_left()


def test_a_client_hears_of_its_round_before_anybody_waits_for_its_draft(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts from what the round committed."""
    small = small_engine(tiny_folder)
    engine, client = small.engine, small.engine.drafters["client"]
    heard: list[RoundEvent] = []
    heard_at_waits: list[int] = []
    monkeypatch.setattr(engine, "_wait", lambda seconds: heard_at_waits.append(len(heard)))
    session = engine.submit(Request(tokens(4), GREEDY, CLIENT), on_event=heard.append)
    while session.state is not SessionState.DRAFTING:
        engine.step(0)
    for number in range(5):
        client.offer(session.session_id, EMPTY_DRAFT)
        engine.step(0)  # the round
        heard_at_waits.clear()
        engine.step(0)  # no draft has come
        assert heard_at_waits == [number + 1]
    engine.cancel(session.session_id)
    small.assert_nothing_is_left()


def test_no_session_waits_for_a_client(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    waiting = small.engine.submit(Request(tokens(4), GREEDY, CLIENT))
    other = small.engine.submit(Request(tokens(5), GREEDY, TREE))
    while not other.finished:
        small.engine.step(0)
    assert other.output_ids == reference(tokens(5), GREEDY)
    assert waiting.output_ids == []
    assert small.engine.cancel(waiting.session_id)
    small.assert_nothing_is_left()


def test_offers_that_do_not_fit(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    client = small.engine.drafters["client"]
    with pytest.raises(SessionNotFound):
        client.offer("unknown", EMPTY_DRAFT)
    session = small.engine.submit(Request(tokens(4), GREEDY, CLIENT))
    small.engine.step(0)
    small.engine.step(0)
    client.offer(session.session_id, EMPTY_DRAFT)
    client.offer(session.session_id, EMPTY_DRAFT)  # kept for the next round
    with pytest.raises(FailedPrecondition):
        client.offer(session.session_id, EMPTY_DRAFT)
    small.engine.cancel(session.session_id)
    with pytest.raises(SessionNotFound):
        client.offer(session.session_id, EMPTY_DRAFT)
    small.assert_nothing_is_left()


def test_a_tree_cannot_slip_through_a_rule_for_chains(
    tiny_folder: Path, reference: Reference
) -> None:
    """Rejection walks a chain: siblings offered by a client must not pass for parent and child."""
    small = small_engine(tiny_folder)
    prompt = tokens(7)
    ar = reference(prompt, GREEDY)
    config = SpeculationConfig(method="client", acceptance="rejection")
    session = small.engine.submit(Request(prompt, GREEDY, config))

    def siblings(number: int) -> Draft:
        done = len(session.output_ids)
        ids = np.array(([*ar[done : done + 2], 0, 0])[:2])
        return Draft(ids, np.array([-1, -1], np.int32))

    small.engine.step(0)
    drive(small, session, siblings, early=False)
    assert session.output_ids == ar


# --- leaks -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_left_after_many_random_sessions(tiny_folder: Path) -> None:
    small = small_engine(
        tiny_folder, kv_tokens=700, limits=EngineLimits(max_sessions=7, prefill_chunk=24)
    )
    engine, rng = small.engine, random.Random(8)
    client = engine.drafters["client"]
    running: list[Session] = []
    started = ended = 0
    while started < 200 or engine.has_work:
        if started < 200 and rng.random() < 0.7:
            method = rng.choice([*LOCAL_METHODS, "client"])
            params = replace(
                SAMPLED if rng.random() < 0.5 else GREEDY,
                max_tokens=rng.randint(1, 10),
                stop=("q", "zz") if rng.random() < 0.3 else (),
            )
            prompt = tokens(rng.randint(1, 50), seed=started)
            running.append(engine.submit(Request(prompt, params, SpeculationConfig(method=method))))
            started += 1
        for session in list(running):
            if session.finished:
                running.remove(session)
                ended += 1
            elif rng.random() < 0.02:
                engine.cancel(session.session_id)
            elif rng.random() < 0.05 and session.stats.num_rounds < 30:
                engine.truncate(
                    session.session_id, rng.randint(session.prompt_length, session.length)
                )
            elif session.session_id in client._waiting:
                client.offer(session.session_id, Draft.chain(tokens(rng.randint(0, 3))))
        engine.step(0)
    assert ended + len(running) == 200
    small.assert_nothing_is_left()
