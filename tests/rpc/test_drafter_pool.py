"""A pool of real DraftService servers: sessions spread, move, lose drafters and get others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.errors import DrafterUnavailable, InvalidArgument
from paceline.models.base import ModelRunner
from paceline.request import Request
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.drafter_places import REBALANCE_S
from paceline.rpc.drafter_pool import RETRY_S, DrafterPool
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Budget, Draft
from tests.rpc.drafter_process import Copycat
from tests.rpc.serving import DrafterProcess, eventually, serving
from tests.rpc.test_remote_drafter import PROMPTS, VOCAB_SIZE, ar, engine_with, session_of

DRAFTS = SpeculationConfig(method="draft_model", length="fixed")


class Batches(Copycat):
    """Remembers how many sessions each call had; may be slow, and may fail."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.sizes: list[int] = []
        self.fails = False
        self.gate: threading.Event | None = None

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self.sizes.append(len(sessions))
        if self.gate is not None:
            self.gate.wait(10)
        if self.fails:
            raise RuntimeError("this drafter is broken")
        time.sleep(self.sleep_s)
        return super().propose(sessions, budgets)


@contextmanager
def served(drafter: Any, **options: Any) -> Iterator[tuple[str, DraftServicer]]:
    servicer = DraftServicer(drafter, name="draft_model", vocab_size=VOCAB_SIZE, **options)
    with serving(drafter=servicer) as running:
        yield running.address, servicer
    assert servicer.num_sessions == 0  # none is left behind by a move


@contextmanager
def pool_of(*addresses: str, **options: Any) -> Iterator[DrafterPool]:
    with DrafterPool(addresses, vocab_size=VOCAB_SIZE, **options) as pool:
        assert eventually(lambda: len(pool.connected) == len(addresses))
        yield pool


def own(pool: DrafterPool) -> dict[str, int]:
    return {each["address"]: each["sessions"] for each in pool.describe()}


def ask(pool: DrafterPool, sessions: Sequence[Session]) -> list[Draft]:
    """One round: drafts, and a token for each session."""
    futures: Any = pool.propose(sessions, [Budget(2, 2)] * len(sessions))
    drafts = [future.result(10) for future in futures]
    for session in sessions:
        session.token_ids.append(1)
    return drafts


