"""While the target verifies, a drafter drafts for the likeliest verdicts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.loading import load_engine
from paceline.models.base import ModelRunner
from paceline.plan import resolve
from paceline.rpc.device import DeviceClient
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.fans import PAUSE_ROUNDS, Fanned, SpareTime
from paceline.rpc.ladder import Mode
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.shapes.fan import Fan, fan_budget
from paceline.target import ModelTarget
from paceline.tree import below, path_to
from paceline.types import EMPTY_DRAFT, Budget, Draft
from tests.rpc.serving import eventually, serving
from tests.rpc.test_remote_drafter import connected


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


PROMPT = [5, 6, 7, 5, 6, 9, 11]
METHOD = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=4)


def tree(*nodes: tuple[int, int]) -> Draft:
    """A draft of (token, parent) pairs."""
    tokens, parents = zip(*nodes, strict=True)
    return Draft(np.array(tokens, np.int64), np.array(parents, np.int32))


def test_what_lies_behind_a_path() -> None:
    draft = tree((1, -1), (2, 0), (3, -1), (4, 1), (5, 2), (6, 3), (7, 1))
    assert below(draft, [1, 2]).token_ids.tolist() == [4, 6, 7]
    assert below(draft, [1, 2]).parent_indices.tolist() == [-1, 0, -1]
    assert below(draft, [3]).token_ids.tolist() == [5]
    for nothing in ([3, 5], [2], [1, 3], []):
        assert below(draft, nothing) is EMPTY_DRAFT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_verdict_has_the_draft_that_would_follow_it(
    draft_runner: ModelRunner, temperature: float
) -> None:
    """Of a drafter that drafts without a fan, in two sessions with chains of two lengths."""
    drafter = DraftModel(draft_runner)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4)
    sessions = [Session(secrets.token_hex(4), PROMPT[:n], params, resolve(METHOD)) for n in (7, 5)]
    budgets = [Budget(4, 4), Budget(2, 2)]
    for session in sessions:
        drafter.open(session)
    drafts = drafter.propose(sessions, budgets)
    chains = {s.session_id: d.token_ids.tolist() for s, d in zip(sessions, drafts, strict=True)}
    fan = Fan(chains)
    fanned: list[Any] = [Fanned(session, fan) for session in sessions]
    fans = drafter.propose(fanned, [fan_budget(len(chain)) for chain in chains.values()])
    for session, found, budget in zip(sessions, fans, budgets, strict=True):
        chain = chains[session.session_id]
        assert found.num_nodes == len(chain) + (len(chain) + 1) ** 2
        # A verdict: a beginning of the chain, and a token that is not the chain's.
        for accepted in range(len(chain) + 1):
            own = [
                n for n in range(found.num_nodes)
                if found.parent_indices[n] == _node(found, chain[:accepted])
                and found.token_ids[n] != (chain[accepted] if accepted < len(chain) else -1)
            ]  # fmt: skip
            assert len(own) == 1
            verdict = [*chain[:accepted], int(found.token_ids[own[0]])]
            next_draft = below(found, verdict).token_ids.tolist()
            fresh = Session(
                secrets.token_hex(4), [*session.token_ids, *verdict], params, resolve(METHOD)
            )
            drafter.open(fresh)
            (wanted,) = drafter.propose([fresh], [budget])
            assert next_draft == wanted.token_ids.tolist()
            drafter.close(fresh)
        drafter.close(session)


def _node(draft: Draft, path: list[int]) -> int:
    """The node at the end of a path of tokens; -1: the root."""
    for node in range(draft.num_nodes):
        nodes = list(path_to(draft.parent_indices, node))
        if draft.token_ids[nodes].tolist() == path:
            return node
    assert not path
    return -1


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_drafts_are_here_before_they_are_asked_for(
    demo: Engine, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tokens are AR's."""
    assert demo.tokenizer is not None
    prompt = demo.tokenizer.encode("class Stack:\n    def ")
    params = SamplingParams(max_tokens=160, temperature=temperature, seed=2, ignore_eos=True)
    (expected,) = demo.generate([prompt], params, SpeculationConfig(method="ar"))
    share = {}
    for fans in (False, True):
        monkeypatch.setattr(SpareTime, "has_time", fans)
        drafter, vocab_size = demo.drafters["draft_model"], demo.target.vocab_size
        servicer = DraftServicer(drafter, name="draft_model", vocab_size=vocab_size)
        with (
            serving(drafter=servicer) as server,
            connected(server.address, vocab_size) as remote,
        ):
            engine = Engine(Patient(demo.local_target.runner, remote), {"draft_model": remote})
            (session,) = engine.generate([prompt], params, METHOD)
            share[fans] = remote.counters.num_ahead / session.stats.num_rounds
        assert session.output_ids == expected.output_ids
    print(share)
    assert share[True] > share[False] + (0.2 if temperature else 0.02)


