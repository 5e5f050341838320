"""A drafter never takes a session down, and never another drafter's session."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.errors import DrafterUnavailable
from paceline.methods import METHODS
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft, Need, Outcome
from tests.core.engines import Reference, small_engine
from tests.fakes import WITH_FAKES
from tests.modelzoo import VOCAB_SIZE, make_model

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[65, 66, 67], [70] * 9, [80, 81] * 20]
CATALOGUE = dict(WITH_FAKES) | {
    "faulty": replace(
        WITH_FAKES["mix"],
        name="faulty",
        drafter="faulty",
        defaults={"num_speculative_tokens": 4, "node_budget": 8},
    )
}


class Faulty(Drafter):
    """Drafts well for some rounds, then does what ``fault`` says."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, fault: str, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.fault = fault
        self.truth = truth
        self.rounds = 0
        self.opened: set[str] = set()

    def open(self, session: Session) -> None:
        if self.fault == "open":
            raise OSError("cannot open")
        self.opened.add(session.session_id)

    def close(self, session: Session) -> None:
        self.opened.discard(session.session_id)
        if self.fault in ("close", "propose and close"):
            raise OSError("cannot close")

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self.rounds += 1
        drafts = [self.draft(s, b) for s, b in zip(sessions, budgets, strict=True)]
        if self.rounds < 3:
            return drafts
        if self.fault in ("propose", "propose and close"):
            raise RuntimeError("no drafts any more")
        if self.fault == "too few drafts":
            return drafts[1:]
        if self.fault == "too many drafts":
            return [*drafts, drafts[0]]
        if self.fault == "nothing":
            return None
        return drafts

    def draft(self, session: Session, budget: Budget) -> Draft:
        truth = self.truth[tuple(session.token_ids[: session.prompt_length])]
        done = len(session.output_ids)
        good = Draft.chain(truth[done : done + budget.depth])
        wrong: Any = {
            "no drafts but None": None,
            "a token beyond the vocabulary": Draft.chain([5, 258]),
            "a negative token": Draft.chain([-1, 5]),
            "far too deep": Draft.chain([7] * 600),
            "far too wide": Draft(np.full(3000, 7), np.full(3000, -1, np.int32)),
            "a parent that comes later": Draft(np.array([1, 2]), np.array([1, -1], np.int32)),
            "its own parent": Draft(np.array([1, 2]), np.array([-1, 1], np.int32)),
            "parents below the root": Draft(np.array([1, 2]), np.array([-1, -2], np.int32)),
            "too few parents": Draft(np.array([1, 2]), np.array([-1], np.int32)),
            "too many parents": Draft(np.array([1]), np.array([-1, 0], np.int32)),
            "tokens that are no integers": Draft(np.array([1.5, 2.0]), np.array([-1, 0])),
        }
        return wrong.get(self.fault, good) if self.rounds >= 3 else good

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        if self.fault == "observe" and self.rounds >= 3:
            raise RuntimeError("does not want to know")


RAISING = ("open", "propose", "propose and close", "observe", "too few drafts", "too many drafts")
NONSENSE = (
    "nothing",
    "no drafts but None",
    "a token beyond the vocabulary",
    "a negative token",
    "far too deep",
    "far too wide",
    "a parent that comes later",
    "its own parent",
    "parents below the root",
    "too few parents",
    "too many parents",
    "tokens that are no integers",
)


