"""Hostile messages for every RPC and every HTTP route, as many as one likes, with detectors.

The servers (a target, a drafter, a gateway with both ports) are a process of their own
(:func:`serve`), which prints every second its memory, its sessions and how late its event loop was.
:func:`assault` sends the messages beside an honest client, which checks its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import SpeculationConfig
from paceline.deployments.gateway import Relay
from paceline.deployments.openai.api import make_app
from paceline.deployments.openai.server import start_http
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.loading import limit_threads, load_runner
from paceline.rpc.access import Gate
from paceline.rpc.bridge import on_engine
from paceline.rpc.client import AsyncClient
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import ChatTemplate, load_tokenizer
from tests.deployments.http_serving import DirectLeases
from tests.rpc.fuzz import Fuzzer
from tests.rpc.soak import ROOT, resident_bytes
from tests.rpc.test_fuzz import DRAFTER_CALLS, TARGET_CALLS, fuzz, plain

KV_TOKENS = 8192
IDLE_S = 10.0  # on a busy machine a lane may be silent for a while
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HANG_S = 30.0
SLICE = 5000
"""Messages between two looks at what is left behind."""

POSTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import ", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/tokenize": {"prompt": "import "},
    "/detokenize": {"tokens": [105, 109]},
    "/v1/embeddings": {"input": "hi"},
}
GETS = (
    "/health", "/version", "/metrics", "/v1/models", "/v1/models/{name}", "/", "/docs",
    "/openapi.json",
)  # fmt: skip
KEYS = (
    "stream", "temperature", "top_p", "top_k", "n", "stop", "stop_token_ids", "seed", "logprobs",
    "logit_bias", "echo", "min_tokens", "ignore_eos", "structured_outputs", "response_format",
    "tools", "tool_choice", "prediction", "speculation", "chat_template_kwargs", "stream_options",
    "prompt_logprobs", "model", "suffix", "best_of", "add_special_tokens", "reasoning",
)  # fmt: skip


@dataclass
class Assault:
    """What happened.

    Attributes:
        codes: what the RPCs answered; statuses: what HTTP did.
        samples: what the servers printed, while they had time to.
        before, after: samples of idle servers: warm, after a tenth of the messages; at the end.
        num_honest: generations of the honest client, each with the same tokens.
    """

    codes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    num_honest: int = 0

    @property
    def num_messages(self) -> int:
        return self.codes.total() + self.statuses.total()

    @property
    def longest_stall_s(self) -> float:
        return max(float(sample["late"]) for sample in self.samples)


async def ask(port: int, fuzzer: Fuzzer) -> str:
    """One hostile request over HTTP; what came of it."""
    pick, chance = fuzzer.random.choice, fuzzer.random.random
    method, body = "POST", b""
    if chance() < 0.1:
        method, path = pick(("GET", "GET", "HEAD", "DELETE", "x")), pick(GETS)
    else:
        path = pick(list(POSTS))
        more = {pick(KEYS): fuzzer.json() for _ in range(pick((0, 0, 1, 2, 3)))}
        body = json.dumps(fuzzer.bend_json(POSTS[path] | more, 0.05)).encode()
        if chance() < 0.2:
            body = fuzzer.mutate(body)
    kind = "application/json" if chance() < 0.95 else pick(("text/plain", "", "multipart/x"))
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    leaves = chance() < 0.05  # without an end, the server may wait for a body of another length
    if chance() < 0.03:
        head, leaves = fuzzer.mutate(head), True
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + body)
        if leaves:
            writer.write_eof()
        async with asyncio.timeout(HANG_S):
            line = await reader.readline()
            while chance() > 0.02 and await reader.read(65536):  # some leave in the middle
                pass
    except TimeoutError:
        raise AssertionError(f"a hang after {head!r} {body[:400]!r}") from None
    except OSError:  # also "not connected", from an end that is written after the server's
        return "closed"
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    status = line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
    assert not status.startswith("5") or status == "501", f"{status} for {head!r} {body[:400]!r}"
    return status


async def _ask_often(port: int, count: int, seed: int, statuses: Counter[str]) -> None:
    fuzzer = Fuzzer(seed)
    for _ in range(count):
        statuses[await ask(port, fuzzer)] += 1


class _Servers:
    """The process of :func:`serve`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.deployments.hostile", "--model", str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses: dict[str, Any] = json.loads(self.process.stdout.readline())

    async def read(self, samples: list[dict[str, Any]]) -> None:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            samples.append(json.loads(line))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