def rounds(pool: DrafterPool, sessions: Sequence[Session], until: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not until():
        if time.monotonic() > end:
            return False
        assert all(draft.num_nodes for draft in ask(pool, sessions))
        time.sleep(0.005)
    return True


# --- a target's sessions on several drafters -----------------------------------------------------


def test_sessions_spread_over_drafters_and_keep_the_tokens(
    runner: ModelRunner, draft_runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with (
        served(DraftModel(draft_runner)) as (first, _),
        served(Copycat()) as (second, _),
        pool_of(first, second) as pool,
        engine_with(runner, pool) as engine,  # type: ignore[arg-type]
    ):
        sessions = [engine.submit(Request(prompt, params, DRAFTS)) for prompt in PROMPTS]
        while not all(session.stats.num_rounds for session in sessions):
            engine.step()
        assert own(pool) == {first: 2, second: 2}
        assert all(pool.location(s.session_id)[1] for s in sessions)
        while engine.has_work:
            engine.step()
        assert {pool.location(s.session_id)[0] for s in sessions} == {first, second}
        assert sum(own(pool).values()) == 0
        assert pool.counters.num_frames > 0
    assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
    assert not any(s.stats.drafter_failures for s in sessions)


def test_a_drafter_that_joins_takes_open_sessions() -> None:
    with served(Batches(0.01)) as (first, one), served(Batches(0.01)) as (second, two):
        sessions = [session_of(prompt, f"s{i}") for i, prompt in enumerate(PROMPTS)]
        with pool_of(first) as pool:
            assert rounds(pool, sessions, lambda: min(s.length for s in sessions) > 30)
            pool.use([first, second])
            assert rounds(pool, sessions, lambda: own(pool)[second] >= 1)
            assert eventually(lambda: one.num_sessions + two.num_sessions == len(sessions))
            assert two.num_sessions == own(pool)[second]
            for session in sessions:
                pool.close(session)
            assert eventually(lambda: one.num_sessions + two.num_sessions == 0)


def test_a_slow_drafter_loses_its_sessions() -> None:
    """Each frame waits at the slow one: measured, not told."""
    quick, slow = Batches(), Batches()
    with served(quick) as (first, _), served(slow) as (second, _), pool_of(first, second) as pool:
        sessions = [session_of([1], f"s{i}") for i in range(4)]
        ask(pool, sessions)
        assert own(pool) == {first: 2, second: 2}
        slow.sleep_s = 0.1
        started = time.monotonic()
        assert rounds(pool, sessions, lambda: own(pool)[second] == 0), pool.describe()
        assert time.monotonic() - started < 14 * REBALANCE_S
        for session in sessions:
            pool.close(session)


def test_a_drafter_that_leaves_gives_its_sessions_away() -> None:
    with (
        served(Batches()) as (first, _),
        served(Batches()) as (second, two),
        pool_of(first, second) as pool,
    ):
        sessions = [session_of([1], f"s{i}") for i in range(4)]
        ask(pool, sessions)
        before = pool.counters.num_frames
        pool.use([first])
        assert all(draft.num_nodes for draft in ask(pool, sessions))
        assert own(pool) == {first: 4}
        assert eventually(lambda: two.num_sessions == 0)
        assert pool.counters.num_frames > before  # what the other one did still counts


def test_a_draft_whose_drafter_dies_comes_from_another() -> None:
    sleepy = DrafterProcess("--sleep", "1")
    with sleepy as process, served(Batches()) as (address, _), pool_of(process.address) as pool:
        pool.use([process.address, address])
        assert eventually(lambda: len(pool.connected) == 2)
        session = session_of([1, 2, 3])
        pool._places.of["s"] = process.address
        (future,) = pool.propose([session], [Budget(2, 2)])
        time.sleep(0.1)
        process.kill()
        assert future.result(5).num_nodes == 2
        assert pool.location("s")[0] == address


def test_sessions_get_drafts_again_when_a_drafter_is_back(runner: ModelRunner) -> None:
    """The only one dies: AR, until there is another; one failure for each session, no more."""
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    with ExitStack() as stack:
        process = stack.enter_context(DrafterProcess())
        heir, _ = stack.enter_context(served(Copycat()))
        pool = stack.enter_context(pool_of(process.address))
        engine = stack.enter_context(engine_with(runner, pool))  # type: ignore[arg-type]
        sessions = [engine.submit(Request(prompt, params, DRAFTS)) for prompt in PROMPTS[:2]]
        while min(s.stats.num_rounds for s in sessions) < 5:
            engine.step()
        process.kill()
        assert eventually(lambda: not pool.connected)
        before = [s.stats.num_rounds for s in sessions]
        while min(s.stats.num_rounds for s in sessions) < max(before) + 10:
            engine.step()
        nodes = [s.stats.num_draft_nodes for s in sessions]
        assert all(s.stats.drafter_lost for s in sessions)
        pool.use([heir])
        assert eventually(lambda: pool.connected == [heir])
        time.sleep(RETRY_S)  # the small model may be done before the sessions ask again
        while engine.has_work:
            engine.step()
        assert all(s.stats.num_draft_nodes > n for s, n in zip(sessions, nodes, strict=True))
        assert [s.stats.drafter_failures for s in sessions] == [1, 1]
        assert [s.output_ids for s in sessions] == ar(runner, PROMPTS[:2], params)


def test_a_broken_drafter_costs_a_round_and_not_each_of_them() -> None:
    broken, other = Batches(), Batches()
    with served(broken) as (first, _), pool_of(first) as pool:
        session = session_of([1, 2, 3])
        broken.fails = True
        (future,) = pool.propose([session], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable):
            future.result(5)
        asked = len(broken.sizes)
        for _ in range(5):
            assert ask(pool, [session])[0].num_nodes == 0
        assert len(broken.sizes) == asked
        with served(other) as (second, _):
            pool.use([first, second])
            assert eventually(lambda: len(pool.connected) == 2)

            def drafts() -> bool:
                (future,) = pool.propose([session], [Budget(2, 2)])
                return future.exception(5) is None and future.result().num_nodes == 2

            assert eventually(drafts)
            pool.close(session)


def test_a_method_that_drafters_refuse_is_refused_for_good(runner: ModelRunner) -> None:
    with served(Copycat()) as (first, _), pool_of(first) as pool:
        (future,) = pool.propose([session_of([1], method="prompt_lookup")], [Budget(2, 2)])
        with pytest.raises(InvalidArgument, match="one that this drafter serves"):
            future.result(5)


def test_a_pool_without_drafters_does_not_hold_up_an_engine(runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with DrafterPool(vocab_size=VOCAB_SIZE) as pool:
        assert not pool.wait_ready(0.05)
        engine = Engine(ModelTarget(runner), {"draft_model": pool})
        sessions = engine.generate(PROMPTS, params, DRAFTS)
        assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
        assert all(s.stats.drafter_failures == 1 for s in sessions)
        assert pool.counters.num_refused >= len(PROMPTS)


def test_stop_ends_everything() -> None:
    with served(Copycat()) as (first, servicer):
        pool = DrafterPool([first], vocab_size=VOCAB_SIZE)
        assert pool.wait_ready(5)
        ask(pool, [session_of([1])])
        assert servicer.num_sessions == 1
        pool.stop()
        assert eventually(lambda: servicer.num_sessions == 0)
        assert pool.connected == []
        pool.stop()


# --- a drafter's targets share its forwards ------------------------------------------------------


@contextmanager
def targets(address: str, count: int) -> Iterator[list[RemoteDrafter]]:
    with ExitStack() as stack:
        remotes = [
            stack.enter_context(RemoteDrafter(address, vocab_size=VOCAB_SIZE, deadline_s=5))
            for _ in range(count)
        ]
        assert all(remote.wait_ready(5) for remote in remotes)
        yield remotes


def test_frames_of_several_targets_share_a_forward() -> None:
    """Those that arrive while the drafter computes wait for one forward, not for one each."""
    drafter = Batches()
    with served(drafter) as (address, _), targets(address, 5) as remotes:
        drafter.gate = threading.Event()
        futures: list[Future[Draft]] = []
        for i, remote in enumerate(remotes):
            session = session_of([i + 1], "same")
            futures += remote.propose([session], [Budget(2, 2)])
            if not i:
                assert eventually(lambda: drafter.sizes == [1])
        time.sleep(0.2)  # until all frames are there
        drafter.gate.set()
        drafts = [future.result(5) for future in futures]
        assert [int(draft.token_ids[0]) for draft in drafts] == [1, 2, 3, 4, 5]
        assert drafter.sizes == [1, 4]
        assert {remote.load.sessions for remote in remotes[1:]} == {5}


def test_frames_of_one_target_that_wait_share_a_forward_and_keep_their_order() -> None:
    """Its sessions need not be in step; frames that name one session come one after the other."""
    shared = []
    for _ in range(5):  # on a busy machine frames may come apart
        drafter = Batches()
        with served(drafter) as (address, servicer), targets(address, 1) as (remote,):
            drafter.gate = threading.Event()
            sessions = [session_of([i + 1], f"s{i}") for i in range(4)]
            futures = [remote.propose([session], [Budget(2, 2)])[0] for session in sessions]
            assert eventually(lambda: drafter.sizes == [1])  # noqa: B023  # called at once
            time.sleep(0.2)
            sessions[3].token_ids.append(9)
            futures += remote.propose([sessions[3]], [Budget(2, 2)])
            remote.close(sessions[1])
            time.sleep(0.1)
            drafter.gate.set()
            drafts = [future.result(5) for future in futures]
            assert [int(draft.token_ids[0]) for draft in drafts] == [1, 2, 3, 4, 9]
            assert drafter.sizes[0] == drafter.sizes[-1] == 1
            assert sum(drafter.sizes) == 5
            assert eventually(lambda: servicer.num_sessions == 3)
        shared.append(max(drafter.sizes) > 1)
        if shared[-1]:
            break
    assert shared[-1]


def test_a_target_at_fault_does_not_take_the_others_along_for_long() -> None:
    class Allergic(Batches):
        def propose(self, sessions: Any, budgets: Any) -> list[Draft]:
            drafts = super().propose(sessions, budgets)
            if any(session.token_ids[0] == 13 for session in sessions):
                raise RuntimeError("this session is not to my taste")
            return drafts

    drafter = Allergic()
    with served(drafter) as (address, _), targets(address, 3) as remotes:
        for turn in range(2):
            drafter.gate = threading.Event()
            futures: list[Future[Draft]] = []
            for i, remote in enumerate(remotes):
                futures += remote.propose(
                    [session_of([13 if i == 1 else 1, turn], f"{turn}-{i}")], [Budget(2, 2)]
                )
                if not i:
                    assert eventually(lambda: bool(drafter.sizes))
            time.sleep(0.2)
            drafter.gate.set()
            failed = [future.exception(5) is not None for future in futures]
            assert failed == ([False, True, True] if not turn else [False, True, False])
            drafter.sizes.clear()


def test_a_target_that_goes_away_leaves_the_batch() -> None:
    drafter = Batches()
    with served(drafter) as (address, servicer), targets(address, 3) as remotes:
        drafter.gate = threading.Event()
        futures: list[Future[Draft]] = []
        for i, remote in enumerate(remotes):
            futures += remote.propose([session_of([i + 1], f"s{i}")], [Budget(2, 2)])
            if not i:
                assert eventually(lambda: drafter.sizes == [1])
        time.sleep(0.2)
        remotes[1].stop()
        drafter.gate.set()
        assert futures[0].result(5).num_nodes == futures[2].result(5).num_nodes == 2
        assert isinstance(futures[1].exception(5), DrafterUnavailable)
        assert eventually(lambda: servicer.num_sessions == 2)