@pytest.mark.parametrize("fault", [*RAISING, *NONSENSE, "close"])
def test_a_faulty_local_drafter(fault: str, tiny_folder: Path, reference: Reference) -> None:
    truth = {tuple(prompt): reference(prompt, PARAMS) for prompt in PROMPTS}
    small = small_engine(
        tiny_folder, catalogue=CATALOGUE, drafters={"faulty": Faulty(fault, truth)}
    )
    engine = small.engine
    faulty = [
        engine.submit(Request(p, PARAMS, SpeculationConfig(method="faulty"))) for p in PROMPTS
    ]
    mates = [
        engine.submit(Request(p, PARAMS, SpeculationConfig(length="fixed", method="draft_model")))
        for p in PROMPTS
    ]
    while engine.has_work:
        engine.step()
    for session in (*faulty, *mates):
        assert session.error is None
        assert session.finish_reason == "length"
        assert session.output_ids == truth[tuple(session.token_ids[: session.prompt_length])]
    assert not any(session.stats.drafter_lost for session in mates)
    assert all(session.stats.drafter_lost == (fault in RAISING) for session in faulty) or (
        fault in NONSENSE
    )
    if fault in RAISING:
        assert all(session.stats.drafter_failures == 1 for session in faulty)
    small.assert_nothing_is_left()


