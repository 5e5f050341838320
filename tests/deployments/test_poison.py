"""Requests that kill targets: two processes die of each, and everybody else's tokens are exact."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import cast

import pytest

from paceline.deployments import gateway, poison
from paceline.deployments.gateway import MAX_UNREACHED, Relay
from paceline.deployments.lease import Lease
from paceline.deployments.poison import Poison, digest_of
from paceline.deployments.target_calls import TargetGone
from paceline.errors import FailedPrecondition
from paceline.rpc.access import Gate
from paceline.rpc.audit import Audit
from paceline.rpc.errors import PoisonRequest, ServerUnavailable
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.messages import sampling_to_message
from paceline.sampling import SamplingParams
from tests.deployments.conftest import free_port
from tests.deployments.http_serving import DirectLease
from tests.modelzoo import make_model
from tests.rpc.serving import ReplicaProcess

DEADLY = [7, 77, 177]


def request(prompt: list[int], seed: int = 0, max_tokens: int = 200) -> bytes:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, temperature=1.0)
    message = generate_pb2.GenerateRequest(sampling=sampling_to_message(params))
    message.speculation.method = "ar"
    message.token_ids.token_ids.extend(prompt)
    return message.SerializeToString()


class Fleet:
    """Target processes, and leases on those that live, in turn."""

    def __init__(self, processes: list[ReplicaProcess]) -> None:
        self.processes = processes
        self._next = 0

    @property
    def num_dead(self) -> int:
        return sum(process.has_ended for process in self.processes)

    async def __call__(self) -> Lease:
        for _ in self.processes:
            self._next += 1
            process = self.processes[self._next % len(self.processes)]
            if not process.has_ended:
                return cast(Lease, DirectLease(process.address))
        raise ServerUnavailable("no target lives")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    folder = make_model("llama", tmp_path)
    die = ["--die-on", *map(str, DEADLY)]
    with ExitStack() as stack:
        yield Fleet(
            [
                stack.enter_context(
                    ReplicaProcess("tests.rpc.target_process", "--model", str(folder), *die)
                )
                for _ in range(3)
            ]
        )


async def tokens_of(relay: Relay, data: bytes) -> list[int]:
    tokens: list[int] = []
    async with aclosing(relay.generate(data)) as stream:
        async for _, reply in stream:
            tokens += reply.token_ids
    return tokens


async def test_two_die_and_no_more(fleet: Fleet, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    gate = Gate(audit=Audit(log))
    relay = Relay(fleet, idle_timeout_s=60, resume_s=20, gate=gate)
    prompts = [[20 + i, 3, 5] for i in range(6)]
    expected = [await tokens_of(relay, request(prompt)) for prompt in prompts]
    honest = [asyncio.create_task(tokens_of(relay, request(prompt))) for prompt in prompts]
    # The same but for the seed, as the choices of one HTTP request are.
    deadly = [request([1, *DEADLY, 2], seed=seed) for seed in range(3)]
    attempts = [asyncio.create_task(tokens_of(relay, deadly[0]))]
    # Requests that arrive meanwhile, and have no token when a target dies.
    later = [asyncio.create_task(tokens_of(relay, request(prompt))) for prompt in prompts]
    while not fleet.num_dead:  # noqa: ASYNC110  # a process sets no event
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)  # the gateway has noticed it
    attempts += [asyncio.create_task(tokens_of(relay, data)) for data in deadly[1:]]
    for attempt in attempts:
        with pytest.raises(PoisonRequest) as caught:
            await attempt
    assert fleet.num_dead == 2
    assert await asyncio.gather(*honest) == expected
    assert await asyncio.gather(*later) == expected
    digest = digest_of(generate_pb2.GenerateRequest.FromString(deadly[0]))
    assert caught.value.digest == digest
    assert digest in str(caught.value)
    with pytest.raises(PoisonRequest):  # refused before any target sees it
        await tokens_of(relay, request([1, *DEADLY, 2], seed=9))
    assert fleet.num_dead == 2
    assert gate.num_refusals["POISON_REQUEST"] >= 4
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refused = [line for line in lines if line["event"] == "refused"]
    assert {line["reason"] for line in refused} == {f"POISON_REQUEST {digest}"}
    assert await tokens_of(relay, request(prompts[0])) == expected[0]
    await relay.close()


def scoring(continuations: list[list[int]]) -> bytes:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    message = generate_pb2.GenerateRequest(sampling=sampling_to_message(params))
    message.token_ids.token_ids.extend([1, 2])
    for each in continuations:
        message.continuations.add(token_ids=each)
    return message.SerializeToString()


async def scores_of(relay: Relay, data: bytes) -> list[list[float]]:
    found: dict[int, list[float]] = {}
    async with aclosing(relay.generate(data)) as stream:
        async for _, reply in stream:
            if reply.fingerprint:
                found.clear()  # what a lost target told is void
            for each in reply.continuations:
                logprobs = (entry.logprob for entry in each.reply.prompt_logprobs)
                found.setdefault(each.index, []).extend(logprobs)
    return [logprobs for _, logprobs in sorted(found.items())]


@pytest.mark.slow
async def test_continuations_that_kill(fleet: Fleet) -> None:
    gate = Gate()
    relay = Relay(fleet, idle_timeout_s=60, resume_s=20, gate=gate)
    honest, deadly = [scoring([[5], [5, i], []]) for i in range(4)], scoring([[5], DEADLY])
    expected = [await scores_of(relay, data) for data in honest]
    assert [[len(each) for each in scores] for scores in expected] == [[1, 2, 0]] * 4
    attempt = asyncio.create_task(scores_of(relay, deadly))
    later = [asyncio.create_task(scores_of(relay, data)) for data in honest]
    with pytest.raises(PoisonRequest):
        await attempt
    async with asyncio.timeout(10):
        while fleet.num_dead < 2:  # noqa: ASYNC110  a process ends after its connections
            await asyncio.sleep(0.002)
    assert await asyncio.gather(*later) == expected
    # Its scores clear a request, as another one's first token does.
    digest = digest_of(generate_pb2.GenerateRequest.FromString(honest[0]))
    relay._poison.died(digest, "a replica")
    assert relay._poison.is_suspect(digest)
    assert await scores_of(relay, honest[0]) == expected[0]
    assert not relay._poison.is_suspect(digest)
    await relay.close()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [MAX_UNREACHED - 1, MAX_UNREACHED])
async def test_targets_that_are_gone_but_still_offered(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    """A replica that has just died may be offered for a while: nothing is lost but time."""
    monkeypatch.setattr(gateway, "_RETRY_S", 0.01)
    live = fleet.processes[0].address
    offered = [f"127.0.0.1:{free_port()}" for _ in range(dead)]

    async def lease() -> Lease:
        return cast(Lease, DirectLease(offered.pop() if offered else live))

    relay = Relay(lease, idle_timeout_s=60, resume_s=20, gate=Gate())
    if dead < MAX_UNREACHED:
        assert len(await tokens_of(relay, request([5, 6], max_tokens=8))) == 8
    else:
        with pytest.raises(TargetGone):
            await tokens_of(relay, request([5, 6], max_tokens=8))
    assert not offered
    await relay.close()


def test_what_a_digest_covers() -> None:
    message = generate_pb2.GenerateRequest.FromString(request([1, 2, 3]))
    digest = digest_of(message)
    message.sampling.seed = 99
    message.committed_token_ids.extend([4, 5])
    message.fingerprint = "portable-float32-k1-aa"
    assert digest_of(message) == digest
    message.continuations.add(token_ids=[6])
    scored = digest_of(message)
    assert scored != digest
    message.sampling.stop.append("x")
    assert digest_of(message) not in (digest, scored)


def test_deaths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(poison.time, "monotonic", lambda: clock[0])
    table = Poison()
    table.died("a", "first")
    table.died("a", "first")  # two choices on one target
    assert table.is_suspect("a")
    with pytest.raises(FailedPrecondition, match="digest a"):
        table.died("a", "second")
    table.lives("a")  # too late
    clock[0] += poison.REFUSED_S - 1
    with pytest.raises(PoisonRequest, match="1 s"):
        table.check("a")
    clock[0] += 2
    table.check("a")
    assert not table.is_suspect("a")
    table.died("a", "third")
    table.lives("a")
    assert not table.is_suspect("a")
    table.died("a", "fourth")
    for i in range(5000):
        table.died(f"other {i}", "x")
    assert not table.is_suspect("a")
