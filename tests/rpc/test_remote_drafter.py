"""DraftService and RemoteDrafter: a drafter in another process, and everything that ends it."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import (
    DrafterUnavailable,
    InvalidArgument,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.models.base import ModelRunner
from paceline.plan import resolve
from paceline.profile import LoadCosts, find_profile
from paceline.request import Request
from paceline.rpc.client import Client
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.errors import PrefixDiverged, from_rpc_error, from_status
from paceline.rpc.gen.paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.rpc.mirrors import Mirrors, served_with
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tree import accepted_path, path_to
from paceline.types import Budget, Draft, Need, ShadowDraft
from tests.masked import masked_drafter
from tests.modelzoo import make_model
from tests.rpc.drafter_process import Copycat
from tests.rpc.recording import Recording
from tests.rpc.serving import DrafterProcess, eventually, serving
from tests.rpc.test_schema import TREES

PROMPTS = [list(f"value_{i} = {i} * ".encode()) for i in range(4)]
VOCAB_SIZE = 258


@pytest.fixture
def servicer(draft_runner: ModelRunner) -> Recording:
    return Recording(DraftModel(draft_runner), name="draft_model", vocab_size=VOCAB_SIZE)


@pytest.fixture
def drafter_server(servicer: Recording, draft_runner: ModelRunner) -> Iterator[RpcServer]:
    with serving(drafter=servicer) as running:
        yield running
    assert servicer.num_sessions == 0
    assert draft_runner.num_free == draft_runner.kv_capacity


@contextmanager
def engine_with(
    runner: ModelRunner, remote: RemoteDrafter, limits: EngineLimits | None = None
) -> Iterator[Engine]:
    engine = Engine(ModelTarget(runner), {"draft_model": remote}, limits=limits)
    try:
        yield engine
    finally:  # a test that failed leaves nothing to the ones after it
        left = list(engine.sessions)
        for session_id in left:
            engine.cancel(session_id)
    assert not left
    assert runner.num_free == runner.kv_capacity


@contextmanager
def connected(
    address: str, vocab_size: int = VOCAB_SIZE, **options: Any
) -> Iterator[RemoteDrafter]:
    with RemoteDrafter(address, vocab_size=vocab_size, **options) as remote:
        assert remote.wait_ready(5)
        yield remote


def ar(runner: ModelRunner, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    sessions = Engine(ModelTarget(runner)).generate(prompts, params, SpeculationConfig(method="ar"))
    return [session.output_ids for session in sessions]


def session_of(tokens: list[int], name: str = "s", method: str = "draft_model") -> Session:
    return Session(name, tokens, SamplingParams(), resolve(SpeculationConfig(method=method)))


# --- the same drafts from afar -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["draft_model", "draft_model_tree", "speculative_sampling"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_remote_drafter_is_a_local_one(
    runner: ModelRunner,
    tmp_path_factory: pytest.TempPathFactory,
    drafter_server: RpcServer,
    draft_runner: ModelRunner,
    method: str,
    temperature: float,
) -> None:
    """Same tokens, and token for token the same drafts: the mirror misses nothing."""
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=8)
    speculation = SpeculationConfig(method=method, length="fixed")
    local = Engine(ModelTarget(runner), {"draft_model": DraftModel(draft_runner)})
    expected = local.generate(PROMPTS, params, speculation)
    with connected(drafter_server.address) as remote, engine_with(runner, remote) as engine:
        got = engine.generate(PROMPTS, params, speculation)
    for here, there in zip(expected, got, strict=True):
        assert there.output_ids == here.output_ids
        assert there.stats.accepted_by_depth == here.stats.accepted_by_depth
        assert there.stats.num_draft_nodes == here.stats.num_draft_nodes > 0
        assert not there.stats.drafter_lost
    if method != "speculative_sampling":
        assert [s.output_ids for s in got] == ar(runner, PROMPTS, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_remote_masked_model_is_a_local_one(runner: ModelRunner, temperature: float) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=8)
    speculation = SpeculationConfig(method="diffuspec", length="fixed")
    local = Engine(ModelTarget(runner), {"diffuspec": masked_drafter(VOCAB_SIZE)})
    expected = local.generate(PROMPTS, params, speculation)
    hosted = DraftServicer(masked_drafter(VOCAB_SIZE), name="diffuspec", vocab_size=VOCAB_SIZE)
    with serving(drafter=hosted) as server, connected(server.address) as remote:
        engine = Engine(ModelTarget(runner), {"diffuspec": remote})
        got = engine.generate(PROMPTS, params, speculation)
    for here, there in zip(expected, got, strict=True):
        assert there.output_ids == here.output_ids
        assert there.stats.accepted_by_depth == here.stats.accepted_by_depth
        assert there.stats.num_draft_nodes == here.stats.num_draft_nodes > 0
        assert not there.stats.drafter_lost
    assert [s.output_ids for s in got] == ar(runner, PROMPTS, params)


def test_one_frame_a_step_with_unseen_tokens_only(
    runner: ModelRunner, drafter_server: RpcServer, servicer: Recording
) -> None:
    params = SamplingParams(max_tokens=24)
    with connected(drafter_server.address) as remote, engine_with(runner, remote) as engine:
        calls: list[int] = []
        propose = remote.propose

        def counted(sessions: Any, budgets: Any) -> Any:
            calls.append(sum(min(b.depth, b.nodes) > 0 for b in budgets))
            return propose(sessions, budgets)

        remote.propose = counted  # type: ignore[method-assign]
        sessions = engine.generate(PROMPTS, params, SpeculationConfig(length="fixed"))
        assert eventually(lambda: servicer.num_sessions == 0)  # closed with their sessions
        counters = remote.counters
    depth = METHODS["draft_model"].defaults["num_speculative_tokens"]
    items: dict[str, list[draft_pb2.ProposeItem]] = {s.session_id: [] for s in sessions}
    asking = [f for f in servicer.frames if any(i.max_depth for i in f.items)]
    for frame in servicer.frames:
        for item in frame.items:
            items[item.session_id].append(item)
    assert [len(frame.items) for frame in asking] == [count for count in calls if count]
    assert max(calls) == len(PROMPTS)
    ahead_only = len(asking) - counters.num_frames  # all of whose drafts were here already
    assert 0 <= ahead_only <= counters.num_ahead
    assert counters.wait_seconds > counters.draft_seconds > 0
    for session in sessions:
        first, *later, last = items[session.session_id]
        assert first.HasField("open")
        assert last.close
        told = list(first.new_token_ids)
        for item in later:
            assert not item.HasField("open")
            assert item.base_length == len(told)  # never a token twice
            told += item.new_token_ids
            assert len(item.new_token_ids) <= 1 + depth
        assert told == session.token_ids[: len(told)]


def test_generate_over_two_processes(runner: ModelRunner) -> None:
    """Target here, drafter there, and the reply says which processes took part."""
    with DrafterProcess() as process, connected(process.address) as remote:
        thread = EngineThread(Engine(ModelTarget(runner), {"draft_model": remote})).start()
        with serving(engine=thread) as running, Client(running.address) as client:
            params = SamplingParams(max_tokens=24)
            done = client.complete(PROMPTS[0], params, SpeculationConfig(length="fixed"))
        thread.stop()
        assert list(done.token_ids) == ar(runner, PROMPTS[:1], params)[0]
        assert done.last.drafter_pid == process.pid != done.last.target_pid
        assert done.last.drafter_address == process.address
        assert done.statistics.num_draft_nodes > 0


def test_two_targets_may_use_the_same_session_ids(
    drafter_server: RpcServer, servicer: Recording
) -> None:
    session = session_of(PROMPTS[0], "same")
    with connected(drafter_server.address) as one, connected(drafter_server.address) as two:
        for remote in (one, two):
            (future,) = remote.propose([session], [Budget(2, 2)])
            assert future.result(5).num_nodes == 2
        assert servicer.num_sessions == 2
        one.stop()
        assert eventually(lambda: servicer.num_sessions == 1)
        (future,) = two.propose([session], [Budget(2, 2)])
        assert future.result(5).num_nodes == 2


def test_a_stop_rule_learns_where_the_drafts_are_made(
    runner: ModelRunner, drafter_server: RpcServer, servicer: Recording
) -> None:
    """TapOut's bandit sees the tokens' distributions, and all sessions of the drafter teach it."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config = SpeculationConfig(method="tapout", length_min=1, length="tapout")
    with connected(drafter_server.address) as remote, engine_with(runner, remote) as engine:
        sessions = engine.generate(PROMPTS, params, config)
        assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
        rounds = sum(s.stats.num_rounds for s in sessions)
    (rule,) = {
        id(bandit): bandit
        for key, bandit in servicer._host.length_context._shared.items()
        if key[0] == "tapout"
    }.values()
    # The last round of a session brings no more news to its drafter.
    assert len(PROMPTS) < sum(rule.counts) <= rounds
    assert max(rule.counts) > 1