class Remote(Drafter):
    """A drafter in another process; ``fault`` is what goes wrong in the third round."""

    elsewhere = True
    needs: frozenset[Need] = frozenset()

    def __init__(self, fault: str, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.local = Faulty(fault, truth)
        self.fault = fault
        self.rounds: dict[str, int] = {}
        self.opened = self.local.opened
        self.timers: list[threading.Timer] = []

    def open(self, session: Session) -> None:
        self.local.open(session)

    def close(self, session: Session) -> None:
        self.rounds.pop(session.session_id, None)
        self.local.close(session)

    def propose(
        self, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        return [self._one(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _one(self, session: Session, budget: Budget) -> Future[Draft]:
        count = self.rounds[session.session_id] = self.rounds.get(session.session_id, 0) + 1
        self.local.rounds = count
        if self.fault == "raises" and count >= 3:
            raise DrafterUnavailable("gone")
        future: Future[Draft] = Future()
        if self.fault == "future fails" and count >= 3:
            future.set_exception(DrafterUnavailable("gone"))
        elif self.fault == "future is cancelled" and count >= 3:
            future.cancel()
        elif self.fault == "late":
            timer = threading.Timer(0.002, future.set_result, [self.local.draft(session, budget)])
            self.timers.append(timer)
            timer.start()
        else:
            future.set_result(self.local.draft(session, budget))
        return future

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        self.local.observe(sessions, outcomes)


FAILING = ("open", "raises", "future fails", "future is cancelled", "observe")


@pytest.mark.parametrize("fault", [*FAILING, "late", "close", *NONSENSE[1:]])
def test_a_faulty_remote_drafter(fault: str, tiny_folder: Path, reference: Reference) -> None:
    truth = {tuple(prompt): reference(prompt, PARAMS) for prompt in PROMPTS}
    remote = Remote(fault, truth)
    small = small_engine(tiny_folder, catalogue=CATALOGUE, drafters={"faulty": remote})
    engine = small.engine
    faulty = [
        engine.submit(Request(p, PARAMS, SpeculationConfig(method="faulty"))) for p in PROMPTS
    ]
    mates = [
        engine.submit(Request(p, PARAMS, SpeculationConfig(length="fixed", method="draft_model")))
        for p in PROMPTS
    ]
    while engine.has_work:
        engine.step()
    for timer in remote.timers:
        timer.join()
    for session in (*faulty, *mates):
        assert session.error is None
        assert session.finish_reason == "length"
        assert session.output_ids == truth[tuple(session.token_ids[: session.prompt_length])]
    assert not any(session.stats.drafter_lost for session in mates)
    if fault in FAILING:
        assert all(session.stats.drafter_lost for session in faulty)
    if fault in ("late", "close"):
        assert not any(session.stats.drafter_lost for session in faulty)
        assert all(session.stats.num_accepted > 0 for session in faulty)
    small.assert_nothing_is_left()


def test_sessions_without_a_draft_do_not_hold_up_the_others(
    tiny_folder: Path, reference: Reference
) -> None:
    """A future that never completes: its session waits, all others are served."""
    never: list[Future[Draft]] = []

    class Silent(Remote):
        def _one(self, session: Session, budget: Budget) -> Future[Draft]:
            never.append(Future())
            return never[-1]

    small = small_engine(tiny_folder, catalogue=CATALOGUE, drafters={"faulty": Silent("", {})})
    waiting = small.engine.submit(Request(PROMPTS[0], PARAMS, SpeculationConfig(method="faulty")))
    other = small.engine.submit(
        Request(PROMPTS[1], PARAMS, SpeculationConfig(length="fixed", method="draft_model"))
    )
    while not other.finished:
        small.engine.step(0)
    assert other.output_ids == reference(PROMPTS[1], PARAMS)
    assert not waiting.output_ids
    started = time.perf_counter()
    assert small.engine.step(0.01) == []  # waits a little, not for ever
    assert time.perf_counter() - started < 5.0
    small.engine.cancel(waiting.session_id)
    assert all(future.cancelled() for future in never)
    small.assert_nothing_is_left()


def test_a_drafter_with_a_shorter_context(
    tiny_folder: Path, zoo: Path, reference: Reference
) -> None:
    """A session beyond the drafter's context continues without drafts; its mates keep theirs."""
    folder = make_model("llama_gqa", zoo, num_hidden_layers=2, max_position_embeddings=64)
    runner = LlamaRunner(folder)
    small = small_engine(tiny_folder, drafters={"draft_model": DraftModel(runner)})
    params = replace(PARAMS, max_tokens=40)
    prompts = [[65, 66, 67], [68] * 50, [69] * 100]
    sessions = small.engine.generate(
        prompts, params, SpeculationConfig(length="fixed", method="draft_model")
    )
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == reference(prompt, params)
        assert not session.stats.drafter_lost
    short, long, beyond = (session.stats.num_accepted for session in sessions)
    assert short > 25  # same weights: nearly everything is accepted
    assert 0 < long < short
    assert beyond == 0
    assert runner.num_free == runner.kv_capacity


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("vocab_size", [300, 240])
@pytest.mark.parametrize("method", ["draft_model", "speculative_sampling"])
def test_a_drafter_with_a_padded_or_shorter_vocabulary(
    vocab_size: int,
    method: str,
    told: bool,
    tiny_folder: Path,
    zoo: Path,
    reference: Reference,
) -> None:
    """Checkpoints of one family pad their embeddings differently; the tokenizer is the same.

    A drafter that was told the target's vocabulary drafts within it. One that was not may lose its
    drafts, but never a session.
    """
    runner = LlamaRunner(
        make_model("llama_gqa", zoo, num_hidden_layers=1, vocab_size=vocab_size, pad_token_id=0)
    )
    drafter = DraftModel(runner, VOCAB_SIZE) if told else DraftModel(runner)
    small = small_engine(tiny_folder, drafters={"draft_model": drafter})
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 230, 12).tolist() for _ in range(4)]
    params = replace(
        PARAMS, temperature=2.0, repetition_penalty=1.1, logit_bias={250: 1.0}, max_tokens=30
    )
    drafts: list[Draft] = []
    config = SpeculationConfig(length="fixed", method=method)
    sessions = [
        small.engine.submit(
            Request(p, params, config), on_event=lambda event: drafts.append(event.outcome.draft)
        )
        for p in prompts
    ]
    while small.engine.has_work:
        small.engine.step()
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.finish_reason == "length"
        if method == "draft_model":
            assert session.output_ids == reference(prompt, params)
        # A token of the target that the drafter lacks is nothing that it could go on from.
        assert not session.stats.drafter_lost or vocab_size < VOCAB_SIZE
    if told and vocab_size > VOCAB_SIZE:
        deepest = [draft.num_nodes for draft in drafts[:40]]
        assert min(deepest) == METHODS[method].defaults["num_speculative_tokens"], "one was dropped"
