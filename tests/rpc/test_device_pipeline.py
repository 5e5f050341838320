"""The `device` topology in time: rounds that overlap, lengths, and the ladder of fallbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthBounds, LengthContext
from paceline.lengths.pearl import Overlap, Pearl
from paceline.lengths.round_trip import RoundTrip, RoundTripCosts, best_depth, expected_tokens
from paceline.models.base import ForwardResult, Segment
from paceline.plan import Plan, resolve
from paceline.rpc.device import LADDER, DeviceClient
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.ladder import Ladder, Mode
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import (
    EMPTY_DRAFT,
    Acceptance,
    Budget,
    Draft,
    Load,
    Need,
    Outcome,
    Verdict,
    Verification,
)
from tests.core.scripted import ScriptedRunner
from tests.fakes import WITH_FAKES, Mix
from tests.rpc.serving import serving

PROMPT = [1, 2, 3]
VOCAB_SIZE = 50


def next_token(token_ids: list[int]) -> int:
    return (7 * token_ids[-1] + 3 * len(token_ids)) % VOCAB_SIZE


def truth(count: int) -> list[int]:
    """What the scripted target generates after the prompt."""
    token_ids = list(PROMPT)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(PROMPT) :]


class SlowRunner(ScriptedRunner):
    """Takes as long for a forward as it is told to."""

    def __init__(self, seconds: float) -> None:
        super().__init__(next_token, VOCAB_SIZE)
        self.seconds = seconds

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        time.sleep(self.seconds)
        return super().forward(segments, wants)


class SlowDrafter(Mix):
    """Takes as long for each token as it is told to, and can draft ahead."""

    rewinds = True
    seconds_per_token = 0.0

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = super().propose(sessions, budgets)
        time.sleep(self.seconds_per_token * max((d.num_nodes for d in drafts), default=0))
        return drafts


@contextmanager
def slow_server(verify_seconds: float, default: str = "ar") -> Iterator[RpcServer]:
    thread = EngineThread(Engine(ModelTarget(SlowRunner(verify_seconds)))).start()
    try:
        info = ModelInfo(default_speculation=SpeculationConfig(method=default))
        with serving(engine=thread, model=info) as server:
            yield server
    finally:
        thread.stop()


def client_of(
    address: str, count: int, *, rho: float = 1.0, seconds_per_token: float = 0.0,
    depth: int = 4, in_flight: int = 8, modes: Sequence[Mode] = (Mode.DEVICE,),
    length: str = "fixed",
) -> DeviceClient:  # fmt: skip
    drafter = SlowDrafter({tuple(PROMPT): truth(count + 8)}, VOCAB_SIZE, rho=rho)
    drafter.seconds_per_token = seconds_per_token
    return DeviceClient(
        [address], {"mix": drafter},
        speculation=SpeculationConfig(method="mix", num_speculative_tokens=depth, length=length),
        catalogue=WITH_FAKES,
        max_in_flight=in_flight,
        modes=modes,
    )  # fmt: skip


# --- rounds that overlap --------------------------------------------------------------------------


def seconds_per_round(rtt: float, per_token: float, verify: float, in_flight: int) -> float:
    """Median time from one verdict to the next, with a perfect drafter of 4 tokens a round."""
    with slow_server(verify) as server, Netem(server.address, Link(rtt=rtt)) as netem:
        client = client_of(netem.address, 75, seconds_per_token=per_token, in_flight=in_flight)
        with client:
            moments = [time.perf_counter() for _ in client.generate(PROMPT, params(75))]
            assert client.result.token_ids == truth(75)
            assert client.result.statistics.num_rounds == 15  # gamma + 1 tokens a forward
    gaps = sorted(b - a for a, b in pairwise(moments[2:-1]))
    return gaps[len(gaps) // 2]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.mark.alone
def test_a_round_takes_the_longer_of_drafting_and_the_round_trip_not_the_sum() -> None:
    """Drafting 5 tokens takes 50 ms, the round trip with verification 60 ms."""
    drafting, travel, verify = 0.05, 0.05, 0.01
    in_turn = seconds_per_round(travel, 0.01, verify, in_flight=1)
    overlapped = seconds_per_round(travel, 0.01, verify, in_flight=2)
    print(f"a round in turn {1e3 * in_turn:.0f} ms, overlapped {1e3 * overlapped:.0f} ms")
    assert in_turn > 0.9 * (0.04 + travel + verify)  # 4 tokens, there is nothing to guess
    assert 0.9 * drafting < overlapped < 0.8 * (drafting + travel + verify)


def test_a_slow_link_costs_nothing_once_enough_rounds_are_under_way() -> None:
    """A round trip of 150 ms behind drafts of 30 ms: a verdict each 30 ms or so."""
    pace = seconds_per_round(0.15, 0.006, 0.005, in_flight=8)
    print(f"a round of 30 ms of drafting over a 150 ms link: {1e3 * pace:.0f} ms")
    assert pace < 0.5 * 0.15


def refrain(token_ids: list[int]) -> int:
    """Forty tokens again and again, with another one here and there."""
    place = len(token_ids)
    return 45 if place % 97 == 0 else place % 40


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("method", ["prompt_lookup", "copyspec", "sam_decoding"])
def test_drafters_that_copy_go_ahead(method: str) -> None:
    """Further along the copy; a wrong guess does not change what they find afterwards."""
    count = 200
    expected = list(range(3))
    while len(expected) < count + 3:
        expected.append(refrain(expected))
    thread = EngineThread(Engine(ModelTarget(ScriptedRunner(refrain, VOCAB_SIZE)))).start()
    results = []
    try:
        with (
            serving(engine=thread, model=ModelInfo()) as server,
            Netem(server.address, Link(rtt=0.02)) as netem,
        ):
            for in_flight in (1, 8):
                client = DeviceClient(
                    [netem.address],
                    speculation=SpeculationConfig(
                        method=method, num_speculative_tokens=4, length="fixed"
                    ),
                    max_in_flight=in_flight,
                    modes=[Mode.DEVICE],
                )  # fmt: skip
                with client:
                    results.append(client.complete(expected[:3], params(count)))
    finally:
        thread.stop()
    one, ahead = results
    assert one.token_ids == ahead.token_ids == expected[3:]
    assert ahead.counters.ahead_right > 10 > one.counters.ahead_right == 0
    assert ahead.counters.sent_ahead > ahead.counters.ahead_right  # and some guesses are wrong
    # Drafts are as long and as good as without; each round ahead may end where the copy does.
    assert ahead.statistics.num_rounds <= 1.2 * one.statistics.num_rounds


# --- PEARL ----------------------------------------------------------------------------------------


def outcome(draft: Draft, accepted: int, verdict: Verdict | None) -> Outcome:
    return Outcome(
        draft=draft,
        path=tuple(range(accepted)),
        next_token=0,
        token_ids=(0,) * (accepted + 1),
        num_accepted=accepted,
        verification=Verification(torch.empty(0, 1), verdict=verdict),
    )


def test_pearl_asks_for_nothing_where_it_would_wait() -> None:
    session = Session("s", PROMPT, params(50), plan=_plan("pearl"))
    controller = Pearl(5, 5, Overlap())
    assert controller.budget(session, Load(1, 0)).depth == 0  # pre-verify
    away = Verdict(EMPTY_DRAFT, Acceptance((), 0))
    controller.observe(outcome(EMPTY_DRAFT, 0, away), 0.0, 0.1)
    assert controller.budget(session, Load(1, 0)).depth == 0
    assert controller.ahead == 5
    controller.observe(outcome(EMPTY_DRAFT, 0, None), 0.0, 0.1)  # the target is in this process
    assert controller.budget(session, Load(1, 0)).depth == 5


def _plan(method: str) -> Plan:
    return resolve(SpeculationConfig(method=method))


def test_pearl_with_a_perfect_drafter_stays_in_post_verify() -> None:
    """All rounds but the first carry a draft, and the first one costs no drafting."""
    with (
        slow_server(0.01) as server,
        Netem(server.address, Link(rtt=0.02)) as netem,
        client_of(netem.address, 61, depth=5, length="pearl") as client,
    ):
        result = client.complete(PROMPT, params(61))
    assert result.token_ids == truth(61)
    # One token of the pre-verify round, then gamma + 1 for each target forward.
    assert result.statistics.num_rounds == 11
    assert result.counters.sent_ahead == result.counters.ahead_right == 10


def test_accepted_runs_are_longer_than_gamma() -> None:
    """Tokens from one rejection to the next: overlap does not end a run after gamma tokens."""
    gamma, count = 4, 200
    for length, in_flight in (("pearl", 8), ("fixed", 1)):
        with (
            slow_server(0.002) as server,
            Netem(server.address, Link(rtt=0.01)) as netem,
            client_of(
                netem.address, count, rho=0.9, depth=gamma, length=length, in_flight=in_flight
            ) as client,
        ):
            runs = [0]
            for done in client.generate(PROMPT, params(count)):
                runs[-1] += done.num_accepted
                if done.num_accepted < gamma:
                    runs.append(0)
            assert client.result.token_ids == truth(count)
        if length == "pearl":
            assert max(runs) > gamma
            assert client.result.counters.ahead_right > 5
        else:
            assert client.result.counters.sent_ahead == 0


# --- lengths --------------------------------------------------------------------------------------


def test_costs_of_a_round() -> None:
    in_turn = RoundTripCosts(draft=0.01, verify_first=0.02, travel=0.1)
    assert in_turn.round(5, 1.0) == pytest.approx(0.05 + 0.02 + 0.1)
    overlapped = RoundTripCosts(draft=0.01, verify_first=0.02, travel=0.1, overlaps=True)
    assert overlapped.round(5, 1.0) == pytest.approx(0.06)  # drafting is the longer one
    slow = RoundTripCosts(draft=0.01, verify_first=0.2, overlaps=True)
    assert slow.round(5, 1.0) == pytest.approx(0.2)  # max(gamma t_d, t_v), not the sum
    assert overlapped.round(5, 0.0) == pytest.approx(in_turn.round(5, 0.0))


def test_expected_tokens_is_the_geometric_sum() -> None:
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        for depth in range(6):
            summed = sum(acceptance**level for level in range(depth + 1))
            assert expected_tokens(acceptance, depth) == pytest.approx(summed)


def test_a_longer_way_makes_longer_drafts() -> None:
    chosen = [
        best_depth(0.8, RoundTripCosts(draft=0.01, verify_first=0.03, travel=travel), 0, 32)
        for travel in (0.0, 0.02, 0.1, 0.2, 0.5)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_no_drafts_where_they_never_help_or_cost_too_much() -> None:
    assert best_depth(0.0, RoundTripCosts(draft=0.01, verify_first=0.03), 0, 16) == 0
    assert best_depth(0.5, RoundTripCosts(draft=0.1, verify_first=0.03), 0, 16) == 0
    assert best_depth(0.9, RoundTripCosts(draft=0.001, verify_first=0.03), 0, 16) > 4


@pytest.mark.parametrize("travel", [0.0, 0.05, 0.3])
def test_the_controller_finds_the_best_length_from_what_it_sees(travel: float) -> None:
    """Fed with rounds of known costs, it chooses what brute force over these costs chooses."""
    draft_s, verify_s, acceptance = 0.008, 0.03, 0.75
    controller = RoundTrip(LengthBounds(start=6, shortest=0, longest=16, nodes=16))
    session = Session("s", PROMPT, params(400), plan=_plan("draft_model"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        depth = controller.budget(session, Load(1, 0)).depth
        draft = Draft.chain([0] * depth)
        hits = torch.rand(depth, generator=generator) < acceptance
        accepted = int(hits.cumprod(0).sum())
        verdict = Verdict(
            draft, Acceptance(tuple(range(accepted)), 0), verify_seconds=verify_s,
            travel_seconds=travel,
        )  # fmt: skip
        controller.observe(outcome(draft, accepted, verdict), draft_s * depth, travel + verify_s)
    assert controller.acceptance == pytest.approx(acceptance, abs=0.15)
    costs = RoundTripCosts(draft=draft_s, verify_first=verify_s, travel=travel)
    wanted = max(
        range(17),
        key=lambda depth: (
            expected_tokens(controller.acceptance, depth)
            / costs.round(depth, controller.acceptance)
        ),
    )
    assert abs(controller.budget(session, Load(1, 0)).depth - wanted) <= 1


@pytest.mark.parametrize("travel", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_a_device_is_not_slower_where_each_row_costs_the_server_as_much_as_the_first(
    travel: float, acceptance: float
) -> None:
    """Sessions of 64 tokens, one after the other, from the first request of a client on."""
    draft_s, row_s = 0.001, 0.01
    context, generator = LengthContext(), torch.Generator().manual_seed(2)
    bounds = LengthBounds(start=8, shortest=0, longest=8, nodes=8)
    seconds, tokens = 0.0, 0
    for _ in range(4):
        controller = RoundTrip(bounds, context)
        session = Session("s", PROMPT, params(400), plan=_plan("draft_model"))
        done = 0
        while done < 64:
            depth = controller.budget(session, Load(1, 0)).depth
            hits = torch.rand(depth, generator=generator) < acceptance
            accepted = int(hits.cumprod(0).sum())
            draft = Draft.chain([0] * depth)
            verdict = Verdict(
                draft, Acceptance(tuple(range(accepted)), 0), verify_seconds=row_s * (1 + depth),
                travel_seconds=travel,
            )  # fmt: skip
            took = draft_s * depth, travel + row_s * (1 + depth)
            controller.observe(outcome(draft, accepted, verdict), *took)
            seconds += sum(took)
            done += accepted + 1
        tokens += done
    assert tokens * (row_s + travel) / seconds >= 0.95


# --- the ladder -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    rates: dict[Mode, float], server_seconds: float, rounds: int = 400
) -> tuple[list[Mode], Ladder]:
    """The rungs that a ladder takes when each has a fixed rate, one token a round."""
    clock = Clock()
    ladder = Ladder(LADDER, clock=clock)
    taken = [ladder.mode]
    for _ in range(rounds):
        clock.now += 1.0 / rates[ladder.mode]
        ladder.observe(1, server_seconds if ladder.mode is Mode.DEVICE else 0.0)
        if ladder.mode is not taken[-1]:
            taken.append(ladder.mode)
    return taken, ladder


def test_the_device_stays_where_it_is_the_fastest() -> None:
    taken, ladder = simulate({Mode.DEVICE: 50, Mode.SERVER: 40, Mode.AR: 15}, 1 / 15, 250)
    assert taken == [Mode.DEVICE, Mode.SERVER, Mode.DEVICE]  # nothing was known of the server's
    assert ladder.mode is Mode.DEVICE


def test_ar_is_tried_where_the_rounds_of_a_slow_device_make_the_server_look_slow() -> None:
    """Seconds that the server needs between long pauses are twice those of a stream."""
    taken, ladder = simulate({Mode.DEVICE: 57, Mode.SERVER: 460, Mode.AR: 520}, 1 / 235, 1500)
    assert taken[:3] == [Mode.DEVICE, Mode.SERVER, Mode.AR]
    assert ladder.mode is Mode.AR


def test_the_server_takes_over_where_the_way_is_too_long() -> None:
    taken, ladder = simulate({Mode.DEVICE: 10, Mode.SERVER: 60, Mode.AR: 30}, 1 / 30, 200)
    assert taken[:2] == [Mode.DEVICE, Mode.SERVER]
    assert ladder.mode is Mode.SERVER


def test_ar_is_the_last_rung() -> None:
    taken, ladder = simulate({Mode.DEVICE: 10, Mode.SERVER: 15, Mode.AR: 30}, 1 / 30, 100)
    assert taken[:3] == [Mode.DEVICE, Mode.SERVER, Mode.AR]
    assert ladder.mode is Mode.AR


def test_the_device_is_tried_again_at_growing_intervals() -> None:
    taken, _ = simulate({Mode.DEVICE: 10, Mode.SERVER: 60, Mode.AR: 30}, 1 / 30, 12_000)
    tries = taken.count(Mode.DEVICE) - 1
    assert 3 <= tries <= 8  # in 200 s


@pytest.mark.parametrize("device", [3, 30, 58, 66, 150])
@pytest.mark.parametrize("server", [25, 60, 63])
def test_the_choice_costs_little_in_the_long_run(device: int, server: int) -> None:
    """Whatever the rates are, trials included."""
    rates = {Mode.DEVICE: float(device), Mode.SERVER: float(server), Mode.AR: 40.0}
    clock, best = Clock(), max(rates.values())
    ladder = Ladder(LADDER, clock=clock)
    for tokens in (int(20 * best), int(40 * best)):  # the first ones may learn
        begun = clock.now
        for done in range(tokens):
            if done % 200 == 0:
                ladder.begin()  # another generation of the same client
            clock.now += 1.0 / rates[ladder.mode]
            ladder.observe(1, 0.025 if ladder.mode is Mode.DEVICE else 0.0)
        spent = clock.now - begun
    assert tokens / spent > 0.94 * best


@pytest.mark.parametrize(("idle", "least", "most"), [(30.0, 1, 4), (1000.0, 20, 100)])
def test_pauses_between_trials_are_spent_generating(idle: float, least: int, most: int) -> None:
    """Unless so much time has passed that the network may be another one."""
    rates = {Mode.DEVICE: 20.0, Mode.SERVER: 60.0, Mode.AR: 30.0}
    clock = Clock()
    ladder = Ladder(LADDER, clock=clock)
    tries = 0
    for _ in range(60):  # of a second or two
        ladder.begin()
        for _ in range(60):
            before = ladder.mode
            clock.now += 1.0 / rates[before]
            ladder.observe(1, 1 / 30)
            tries += ladder.mode is Mode.DEVICE is not before
        clock.now += idle
    assert least <= tries <= most


def test_the_ladder_in_the_field() -> None:
    """A drafter that is never right, far away: the server alone is faster, the tokens the same."""
    count = 160
    for default in ("ar", "prompt_lookup"):
        with (
            slow_server(0.004, default) as server,
            Netem(server.address, Link(rtt=0.06)) as netem,
            client_of(netem.address, count, rho=0.0, modes=LADDER) as client,
        ):
            result = client.complete(PROMPT, params(count))
        assert result.token_ids == truth(count)
        assert [(c.old, c.new) for c in result.mode_changes][:1] == [(Mode.DEVICE, Mode.SERVER)]
        assert result.mode_changes[0].num_tokens < 60
        assert not result.statistics.drafter_lost


def test_a_server_that_cannot_draft_is_never_asked_to() -> None:
    """Its default method needs a drafter that it does not have."""
    count = 160
    with (
        slow_server(0.004, "draft_model") as server,
        Netem(server.address, Link(rtt=0.06)) as netem,
    ):
        with client_of(netem.address, count, rho=0.0, modes=LADDER) as client:
            result = client.complete(PROMPT, params(count))
        with pytest.raises(InvalidArgument, match=r"modes.*draft_model"):
            client_of(netem.address, count, modes=(Mode.SERVER,))
    assert result.token_ids == truth(count)
    assert [(c.old, c.new) for c in result.mode_changes][:1] == [(Mode.DEVICE, Mode.AR)]


@pytest.mark.parametrize("mode", [Mode.SERVER, Mode.AR])
def test_streams_of_the_server_survive_a_bad_network(mode: Mode) -> None:
    count = 60
    with (
        slow_server(0.004) as server,
        Netem(server.address, Link(rtt=0.01)) as netem,
        client_of(netem.address, count, modes=(mode,)) as client,
    ):
        for i, _ in enumerate(client.generate(PROMPT, params(count))):
            if i % 10 == 5:
                netem.reset()
    assert client.result.token_ids == truth(count)
    assert client.result.counters.num_failures >= 3
