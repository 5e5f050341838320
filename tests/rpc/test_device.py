"""The `device` topology: the drafter here, the target on a server, tokens equal to AR's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner
from paceline.rpc.device import DeviceClient, checked_speculation
from paceline.rpc.ladder import Mode
from paceline.rpc.reconnect import Patience
from paceline.rpc.remote_target import TargetInfo
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Budget, Draft, Need, Outcome
from tests.fakes import WITH_FAKES, Mix

PROMPT = list(b"import os\nimport ")
VOCAB_SIZE = 258
METHOD_NAMES = (
    "draft_model", "pearl", "draft_model_tree", "prompt_lookup", "suffix_decoding", "copyspec",
    "combined", "staged",
)  # fmt: skip
DEVICE_ONLY = (Mode.DEVICE,)


_WRITTEN: dict[tuple[ModelRunner, str], list[int]] = {}


def ar(runner: ModelRunner, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What plain AR decoding adds to a prompt; computed once."""
    key = runner, repr((params, prompt))
    if key not in _WRITTEN:
        engine = Engine(ModelTarget(runner))
        (session,) = engine.generate([prompt], params, SpeculationConfig(method="ar"))
        _WRITTEN[key] = session.output_ids
    return list(_WRITTEN[key])


class RewindingMix(Mix):
    """A fake that can draft ahead, as it looks at nothing but the tokens."""

    rewinds = True


