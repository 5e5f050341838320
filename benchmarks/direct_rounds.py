"""What the gateway adds to a device's round, beside rounds that go to the target with a ticket.

    python -m benchmarks.direct_rounds

A target with the demo model, a gateway in front of it, and the device have a process each. Two
devices take turns, one through the gateway and one past it, with one round under way at a time. It
prints medians of the round trip without the target's own time, and of the whole round.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

from benchmarks.gateway_load import TOKEN, processor_name, start, write_tenants
from paceline.cluster.certs import make_certificates
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.deployments.config import DeploymentConfig, parse_config
from paceline.deployments.direct import DirectListener
from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Endpoint, Lease, Unleased
from paceline.deployments.session_ids import SessionIds
from paceline.engine import Engine, EngineThread
from paceline.loading import limit_threads, load_runner
from paceline.rpc.access import Gate
from paceline.rpc.client import open_channel, open_direct
from paceline.rpc.device import DeviceClient
from paceline.rpc.ladder import Mode
from paceline.rpc.server import start_server
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer

PROMPT = "def fibonacci(n):\n"


def configuration(certs: str | None) -> DeploymentConfig:
    """Of the deployment, with TLS where there are certificates."""
    args: dict[str, Any] = {"direct": {"enabled": True}}
    if certs:
        args["gateway"] = {"tls": {"cert": f"{certs}/server.crt", "key": f"{certs}/server.key"}}
    return parse_config(args)


async def serve_target(config: DeploymentConfig) -> tuple[str, Any]:
    """A target with both listeners. Returns its address, and what keeps it alive."""
    limit_threads(1)
    runner = load_runner(TARGET_DIR, kv_tokens=4096)
    engine = EngineThread(Engine(ModelTarget(runner), tokenizer=load_tokenizer(TARGET_DIR))).start()
    listener = DirectListener(config)
    server = await start_server(
        engine=engine, register=listener.register, lease_ended=listener.unused
    )
    assert server.verify is not None
    await listener.start(server.verify)
    return server.address, (server, listener)


async def serve_gateway(config: DeploymentConfig, target: str, tenants: str) -> tuple[str, Any]:
    """A gateway in front of it, with tenants and quotas. Returns as :func:`serve_target`."""
    count = 0

    async def lease() -> Lease:
        nonlocal count
        count += 1
        return cast(Lease, Unleased(Endpoint(target, 0, target, lease_id=str(count))))

    gate = Gate(tenants=Tenants(tenants))
    relay = Relay(
        lease, idle_timeout_s=60, resume_s=5, gate=gate, session_ids=SessionIds.random(),
        direct=config.direct,
    )  # fmt: skip
    tls = config.gateway.tls
    credentials = None if tls is None else tls.server().credentials()
    server = await start_server(register=relay.register, gate=gate, credentials=credentials)
    return server.address, server


class Device:
    """A device whose rounds take one of the ways.

    Attributes:
        travel, whole: seconds of each round, without the target's own time and with it.
    """

    def __init__(self, gateway: str, tls: dict[str, Path], *, direct: bool) -> None:
        self.travel: list[float] = []
        self.whole: list[float] = []
        self._direct = direct
        self._client = DeviceClient(
            [gateway],
            speculation=SpeculationConfig(method="prompt_lookup"),
            connect=partial(open_channel, token=TOKEN, **tls),
            modes=(Mode.DEVICE,),
            max_in_flight=1,
            direct=partial(open_direct, **tls) if direct else None,
        )
        self._prompt = load_tokenizer(TARGET_DIR).encode(PROMPT)

    def generate(self, num_tokens: int, seed: int, *, counts: bool) -> list[int]:
        """Tokens of one generation, whose rounds ``counts`` when they take this device's way."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=seed, ignore_eos=True)
        counters = self._client.target.counters
        before, started = counters.direct_rounds, time.perf_counter()
        for done, _ in enumerate(self._client.generate(self._prompt, params)):
            now = time.perf_counter()
            if counts and (counters.direct_rounds - before if self._direct else done) > 1:
                self.whole.append(now - started)
                self.travel.append(counters.travel_seconds[-1])
            started = time.perf_counter()
        assert (counters.direct_rounds > before) == self._direct
        return self._client.result.token_ids

    def close(self) -> None:
        self._client.close()


def measure(gateway: str, tls: dict[str, Path], repeats: int, num_tokens: int) -> None:
    devices = {
        name: Device(gateway, tls, direct=name == "directly")
        for name in ("through the gateway", "directly")
    }
    for turn in range(repeats + 1):  # the first warms up
        texts = [d.generate(num_tokens, turn, counts=turn > 0) for d in devices.values()]
        assert texts[0] == texts[1]
    print(f"{processor_name()}; {'TLS' if tls else 'plain text'}")
    for name, device in devices.items():
        low, _, high = quantiles(device.travel, n=4)
        print(
            f"{name:20} {1e3 * median(device.travel):.2f} ms travel "
            f"({1e3 * low:.2f} to {1e3 * high:.2f}), {1e3 * median(device.whole):.2f} ms a round; "
            f"{len(device.travel)} rounds"
        )
    through, direct = (median(device.travel) for device in devices.values())
    print(f"{'the gateway adds':20} {1e3 * (through - direct):.2f} ms")
    for device in devices.values():
        device.close()


async def serve(options: argparse.Namespace) -> None:
    config = configuration(options.certs)
    if options.serve == "target":
        address, _kept = await serve_target(config)
    else:
        address, _kept = await serve_gateway(config, options.target, options.tenants)
    print(address, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6, help="generations of each device")
    parser.add_argument("--tokens", type=int, default=100, help="of each generation")
    parser.add_argument("--tls", action="store_true", help="between device, gateway and target")
    parser.add_argument("--serve", choices=("target", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--tenants", help=argparse.SUPPRESS)
    parser.add_argument("--certs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        tenants, secure, tls = write_tenants(folder), [], {}
        if options.tls:
            make_certificates(Path(folder))
            secure, tls = ["--certs", folder], {"ca": Path(folder, "ca.crt")}
        this = partial(start, stack, "benchmarks.direct_rounds", *secure)
        target, _ = this("--serve", "target")
        gateway, _ = this("--serve", "gateway", "--target", target, "--tenants", str(tenants))
        measure(gateway, tls, options.repeats, options.tokens)


if __name__ == "__main__":
    main()