class Patient(ModelTarget):
    """Verifies when the drafter has said what it expects."""

    def __init__(self, runner: ModelRunner, remote: Any) -> None:
        super().__init__(runner)
        self._remote = remote

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        connection = self._remote._connection
        if connection is not None and connection.told:
            eventually(lambda: connection.ahead, 0.2)
        return super().verify(*args, **kwargs)


def test_a_device_has_more_drafts_ready(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a link of 20 ms, with one round under way; and the tokens are AR's."""
    assert demo.tokenizer is not None
    prompt = demo.tokenizer.encode("class Stack:\n    def ")
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=2, ignore_eos=True)
    (expected,) = demo.generate([prompt], params, SpeculationConfig(method="ar"))
    made = {}
    thread = EngineThread(demo.sibling()).start()
    with (
        closing_thread(thread),
        serving(engine=thread) as server,
        Netem(server.address, Link(rtt=0.02)) as link,
    ):
        for fans in (False, True):
            monkeypatch.setattr(SpareTime, "has_time", True)
            drafter = Counted(demo.drafters["draft_model"])
            with DeviceClient(
                [link.address], {"draft_model": drafter}, speculation=METHOD,
                modes=(Mode.DEVICE,), max_in_flight=1, fans=fans,
            ) as client:  # fmt: skip
                found = [t for done in client.generate(prompt, params) for t in done.token_ids]
                made[fans] = drafter.num_proper / client.result.statistics.num_rounds
            assert found == expected.output_ids
    assert made[False] > 0.9
    assert made[True] < 0.7, "most verdicts are expected"


@contextmanager
def closing_thread(thread: EngineThread) -> Iterator[None]:
    try:
        yield
    finally:
        thread.stop()


class Counted:
    """A drafter that counts the drafts that a session waits for."""

    def __init__(self, drafter: Any) -> None:
        self._drafter, self.num_proper = drafter, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, sessions: Any, budgets: Any) -> Any:
        self.num_proper += not isinstance(sessions[0], Fanned)
        return self._drafter.propose(sessions, budgets)


def test_a_fan_is_drafted_where_frames_leave_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("paceline.rpc.fans.time.perf_counter", lambda: now)
    spare = SpareTime()

    def round_(drafts_s: dict[bool, float], free_s: float) -> bool:
        """A draft ahead, and a frame that comes when ``free_s`` are over."""
        nonlocal now
        fans, started = spare.has_time, now
        now += drafts_s[fans]
        spare.drafted(started, fans)
        now = max(now, started + free_s)
        spare.frame()
        return fans

    dear = {False: 0.002, True: 0.006}
    assert not any(round_(dear, 0.004) for _ in range(100)), "it would be late"
    assert all([round_(dear, 0.03) for _ in range(100)][40:])
    # The target has become fast: one fan is late, and then there are none for a while.
    after = [round_(dear, 0.004) for _ in range(PAUSE_ROUNDS)]
    assert sum(after) == 1