def mixed(
    servers: Sequence[str], truth: Sequence[int], rho: float, *, depth: int = 4, nodes: int = 4
) -> DeviceClient:
    """A client whose drafter is right with probability ``rho`` at each token."""
    return DeviceClient(
        servers, {"mix": RewindingMix({tuple(PROMPT): truth}, VOCAB_SIZE, rho=rho)},
        speculation=SpeculationConfig(
            method="mix", num_speculative_tokens=depth, node_budget=nodes
        ),
        modes=DEVICE_ONLY,
        catalogue=WITH_FAKES,
    )  # fmt: skip


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_every_kind_of_method_are_those_of_ar(
    method: str, temperature: float, server: RpcServer, runner: ModelRunner,
    draft_runner: ModelRunner,
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    with (
        Netem(server.address, Link(rtt=0.01)) as netem,  # time to draft ahead, on any machine
        DeviceClient(
            [netem.address], {"draft_model": DraftModel(draft_runner)},
            speculation=SpeculationConfig(method=method),
            modes=DEVICE_ONLY,
        ) as client,
    ):  # fmt: skip
        result = client.complete(PROMPT, params)
    assert result.token_ids == ar(runner, params)
    assert result.finish_reason == "length"
    assert not result.unverified_ids
    if method in ("draft_model", "pearl"):
        assert result.counters.ahead_right > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_limits_on_tokens_hold_where_a_session_is_opened_again(
    temperature: float, server: RpcServer, runner: ModelRunner
) -> None:
    """The output is in the prompt then: its length still counts towards ``min_tokens``."""
    free = SamplingParams(
        max_tokens=40, temperature=temperature, seed=5, ignore_eos=True,
        allowed_token_ids=tuple(range(32, 200)),
    )  # fmt: skip
    tokens = ar(runner, free)
    end = next(i for i in range(39, 0, -1) if tokens[i] not in tokens[:i])
    params = replace(free, stop_token_ids=(tokens[end],), min_tokens=end)
    truth = ar(runner, params)
    assert truth == tokens[: end + 1]
    with Netem(server.address) as netem, mixed([netem.address], truth, 0.7) as client:
        for done in client.generate(PROMPT, params):
            if done.finish_reason is None:
                netem.reset()
    assert client.result.token_ids == truth


def check_link(link: Link, temperature: float, server: RpcServer, runner: ModelRunner) -> None:
    params = SamplingParams(
        max_tokens=48, temperature=temperature, seed=6, repetition_penalty=1.1, ignore_eos=True
    )
    truth = ar(runner, params)
    for rho in (0.3, 0.9) if link.rtt < 0.1 else (0.7,):
        with (
            Netem(server.address, link) as netem,
            mixed([netem.address], truth, rho) as client,
        ):
            result = client.complete(PROMPT, params)
        assert result.token_ids == truth
        assert result.counters.num_failures == 0
        assert result.statistics.num_accepted > 0
        if link.rtt:
            travel = result.counters.median_travel_seconds
            assert travel is not None
            assert link.rtt <= travel < link.rtt + link.jitter + 0.1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("rtt", [0.0, 0.02, 0.1, 0.2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_over_a_slow_link_are_those_of_ar(
    rtt: float, temperature: float, server: RpcServer, runner: ModelRunner
) -> None:
    check_link(Link(rtt=rtt, jitter=rtt / 5), temperature, server, runner)


@pytest.mark.parametrize("stop", ["eos", "string"])
def test_a_generation_ends_where_that_of_ar_ends(
    stop: str, server: RpcServer, engine: EngineThread, runner: ModelRunner
) -> None:
    """A stop string is found even where one session ends and another one continues."""
    tokenizer = engine.engine.tokenizer
    assert tokenizer is not None
    free = ar(runner, SamplingParams(max_tokens=40, temperature=1.0, seed=8, ignore_eos=True))
    if stop == "eos":
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=8, stop_token_ids=(free[21],))
    else:
        text = tokenizer.decode(free)
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=8, stop=(text[20:22],))
    plain = Engine(ModelTarget(runner), tokenizer=tokenizer)
    (expected,) = plain.generate([PROMPT], params, SpeculationConfig(method="ar"))
    with Netem(server.address) as netem:
        client = DeviceClient(
            [netem.address], {"mix": RewindingMix({tuple(PROMPT): free}, VOCAB_SIZE, rho=1.0)},
            speculation=SpeculationConfig(method="mix"),
            tokenizer=tokenizer,
            modes=DEVICE_ONLY,
            catalogue=WITH_FAKES,
        )  # fmt: skip
        with client:
            for done in client.generate(PROMPT, params):
                if done.finish_reason is None:
                    netem.reset()
    assert client.result.token_ids == expected.output_ids
    assert client.result.text == expected.text
    assert client.result.finish_reason == expected.finish_reason == "stop"


# --- drafters that lie ----------------------------------------------------------------------------


class Liar(Drafter):
    """Drafts nonsense: more tokens than asked for, arrays that are no tree, tokens outside the
    vocabulary."""

    needs: frozenset[Need] = frozenset()
    rewinds = True

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = []
        for budget in budgets:
            size = int(self._random.integers(0, 2 * budget.nodes + 1))
            high = int(self._random.choice([VOCAB_SIZE, 10 * VOCAB_SIZE]))
            ids = self._random.integers(0, high, size)
            parents = np.arange(-1, size - 1, dtype=np.int32)
            if self._random.random() < 0.3:
                parents = self._random.integers(-1, size + 1, size).astype(np.int32)
            drafts.append(Draft(ids, parents))
        return drafts

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lying_drafter_costs_time_only(
    temperature: float, server: RpcServer, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=2, ignore_eos=True)
    with DeviceClient(
        [server.address], {"mix": Liar()},
        speculation=SpeculationConfig(method="mix"),
        modes=DEVICE_ONLY,
        catalogue=WITH_FAKES,
    ) as client:  # fmt: skip
        result = client.complete(PROMPT, params)
    assert result.token_ids == ar(runner, params)
    assert result.counters.num_failures == 0


class Breaks(RewindingMix):
    """Fails after a while, for good."""

    calls = 0

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("out of order")
        return super().propose(sessions, budgets)


def test_a_drafter_that_breaks_leaves_ar(server: RpcServer, runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    truth = ar(runner, params)
    with DeviceClient(
        [server.address], {"mix": Breaks({tuple(PROMPT): truth}, VOCAB_SIZE, rho=0.5)},
        speculation=SpeculationConfig(method="mix"),
        modes=DEVICE_ONLY,
        catalogue=WITH_FAKES,
    ) as client:  # fmt: skip
        result = client.complete(PROMPT, params)
    assert result.token_ids == truth
    assert result.statistics.drafter_lost


# --- the wire -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_a_round_of_sixteen_nodes_costs_less_than_a_kilobyte(
    tree: bool, server: RpcServer, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    truth = ar(runner, params)
    depth = 6 if tree else 16
    with mixed([server.address], truth, 0.9, depth=depth, nodes=16) as client:
        result = client.complete(PROMPT, params)
    counters = result.counters
    up, down = counters.bytes_up / counters.rounds_sent, counters.bytes_down / counters.rounds_sent
    print(f"16 nodes, tree {tree}: {up:.0f} bytes up, {down:.0f} bytes down a round")
    assert result.token_ids == truth
    assert result.statistics.num_draft_nodes / result.statistics.num_rounds > 10
    assert up + down < 1024


# --- offline --------------------------------------------------------------------------------------


def test_offline_tokens_are_verified_or_replaced(server: RpcServer, runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=3, ignore_eos=True)
    truth = ar(runner, params)
    for rho in (1.0, 0.9):
        alone: list[list[int]] = []
        with (
            Netem(server.address, Link(rtt=0.02)) as netem,
            DeviceClient(
                [netem.address],
                {"mix": RewindingMix({tuple(PROMPT): truth}, VOCAB_SIZE, rho=rho)},
                speculation=SpeculationConfig(method="mix"),
                modes=DEVICE_ONLY,
                catalogue=WITH_FAKES,
                offline_ok=True,
                on_unverified=lambda ids, seen=alone: seen.append(list(ids)),  # type: ignore[misc]
            ) as client,
        ):
            rounds = client.generate(PROMPT, params)
            next(rounds)
            netem.refuse()
            healer = threading.Timer(0.5, netem.refuse, [False])
            healer.start()
            for _ in rounds:
                pass
            healer.join()
        assert client.result.token_ids == truth
        assert not client.result.unverified_ids
        assert alone, "nothing was decoded offline"
        assert len(alone[-1]) > 60, "it went on to the end"
        if rho == 1.0:
            # All but the very last token, which would be the target's own.
            assert truth[-1 - len(alone[-1]) : -1] == alone[-1]


def test_without_a_server_the_device_finishes_alone(draft_runner: ModelRunner) -> None:
    """The drafter is the target's twin here, so that its text is what AR would have written."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    started = time.monotonic()
    with DeviceClient(
        ["127.0.0.1:1"], {"draft_model": DraftModel(draft_runner)},
        speculation=SpeculationConfig(method="draft_model"),
        info=TargetInfo(vocab_size=VOCAB_SIZE, context_length=512),
        patience=Patience(give_up=0.5),
        offline_ok=True,
    ) as client:  # fmt: skip
        result = client.complete(PROMPT, params)
    assert time.monotonic() - started < 10
    assert result.token_ids == []
    assert result.unverified_ids == ar(draft_runner, params)[: len(result.unverified_ids)]
    assert len(result.unverified_ids) == 29  # the last one would be the target's own


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SpeculationConfig(method="layer_skip"), "method"),
        (SpeculationConfig(method="token_recycling"), "method"),
        (SpeculationConfig(method="speculative_sampling"), "acceptance"),
        (SpeculationConfig(method="nothing"), "method"),
        (SpeculationConfig(method="draft_model", length="ldlp"), "length"),
    ],
)
def test_methods_that_need_the_target_beside_them_are_refused(
    config: SpeculationConfig, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_speculation(config)
    assert caught.value.field == field


def test_pearl_wants_a_drafter_that_goes_ahead() -> None:
    info = TargetInfo(vocab_size=VOCAB_SIZE, context_length=512)
    config = SpeculationConfig(method="suffix_decoding", length="pearl")
    with pytest.raises(InvalidArgument, match="length"):
        DeviceClient(["127.0.0.1:1"], speculation=config, info=info)
    with pytest.raises(InvalidArgument, match="servers"):
        DeviceClient([], info=info)


def test_a_drafter_that_was_not_given_is_named(server: RpcServer) -> None:
    with pytest.raises(InvalidArgument, match="draft_model is not"):
        DeviceClient([server.address])