async def _idle(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The first new sample without a session; fails if there is none in time."""
    seen, deadline = len(samples), time.monotonic() + 60
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        if len(samples) > seen + 2 and not samples[-1]["sessions"]:
            return samples[-1]
    raise AssertionError(f"sessions are left: {samples[-1:]}")


async def assault(folder: Path, num_messages: int, seed: int) -> Assault:
    """Send that many messages to servers over the model in ``folder``.

    Raises:
        AssertionError: a server died, hung, failed (INTERNAL, UNKNOWN, 500), or kept a session.
    """
    result, servers = Assault(), _Servers(folder)
    reading = asyncio.create_task(servers.read(result.samples))
    at = servers.addresses
    try:
        async with AsyncClient(at["gateway"], timeout=HANG_S) as client:
            honest = asyncio.create_task(_honest(client, result))
            slice_number = 0
            while result.num_messages < num_messages:
                count = min(SLICE, num_messages // 4 + 1)
                slice_seed = 1000 * seed + slice_number
                async with asyncio.TaskGroup() as group:
                    target = group.create_task(
                        fuzz(plain(at["gateway"]), TARGET_CALLS, count // 2, slice_seed)
                    )
                    drafter = group.create_task(
                        fuzz(plain(at["drafter"]), DRAFTER_CALLS, count // 5, slice_seed)
                    )
                    for lane in range(3):
                        lane_seed = 10 * slice_seed + lane
                        group.create_task(
                            _ask_often(at["http"], count // 10, lane_seed, result.statuses)
                        )
                result.codes += target.result() + drafter.result()
                assert servers.process.poll() is None, "the servers have died"
                assert not honest.done(), honest.exception()
                slice_number += 1
                if slice_number % 4 == 0:
                    rss = result.samples[-1]["rss"] / 2**20
                    print(f"{result.num_messages} messages, {rss:.0f} MB", flush=True)
                # Warm: bounded caches (prefixes, constraints, digests) are full, sooner or later.
                if not result.before and slice_number >= max(2, num_messages // (10 * SLICE)):
                    result.before = await _idle(result.samples)
            honest.cancel()
            await asyncio.gather(honest, return_exceptions=True)
            result.after = await _idle(result.samples)
    finally:
        servers.stop()
        await reading
    return result


async def _honest(client: AsyncClient, result: Assault) -> None:
    """Asks for the same again and again."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
    method = SpeculationConfig(method="draft_model", num_speculative_tokens=3)
    expected = None
    while True:
        tokens = (await client.complete("import os", params, method)).token_ids
        expected = expected or tokens
        assert tokens == expected
        result.num_honest += 1
        await asyncio.sleep(0.2)


async def serve(folder: str) -> None:
    """The servers: prints their addresses, then a line of JSON every second."""
    limit_threads(1)
    import paceline.rpc.access

    paceline.rpc.access.REFUSALS_PER_SECOND = 1e6  # tests/rpc/test_attacker.py has the queue
    runner = load_runner(Path(folder), kv_tokens=KV_TOKENS)
    small = load_runner(Path(folder), kv_tokens=KV_TOKENS, batch_invariant=False)
    target = ModelTarget(runner)
    drafters = {"draft_model": DraftModel(small)}
    thread = EngineThread(Engine(target, drafters, tokenizer=load_tokenizer(folder))).start()
    servicer = DraftServicer(
        DraftModel(load_runner(Path(folder), kv_tokens=KV_TOKENS)), name="draft_model",
        vocab_size=258, context_length=256, max_sessions=12, idle_timeout_s=IDLE_S,
    )  # fmt: skip
    model = ModelInfo(name="tiny", chat_template=ChatTemplate(TEMPLATE))
    leases = DirectLeases()
    engine_server = await start_server(
        engine=thread, model=model, idle_timeout_s=IDLE_S, lease_ended=leases.ended
    )
    leases.addresses = [engine_server.address]
    drafter_server = await start_server(drafter=servicer, idle_timeout_s=IDLE_S)

    gate = Gate()
    relay = Relay(leases, idle_timeout_s=IDLE_S, resume_s=1.0, gate=gate)
    gateway = await start_server(register=relay.register, gate=gate, idle_timeout_s=IDLE_S)
    http = await start_http(make_app(relay, gate))
    port = int(http.url.rpartition(":")[2])
    print(
        json.dumps({"gateway": gateway.address, "drafter": drafter_server.address, "http": port}),
        flush=True,
    )
    while True:
        late, until = 0.0, time.monotonic() + 1.0
        while (now := time.monotonic()) < until:
            await asyncio.sleep(0.02)
            late = max(late, time.monotonic() - now - 0.02)
        states = await on_engine(thread, lambda engine: engine.take_counters().states)
        left = states.total() + relay.num_sessions + gate.num_sessions + servicer.num_sessions
        sample = {
            "rss": resident_bytes(), "late": round(late, 3), "sessions": left,
            "kv_free": target.num_free, "drafter_free": small.num_free,
        }  # fmt: skip
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    asyncio.run(serve(parser.parse_args().model))