# --- a drafter that forgets, lags, dies ----------------------------------------------------------


def test_a_lost_session_is_opened_again(
    runner: ModelRunner, drafter_server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter forgets everything after each frame; only the counters show it."""
    answer = Mirrors.answer

    def forgetful(self: Mirrors, items: Any) -> Any:
        results = answer(self, items)
        self.close()
        return results

    monkeypatch.setattr(Mirrors, "answer", forgetful)
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    with connected(drafter_server.address) as remote, engine_with(runner, remote) as engine:
        sessions = engine.generate(PROMPTS, params)
        assert remote.counters.num_reopened >= len(PROMPTS)
    assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
    assert not any(s.stats.drafter_failures for s in sessions)


def test_a_drafter_that_dies_mid_stream(runner: ModelRunner) -> None:
    """Its sessions go on as AR and say so; later ones use the drafter that took its place."""
    params = SamplingParams(max_tokens=120)
    heir = DraftServicer(Copycat(), name="draft_model", vocab_size=VOCAB_SIZE)
    with (
        DrafterProcess() as first,
        serving(drafter=heir) as second,
        contextlib.ExitStack() as stack,
    ):
        address = first.address
        remote = stack.enter_context(RemoteDrafter(lambda: address, vocab_size=VOCAB_SIZE))
        assert remote.wait_ready(5)
        assert remote.pid == first.pid
        engine = stack.enter_context(engine_with(runner, remote))
        drafts = SpeculationConfig(length="fixed")
        sessions = [engine.submit(Request(prompt, params, drafts)) for prompt in PROMPTS]
        while min(s.stats.num_rounds for s in sessions) < 3:
            engine.step()
        address = second.address
        first.kill()
        started = time.monotonic()
        while not all(s.finished for s in sessions):
            engine.step()
        assert time.monotonic() - started < 5
        assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
        for session in sessions:
            assert session.stats.drafter_lost
            assert session.stats.drafter_failures == 1
            assert session.stats.num_draft_nodes > 0

        assert remote.wait_ready(5)
        (later,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=8), drafts)
        assert not later.stats.drafter_lost
        assert later.stats.num_draft_nodes > 0
        assert remote.address == second.address
        assert remote.counters.num_connections == 2


def test_death_is_noticed_at_once() -> None:
    """A draft under way fails with the connection, long before its deadline."""
    sleepy = DrafterProcess("--sleep", "30")
    with sleepy as process, connected(process.address, deadline_s=60.0) as remote:
        (future,) = remote.propose([session_of(PROMPTS[0])], [Budget(2, 2)])
        time.sleep(0.1)
        process.kill()
        started = time.monotonic()
        with pytest.raises(DrafterUnavailable):
            future.result(5)
        assert time.monotonic() - started < 1
        assert eventually(lambda: not remote.connected)
        (future,) = remote.propose([session_of(PROMPTS[0])], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable, match="no drafter"):
            future.result(0)


def test_a_drafter_that_hangs_and_comes_back() -> None:
    """A late draft is a failure; no session waits for that drafter until the answer arrives."""
    with DrafterProcess() as process, connected(process.address, deadline_s=0.3) as remote:
        process.signal(signal.SIGSTOP)
        started = time.monotonic()
        (late,) = remote.propose([session_of(PROMPTS[0], "a")], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable, match=r"no draft within 0\.3 s"):
            late.result(5)
        assert 0.3 <= time.monotonic() - started < 1

        (refused,) = remote.propose([session_of(PROMPTS[1], "b")], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable, match="owes"):
            refused.result(0)  # at once
        assert remote.counters.num_late == 1

        process.signal(signal.SIGCONT)
        session = session_of(PROMPTS[2], "c")

        def works() -> bool:
            (future,) = remote.propose([session], [Budget(2, 2)])
            return future.exception(5) is None

        assert eventually(works, 2)
        assert remote.counters.num_connections == 1


def test_a_drafter_that_hangs_for_good_is_given_up() -> None:
    with DrafterProcess() as process, connected(process.address, deadline_s=0.1) as remote:
        process.signal(signal.SIGSTOP)
        (late,) = remote.propose([session_of(PROMPTS[0])], [Budget(2, 2)])
        assert eventually(lambda: not remote.connected, 2)
        with pytest.raises(DrafterUnavailable):
            late.result(0)


def test_without_any_drafter_sessions_are_ar_at_once(runner: ModelRunner) -> None:
    calls = 0

    def resolve_address() -> str:
        nonlocal calls
        calls += 1
        raise LookupError("no replica yet")

    params = SamplingParams(max_tokens=8)
    with RemoteDrafter(resolve_address, vocab_size=VOCAB_SIZE) as remote:
        assert not remote.wait_ready(0.2)
        with engine_with(runner, remote) as engine:
            started = time.monotonic()
            (session,) = engine.generate(PROMPTS[:1], params)
            assert time.monotonic() - started < 1
        assert calls >= 2  # it keeps trying
    assert session.output_ids == ar(runner, PROMPTS[:1], params)[0]
    assert session.stats.drafter_lost


def test_stop_is_quick_and_leaves_no_threads() -> None:
    import threading

    servicer = DraftServicer(Copycat(), name=None, vocab_size=9)
    with serving(drafter=servicer) as running:
        remotes = [
            RemoteDrafter(running.address, vocab_size=9),
            RemoteDrafter("127.0.0.1:1", vocab_size=9),
        ]
        assert remotes[0].wait_ready(5)
        started = time.monotonic()
        for remote in remotes:
            remote.stop()
        assert time.monotonic() - started < 2
        assert not [t for t in threading.enumerate() if t.name.startswith("remote-drafter")]


def test_drafts_that_do_not_fit_the_target_are_refused() -> None:
    """The drafter's vocabulary is larger than the target's: its tokens must not get through."""
    servicer = DraftServicer(Copycat(), name=None, vocab_size=1000)
    with serving(drafter=servicer) as running, connected(running.address, vocab_size=100) as remote:
        (future,) = remote.propose([session_of([1, 500])], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable, match="500"):
            future.result(5)


def test_too_many_sessions_are_ar(runner: ModelRunner, draft_runner: ModelRunner) -> None:
    servicer = DraftServicer(
        DraftModel(draft_runner), name="draft_model", vocab_size=VOCAB_SIZE, max_sessions=3
    )
    params = SamplingParams(max_tokens=12)
    with (
        serving(drafter=servicer) as running,
        connected(running.address) as remote,
        engine_with(runner, remote) as engine,
    ):
        sessions = engine.generate(PROMPTS, params)
    assert [s.output_ids for s in sessions] == ar(runner, PROMPTS, params)
    assert [s.stats.drafter_lost for s in sessions] == [False, False, False, True]


def test_one_failing_batch_does_not_end_the_stream(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    class Fragile(Copycat):
        fail = True

        def propose(self, sessions: Any, budgets: Any) -> list[Draft]:
            if self.fail:
                raise ZeroDivisionError("secret")
            return super().propose(sessions, budgets)

    fragile = Fragile()
    servicer = DraftServicer(fragile, name=None, vocab_size=VOCAB_SIZE)
    with serving(drafter=servicer) as running, connected(running.address) as remote:
        (future,) = remote.propose([session_of([1, 2])], [Budget(2, 2)])
        with pytest.raises(DrafterUnavailable, match="internal error") as caught:
            future.result(5)
        assert "secret" not in str(caught.value)
        assert servicer.num_sessions == 0  # its state is unknown: forgotten
        fragile.fail = False
        (future,) = remote.propose([session_of([1, 2])], [Budget(2, 2)])
        assert future.result(5).token_ids.tolist() == [2, 2]
        assert remote.counters.num_connections == 1


def test_sessions_that_outgrow_the_drafter_get_empty_drafts() -> None:
    servicer = DraftServicer(Copycat(), name=None, vocab_size=9, context_length=6)
    with serving(drafter=servicer) as running, connected(running.address, vocab_size=9) as remote:
        for length, nodes in ((3, 3), (4, 2), (6, 0), (8, 0)):
            session = session_of([1] * length, f"s{length}")
            (future,) = remote.propose([session], [Budget(3, 3)])
            assert future.result(5).num_nodes == nodes


def test_a_truncated_session_is_followed(drafter_server: RpcServer) -> None:
    with connected(drafter_server.address) as remote:

        def draft(session: Session) -> list[int]:
            (future,) = remote.propose([session], [Budget(3, 3)])
            return [int(token) for token in future.result(5).token_ids]

        session = session_of(list(PROMPTS[0]))
        before = draft(session)
        session.token_ids += before
        draft(session)
        session.truncate(len(PROMPTS[0]))
        assert draft(session) == before
        assert remote.counters.num_reopened == 0


def test_an_answer_of_the_wrong_shape_fails_and_hangs_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Confused(Mirrors):
        def answer(self, items: Any) -> Any:
            return super().answer(items)[1:]

    monkeypatch.setattr("paceline.rpc.draft_service.Mirrors", Confused)
    servicer = DraftServicer(Copycat(), name=None, vocab_size=VOCAB_SIZE)
    with serving(drafter=servicer) as running, connected(running.address) as remote:
        sessions = [session_of([1], "first"), session_of([2], "second")]
        futures = remote.propose(sessions, [Budget(2, 2)] * 2)
        for future in futures:
            future.exception(5)  # a draft or an error, but soon
        assert isinstance(futures[1].exception(), DrafterUnavailable)


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_made_ahead_is_there_before_it_is_asked_for(
    drafter_server: RpcServer, right: bool
) -> None:
    with connected(drafter_server.address) as remote:
        session = session_of(PROMPTS[0])
        (future,) = remote.propose([session], [Budget(3, 3)])
        future.result(5)
        connection = remote._connection
        assert connection is not None
        assert eventually(lambda: session.session_id in connection.ahead)
        expected = connection.ahead[session.session_id]
        (path,) = [path_to(expected.draft.parent_indices, 3)]  # three tokens, and the target's own
        *accepted, own = expected.draft.token_ids[list(path)].tolist()
        session.token_ids += [*accepted, own ^ (not right)]
        (future,) = remote.propose([session], [Budget(3, 3)])
        assert (remote.counters.num_ahead, future.done()) == (int(right), right)
        here = future.result(5).token_ids.tolist()
        # What a drafter makes of these tokens without a guess.
        fresh = session_of(list(session.token_ids), "fresh")
        (future,) = remote.propose([fresh], [Budget(3, 3)])
        assert here == future.result(5).token_ids.tolist()
        for each in (session, fresh):
            remote.close(each)


def test_nothing_is_drafted_ahead_of_a_shadow_draft(
    drafter_server: RpcServer, servicer: Recording
) -> None:
    """It comes as any other draft, and a later frame tells the drafter what became of it."""
    with connected(drafter_server.address) as remote:
        session = session_of(PROMPTS[0])
        shadow = ShadowDraft(session.length, Budget(3, 3))
        (future,) = remote.propose([session], [Budget(0, 0, shadow=shadow)])
        future.add_done_callback(shadow.arrived)
        drafted = future.result(5).token_ids.tolist()
        assert eventually(lambda: shadow.draft is not None)
        session.token_ids += [*drafted, 7, 8]
        (future,) = remote.propose([session], [Budget(3, 3)])
        assert future.result(5).num_nodes == 3
        told = [item.shadow for frame in servicer.frames for item in frame.items]
        assert told == [True, False]
        assert remote.counters.num_ahead == 0
        remote.close(session)


def test_a_shadow_draft_that_never_comes_is_forgotten() -> None:
    shadow = ShadowDraft(4, Budget(3, 3))
    failed: Future[Draft] = Future()
    failed.set_exception(DrafterUnavailable("gone"))
    shadow.arrived(failed)
    assert shadow.failed
    assert shadow.draft is None


@pytest.fixture
def measure(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> LoadCosts:
    """What finds the costs of a model's forwards, in a cache of its own."""
    monkeypatch.setenv("PACELINE_MEASURE", "on")
    measure = load_engine(make_model("llama", tmp_path / "model")).length_context.measure
    assert isinstance(measure, LoadCosts)
    return measure


def test_costs_of_drafts_from_elsewhere_are_measured_with_the_way_there(
    measure: LoadCosts, drafter_server: RpcServer
) -> None:
    with connected(drafter_server.address) as remote:
        measure.remote = remote
        profile = measure()
        assert profile is not None
        assert "draft_model" in profile.methods
        assert 0 < profile.draft(1, 1) <= profile.draft(4, 1) < 1
        assert measure() is profile  # once
        assert remote.counters.num_ahead == 0  # drafts made ahead would show no cost
    kept = find_profile(profile.key)
    assert kept is not None
    assert not kept.methods  # the next drafter may live elsewhere


def test_without_a_drafter_that_answers_its_costs_are_learnt(measure: LoadCosts) -> None:
    with RemoteDrafter("127.0.0.1:1", vocab_size=VOCAB_SIZE) as remote:
        measure.remote = remote
        profile = measure()
    assert profile is not None
    assert not profile.methods


# --- the mirror ----------------------------------------------------------------------------------


@given(TREES)
def test_accepted_path_is_found_in_the_draft(tree: tuple[list[int], list[int]]) -> None:
    """For every node: the tokens of its path and one more lead back to a path of those tokens."""
    draft = Draft(np.asarray(tree[0], np.int64), np.asarray(tree[1], np.int32))
    for node in range(-1, draft.num_nodes):
        path = path_to(draft.parent_indices, node)
        tokens = [int(draft.token_ids[n]) for n in path]
        found = accepted_path(draft, [*tokens, 999])
        # Of siblings with one token the first is taken, as acceptance does; below it the tree
        # may differ, so the tokens can end sooner.
        assert [int(draft.token_ids[n]) for n in found] == tokens[: len(found)]
        parents = [int(draft.parent_indices[n]) for n in found]
        assert parents == [-1, *found][: len(found)]
        siblings = list(zip(tree[0], tree[1], strict=True))
        if len(set(siblings)) == len(siblings):
            assert found == path


def test_accepted_path_leaves_the_targets_token() -> None:
    draft = Draft.chain([1, 2, 3])
    assert accepted_path(draft, []) == ()
    assert accepted_path(draft, [1]) == ()
    assert accepted_path(draft, [1, 2]) == (0,)
    assert accepted_path(draft, [1, 2, 3, 4, 5, 6]) == (0, 1, 2)
    assert accepted_path(draft, [2, 2]) == ()


# --- unary calls ---------------------------------------------------------------------------------


@pytest.fixture
def stub(drafter_server: RpcServer) -> Iterator[Any]:
    with grpc.insecure_channel(drafter_server.address) as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)


