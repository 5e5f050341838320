"""Is any method slower than AR? All lossless methods of the catalogue, interleaved with AR.

    PACELINE_KERNELS=portable python -m benchmarks.never_slower
    python -m benchmarks.never_slower --linear

With the kernels' slowest variant a forward over n rows takes nearly n times as long as one over a
single row, so hardly any draft pays for its verification. ``--linear`` enforces this on any
machine: it stretches the target's decoding forwards to a fixed time for each row.

Every method runs with its defaults. Seconds are processor time on one thread, so that other work on
the machine does not count. A method's speed is the median over pairs of runs, on the same prompt in
the same repetition. Exits with 1 if a method has less than ``--least`` of AR's speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.loading import limit_threads, load_engine
from paceline.methods import METHODS
from paceline.models.base import ModelRunner, Segment
from paceline.profile import LoadCosts
from paceline.request import Request
from paceline.sampling import SamplingParams


def make_linear(runner: ModelRunner, row_seconds: float) -> None:
    """Stretch the forwards that decode to ``row_seconds`` for each row, in shares of the layers."""
    forward, chain = runner.forward, getattr(runner, "greedy_chain", None)
    num_layers = runner.config.num_layers  # type: ignore[attr-defined]

    def rows_of(segment: Segment) -> float:
        if segment.logits == "none":
            return 0.0  # a prompt
        layers = num_layers if segment.layers is None else len(segment.layers)
        return segment.num_rows * layers / num_layers

    def stretched(segments: Sequence[Segment], *arguments: Any) -> Any:
        started = time.thread_time()
        result = forward(segments, *arguments)
        _wait(started, row_seconds * sum(map(rows_of, segments)))
        return result

    def stretched_chain(sequences: Any, given: Any, num_steps: int, *arguments: Any) -> Any:
        started = time.thread_time()
        result = chain(sequences, given, num_steps, *arguments)  # type: ignore[misc]
        layers = arguments[0] if arguments and arguments[0] else num_layers
        rows = sum(map(len, given)) + (num_steps - 1) * len(given)
        _wait(started, row_seconds * rows * layers / num_layers)
        return result

    runner.forward = stretched  # type: ignore[method-assign]
    if chain is not None:
        runner.greedy_chain = stretched_chain  # type: ignore[attr-defined]


def _wait(started: float, seconds: float) -> None:
    while time.thread_time() - started < seconds:
        pass


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, repetitions: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """AR's seconds over each method's, for each prompt and repetition; rounds that drafted."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    methods = [
        name
        for name, method in METHODS.items()
        if method.lossless and name != "ar" and engine.refusal(method) is None
    ]
    ratios: dict[str, list[float]] = defaultdict(list)
    drafts: dict[str, int] = defaultdict(int)

    def seconds(prompt: Sequence[int], method: str) -> tuple[float, list[int]]:
        prediction = tuple(prompt) if METHODS[method].reads_prediction else ()
        started = time.thread_time()
        session = engine.submit(
            Request(prompt, params, SpeculationConfig(method=method), prediction=prediction)
        )
        while not session.finished:
            engine.step()
        spent = time.thread_time() - started
        if session.error is not None:
            raise session.error
        drafts[method] += session.stats.drafted_by_depth[0] if session.stats.num_drafted else 0
        return spent, session.output_ids

    for _ in range(2):
        seconds(prompts[0], "ar")
    for repetition in range(repetitions):
        for number, prompt in enumerate(prompts):
            for place in range(len(methods)):
                method = methods[(place + repetition + number) % len(methods)]
                ar, expected = seconds(prompt, "ar")
                spent, output = seconds(prompt, method)
                if output != expected:
                    raise AssertionError(f"{method}: other tokens than AR")
                ratios[method].append(ar / spent)
    return ratios, drafts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--linear",
        action="store_true",
        help="stretch decoding forwards to a fixed time for each row",
    )
    parser.add_argument("--row-ms", type=float, default=2.0, help="milliseconds of a stretched row")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each category")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="tokens per prompt, at most")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.95, help="least share of AR's speed")
    options = parser.parse_args()
    limit_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PACELINE_CACHE_DIR"] = cache  # measure costs again
        engine = load_engine(limits=EngineLimits(prefix_cache=False))
        if options.linear:
            make_linear(engine.local_target.runner, options.row_ms / 1e3)
        assert engine.tokenizer is not None
        prompts = [
            engine.tokenizer.encode(prompt.text)[-options.prompt_tokens :]
            for prompt in limit_per_category(builtin_prompts(), options.limit)
        ]
        costs = engine.length_context.costs
        assert costs is not None
        assert isinstance(engine.length_context.measure, LoadCosts)
        print(f"costs {engine.length_context.measure.source}; ms of a forward by rows:")
        print("  " + "  ".join(
            f"{rows}: {1e3 * s:.2f}"
            for rows, s in zip(costs.nodes, costs.verify_seconds[0], strict=True)
        ))  # fmt: skip
        ratios, drafts = measure(engine, prompts, options.max_tokens, options.repetitions)
    slow = []
    for method, found in sorted(ratios.items(), key=lambda item: median(item[1])):
        middle = median(found)
        print(f"{method:30} {middle:5.2f} x AR  ({min(found):.2f} to {max(found):.2f}), "
              f"{drafts[method]} rounds drafted")  # fmt: skip
        if middle < options.least:
            slow.append(method)
    print(
        f"{len(slow)} of {len(ratios)} methods below {options.least}: {', '.join(slow) or 'none'}"
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
