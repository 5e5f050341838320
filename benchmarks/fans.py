"""What drafts for the likeliest verdicts save: tokens a second with fans over those without.

    python -m benchmarks.fans
    python -m benchmarks.fans --where device --rtt-ms 20 --temperature 1

*Actors*: the demo target in this process, which waits `--verify-ms` before each forward as for a
larger one, and two drafter processes, one with fans and one without. *Device*: the draft model in
this process, the demo target in another one behind a link with `--rtt-ms`. Both take turns, prompt
by prompt, and their tokens must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.netem import Link, Netem
from benchmarks.replica import Replica
from paceline.bench.prompts import builtin_prompts
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.engine import Engine
from paceline.loading import limit_threads, load_drafter, load_runner
from paceline.rpc.device import DeviceClient
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.ladder import Mode
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from paceline.types import Verification

FANS = (False, True)
Generate = Callable[[Sequence[int], SamplingParams], Sequence[int]]


def serve(fans: bool) -> None:
    """A drafter's process: print the address, and serve until it is killed."""

    async def run() -> None:
        limit_threads(1)
        drafter = load_drafter(DRAFTER_DIR, TARGET_DIR)
        servicer = DraftServicer(
            drafter, name="draft_model", vocab_size=drafter.vocab_size, fans=fans
        )
        server = await start_server(drafter=servicer)
        print(server.address, flush=True)
        await server.server.wait_for_termination()

    asyncio.run(run())


class SlowTarget(ModelTarget):
    """Waits before each forward."""

    wait_s = 0.0

    def verify(self, *arguments: Any, **options: Any) -> list[Verification]:
        time.sleep(self.wait_s)
        return super().verify(*arguments, **options)


@contextmanager
def actors(wait_s: float, method: SpeculationConfig) -> Iterator[dict[bool, Generate]]:
    """Generates with drafters in other processes."""
    with ExitStack() as stack:
        runner = load_runner(TARGET_DIR)
        engines = {}
        for fans in FANS:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fans", "--serve", str(int(fans))],
                stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1],
            )  # fmt: skip
            stack.callback(process.kill)
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            remote = stack.enter_context(RemoteDrafter(address, vocab_size=runner.vocab_size))
            assert remote.wait_ready(60.0)
            target = SlowTarget(runner)
            target.wait_s = wait_s
            engines[fans] = Engine(target, {"draft_model": remote})

        def generate(fans: bool, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
            (session,) = engines[fans].generate([prompt], params, method)
            return session.output_ids

        yield {fans: partial(generate, fans) for fans in FANS}


@contextmanager
def device(rtt_s: float, method: SpeculationConfig) -> Iterator[dict[bool, Generate]]:
    """Generates with a drafter here and the target behind a link."""
    with ExitStack() as stack:
        replica = stack.enter_context(Replica(TARGET_DIR))
        link = stack.enter_context(Netem(replica.address, Link(rtt=rtt_s)))
        clients = {
            fans: stack.enter_context(
                DeviceClient(
                    [link.address], {"draft_model": load_drafter(DRAFTER_DIR, TARGET_DIR)},
                    speculation=method, modes=(Mode.DEVICE,), fans=fans,
                )
            )
            for fans in FANS
        }  # fmt: skip

        def generate(fans: bool, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
            return [t for done in clients[fans].generate(prompt, params) for t in done.token_ids]

        yield {fans: partial(generate, fans) for fans in FANS}


def compare(ways: dict[bool, Generate], options: argparse.Namespace) -> list[float]:
    """Tokens a second with fans over those without, prompt by prompt."""
    tokenizer = load_tokenizer(TARGET_DIR)
    prompts = [tokenizer.encode(prompt.text) for prompt in builtin_prompts()[: options.prompts]]
    warm = SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=99)
    for generate in ways.values():
        generate(prompts[0], warm)
    ratios = []
    for turn in range(options.repeats):
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature,
                seed=1000 * turn + number,
            )  # fmt: skip
            seconds: dict[bool, float] = {}
            texts = []
            for fans in FANS if (turn + number) % 2 else FANS[::-1]:
                started = time.perf_counter()
                texts.append(list(ways[fans](prompt, params)))
                seconds[fans] = time.perf_counter() - started
            if texts[0] != texts[1]:
                sys.exit(f"prompt {number}: other tokens with fans")
            ratios.append(seconds[False] / seconds[True])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--where", nargs="+", choices=["actors", "device"],
                        default=["actors", "device"])  # fmt: skip
    parser.add_argument("--verify-ms", type=float, nargs="+", default=[0.0, 5.0, 20.0])
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[5.0, 20.0, 50.0])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(bool(options.serve))
    limit_threads(1)
    method = SpeculationConfig(
        method="draft_model", length="fixed", num_speculative_tokens=options.length
    )
    for where in options.where:
        times = options.verify_ms if where == "actors" else options.rtt_ms
        for milliseconds in times:
            way = actors if where == "actors" else device
            with way(milliseconds / 1e3, method) as ways:
                ratios = sorted(compare(ways, options))
            what = "verification waits" if where == "actors" else "round trip"
            print(
                f"{where:7} {what} {milliseconds:3.0f} ms: {median(ratios):.2f} "
                f"({ratios[len(ratios) // 4]:.2f}-{ratios[3 * len(ratios) // 4]:.2f}), "
                f"mean {geometric_mean(ratios):.2f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
