"""What it costs to draft with a head away from its target: bytes of states, time and acceptance.

    python -m benchmarks.states_over_the_wire
    python -m benchmarks.states_over_the_wire --model smollm2 --methods eagle3,dspark

The head drafts beside the target, and in a process of its own with the target's states in each
encoding, in turns, for the same prompts and tokens. It prints bytes of states for each committed
token, the mean accepted length, the time of a round, and what the way adds: seconds of a round that
are neither verification nor the head's own work. All tokens are compared with those of AR.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.gateway_load import processor_name, start
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine, load_head_drafter
from paceline.methods import METHODS
from paceline.model_names import resolve_model
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import start_server
from paceline.rpc.states import ENCODINGS
from paceline.sampling import SamplingParams
from paceline.session import Session

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\nimport argparse\n\ndef main():\n",
    "Tom has 12 marbles. He gives 5 of them to his sister and buys",
)
BESIDE = "beside the target"
SWITCH_S = 0.0005
"""Seconds that a thread waits for the interpreter, as in a target replica."""


@dataclass
class Way:
    """One way to draft, and what its rounds took.

    Attributes:
        added: milliseconds of each generation's mean round that its draft was waited for, less the
            head's own work.
        rounds: milliseconds of each generation's mean round.
    """

    engine: Engine
    remote: RemoteDrafter | None = None
    added: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    states_bytes: int = 0

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationConfig
    ) -> Session:
        """One generation, which counts."""
        counters = None if self.remote is None else self.remote.counters
        drafted = 0.0 if counters is None else counters.draft_seconds
        started = time.perf_counter()
        (session,) = self.engine.generate([prompt], params, speculation)
        seconds, stats = time.perf_counter() - started, session.stats
        self.num_tokens += stats.num_tokens
        self.num_rounds += stats.num_rounds
        self.states_bytes += stats.states_bytes
        self.rounds.append(1e3 * seconds / stats.num_rounds)
        if counters is not None:
            waited = stats.draft_seconds - (counters.draft_seconds - drafted)
            self.added.append(1e3 * waited / stats.num_rounds)
        return session


@contextmanager
def ways(options: argparse.Namespace, method: str) -> Iterator[dict[str, Way]]:
    """The head beside the target, and in a process of its own for each encoding."""
    beside = load_engine(options.model, heads=options.heads)
    size, found = beside.target.vocab_size, {BESIDE: Way(beside)}
    kind = METHODS[method].drafter
    with ExitStack() as stack:
        for encoding in ENCODINGS:
            heads = ["--heads", options.heads] if options.heads else []
            address, _ = start(
                stack, "benchmarks.states_over_the_wire", "--serve", encoding,
                "--methods", method, "--model", options.model, *heads,
            )  # fmt: skip
            remote = stack.enter_context(RemoteDrafter(address, vocab_size=size, deadline_s=30))
            if not remote.wait_ready(60):
                raise SystemExit("the drafter does not answer")
            engine = Engine(beside.target, {kind: remote}, tokenizer=beside.tokenizer)
            found[encoding] = Way(engine, remote)
        yield found


def measure(options: argparse.Namespace, method: str) -> None:
    speculation = SpeculationConfig(method=method, length="fixed")
    with ways(options, method) as found:
        tokenizer = found[BESIDE].engine.tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.encode(text) for text in PROMPTS]
        for turn in range(options.repeats + 1):
            params = SamplingParams(
                max_tokens=options.tokens, temperature=options.temperature, seed=turn,
                ignore_eos=True,
            )  # fmt: skip
            for prompt in prompts:
                (ar,) = found[BESIDE].engine.generate(
                    [prompt], params, SpeculationConfig(method="ar")
                )
                for way in found.values():
                    session = way.generate(prompt, params, speculation)
                    assert session.output_ids == ar.output_ids
            if turn == 0:  # warms up
                for name, way in found.items():
                    found[name] = Way(way.engine, way.remote)
        print(f"{method}, temperature {options.temperature:g}")
        for name, way in found.items():
            added = f", {median(way.added):.2f} ms of it the way" if way.added else ""
            print(
                f"  {name:17} {way.states_bytes / way.num_tokens:7.0f} B a token; "
                f"mean accepted length {way.num_tokens / way.num_rounds:.3f}; "
                f"{median(way.rounds):.2f} ms a round{added}"
            )


async def serve(options: argparse.Namespace) -> None:
    limit_threads(1)
    kind = METHODS[options.methods].drafter
    head = load_head_drafter(kind, resolve_model(options.model), options.heads, kv_tokens=4096)
    hosted = DraftServicer(head, name=kind, vocab_size=head.target.vocab_size, states=options.serve)
    server = await start_server(drafter=hosted)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="folder or name of the target")
    parser.add_argument("--heads", help="folder of its heads")
    parser.add_argument("--methods", default="medusa,eagle,moa,dspark")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5, help="generations of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each generation")
    parser.add_argument("--serve", choices=ENCODINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return
    limit_threads(1)
    sys.setswitchinterval(SWITCH_S)
    print(processor_name())
    for method in options.methods.split(","):
        measure(options, method)


if __name__ == "__main__":
    main()