def test_unary_drafting(stub: Any, servicer: Recording, drafter_server: RpcServer) -> None:
    opened = stub.Open(draft_pb2.OpenDraftRequest(token_ids=PROMPTS[0]))
    assert len(opened.session_id) >= 22
    ask = draft_pb2.ProposeItem(
        session_id=opened.session_id, base_length=len(PROMPTS[0]), max_depth=3, max_nodes=3
    )
    draft = stub.ProposeOne(ask)
    assert len(draft.token_ids) == 3

    news = draft_pb2.ProposeItem(
        session_id=opened.session_id,
        base_length=len(PROMPTS[0]),
        new_token_ids=[*draft.token_ids[:2], 65],
    )
    assert stub.Observe(news).committed_length == len(PROMPTS[0]) + 3
    ask.base_length += 3
    again = stub.ProposeOne(ask)

    # The drafter that watched and one that never did agree.
    fresh = [*PROMPTS[0], *draft.token_ids[:2], 65]
    with connected(drafter_server.address) as remote:
        (future,) = remote.propose([session_of(fresh)], [Budget(3, 3)])
        assert future.result(5).token_ids.tolist() == list(again.token_ids)

    assert stub.ProposeOne(ask) == again  # the answer was lost, say
    ask.max_depth = 2
    assert list(stub.ProposeOne(ask).token_ids) == list(again.token_ids[:2])

    ask.base_length += 1
    with pytest.raises(grpc.RpcError) as caught:
        stub.ProposeOne(ask)
    assert isinstance(from_rpc_error(caught.value), PrefixDiverged)

    stub.Close(draft_pb2.CloseDraftRequest(session_id=opened.session_id))
    stub.Close(draft_pb2.CloseDraftRequest(session_id=opened.session_id))
    with pytest.raises(grpc.RpcError) as caught:
        stub.ProposeOne(ask)
    assert isinstance(from_rpc_error(caught.value), SessionNotFound)
    assert servicer.num_sessions == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "new_token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, "new_token_ids[0]"),
        ({"token_ids": [1], "speculation": {"method": "telepathy"}}, "method"),
        ({"token_ids": [1], "speculation": {"method": "prompt_lookup"}}, "method"),
        ({"token_ids": [1], "sampling": {"temperature": float("inf")}}, "sampling.temperature"),
    ],
)
def test_bad_unary_opens(stub: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Open(draft_pb2.OpenDraftRequest(**values))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


def test_bad_items_fail_alone(stub: Any) -> None:
    """One frame, four sessions, four items wrong in their own ways; and one in the next frame."""
    good = draft_pb2.ProposeItem(
        session_id="good", open=draft_pb2.OpenDraft(), new_token_ids=[1, 2], max_depth=2,
        max_nodes=2,
    )  # fmt: skip
    bad = [
        draft_pb2.ProposeItem(session_id="x", new_token_ids=[1], max_depth=2, max_nodes=2),
        draft_pb2.ProposeItem(session_id="y", open=draft_pb2.OpenDraft(), new_token_ids=[-5]),
        draft_pb2.ProposeItem(
            session_id="z", open=draft_pb2.OpenDraft(), new_token_ids=[1], max_depth=65,
            max_nodes=1,
        ),
        draft_pb2.ProposeItem(session_id="good", base_length=99),
    ]  # fmt: skip
    frame = draft_pb2.ProposeFrame(round=7, items=[*bad[:3], good, bad[3]])
    later = draft_pb2.ProposeFrame(round=8, items=bad[3:])
    reply, last = stub.Propose(iter([frame, later]))
    assert reply.round == 7
    errors = [from_status(r.error) for r in reply.results if r.HasField("error")]
    kinds = [SessionNotFound, InvalidArgument, InvalidArgument, InvalidArgument]
    assert [type(error) for error in errors] == kinds
    assert "items[4].session_id: got 'good', expected each session once" in str(errors[3])
    assert len(reply.results[3].draft.token_ids) == 2
    assert isinstance(from_status(last.results[0].error), PrefixDiverged)


def test_idle_unary_sessions_are_closed() -> None:
    servicer = DraftServicer(Copycat(), name=None, vocab_size=9, idle_timeout_s=0.1, max_sessions=1)
    with (
        serving(drafter=servicer, idle_timeout_s=0.1) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        stub.Open(draft_pb2.OpenDraftRequest(token_ids=[1]))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Open(draft_pb2.OpenDraftRequest(token_ids=[1]))
        assert isinstance(from_rpc_error(caught.value), ResourceExhausted)
        assert eventually(lambda: servicer.num_sessions == 0, 1)
        stub.Open(draft_pb2.OpenDraftRequest(token_ids=[1]))
    assert servicer.num_sessions == 0


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias"])
def test_token_ids_outside_the_vocabulary_are_refused(
    drafter_server: RpcServer, servicer: Recording, field: str
) -> None:
    opening = draft_pb2.OpenDraftRequest(token_ids=[1])
    if field == "logit_bias":
        opening.sampling.logit_bias[2**31 - 1] = 1.0
    else:
        getattr(opening.sampling, field).append(2**31 - 1)
    before = servicer.num_sessions
    with grpc.insecure_channel(drafter_server.address) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Open(opening)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert servicer.num_sessions == before


def test_a_drafter_that_needs_the_target_cannot_be_remote() -> None:
    class Needy(Copycat):
        needs = frozenset({Need.HIDDEN_STATES})

    with pytest.raises(InvalidArgument, match="hidden_states"):
        DraftServicer(Needy(), name=None, vocab_size=9)


def test_drafters_that_are_made_of_it_are_served_too(
    runner: ModelRunner, draft_runner: ModelRunner
) -> None:
    """Others are refused, with the rows that would do."""
    served = {row.name for row in METHODS.values() if served_with(row, "draft_model")}
    assert {"draft_model", "sequoia", "staged", "rasd", "combined"} <= served
    assert served.isdisjoint({"prompt_lookup", "token_recycling", "layer_skip", "medusa"})
    drafter = DraftModel(draft_runner)
    servicer = DraftServicer(drafter, name="draft_model", vocab_size=VOCAB_SIZE)
    with serving(drafter=servicer) as running, connected(running.address) as remote:

        def propose(**speculation: Any) -> Draft:
            plan = resolve(SpeculationConfig(**speculation))
            session = Session(secrets.token_hex(4), [5, 6, 7, 5, 6], SamplingParams(), plan)
            (future,) = remote.propose([session], [Budget(3, 6)])
            return future.result(5)

        assert propose(method="draft_model").num_nodes == 3
        assert propose(method="staged").num_nodes >= 3
        assert propose(method="s2d").num_nodes == 3
        merged = propose(method="combined")
        assert 7 in merged.token_ids[merged.parent_indices == -1]  # copied: 7 came after 5, 6
        with pytest.raises(DrafterUnavailable, match=r"exit_layers\[0\].*the draft model"):
            propose(method="s2d", exit_layers=(99,))
        for refused in (
            {"method": "prompt_lookup"},
            {"method": "combined", "drafters": ("token_recycling", "draft_model")},
        ):
            with pytest.raises(DrafterUnavailable, match=r"one that this drafter serves: .*staged"):
                propose(**refused)


# --- drafting ahead --------------------------------------------------------------------------


class Counting(DraftModel):
    """Counts the drafts that a session waited for (their frames have not been answered yet)."""

    num_waited_for = 0
    ahead = False

    def propose(self, sessions: Any, budgets: Any) -> list[Draft]:
        self.num_waited_for += not self.ahead
        return super().propose(sessions, budgets)


class Ahead(Mirrors):
    def draft_ahead(self, session_ids: Any) -> None:
        (drafter,) = self._host.drafters.values()
        drafter.ahead = True  # type: ignore[attr-defined]
        super().draft_ahead(session_ids)
        drafter.ahead = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guess_that_comes_true_saves_the_wait(
    runner: ModelRunner, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the target itself as the drafter every guess is right: one draft is waited for."""
    monkeypatch.setattr("paceline.rpc.draft_service.Mirrors", Ahead)
    drafter = Counting(runner)
    params = SamplingParams(max_tokens=63, temperature=temperature, seed=3)
    with (
        serving(
            drafter=DraftServicer(drafter, name="draft_model", vocab_size=VOCAB_SIZE)
        ) as server,
        connected(server.address) as remote,
    ):
        engine = Engine(ModelTarget(runner), {"draft_model": remote})
        (session,) = engine.generate(
            PROMPTS[:1], params, SpeculationConfig(length="fixed", method="draft_model")
        )
    assert session.output_ids == ar(runner, PROMPTS[:1], params)[0]
    assert session.stats.acceptance_rate == 1.0
    assert session.stats.num_rounds == 7
    # The last round asks for fewer tokens than the guess has, and takes the start of it.
    assert drafter.num_waited_for == 1


def test_the_first_draft_is_made_while_the_prompt_is_read(
    runner: ModelRunner, drafter_server: RpcServer, servicer: Recording
) -> None:
    # Other tests have had the prompt, too.
    limits = EngineLimits(prefill_chunk=4, prefix_cache=False)
    with connected(drafter_server.address) as remote, engine_with(runner, remote, limits) as engine:
        engine.submit(
            Request(PROMPTS[0], SamplingParams(max_tokens=8), SpeculationConfig(length="fixed"))
        )
        engine.step()
        assert engine.target.prefill_left(next(iter(engine.sessions.values()))) > 0
        assert eventually(lambda: any(f.items for f in servicer.frames))
        while engine.has_work:
            engine.step()
