"""The engine under load: goodput against AR, prefill beside decoding, batch strategies, overload.

    python benchmarks/load.py goodput      # never below 0.98 of AR at any concurrency?
    python benchmarks/load.py prefill      # time between tokens while a long prompt comes in
    python benchmarks/load.py strategies   # ragged, same_length, pad, split at batch 8
    python benchmarks/load.py prefixes     # time to first token with and without the prefix cache
    python benchmarks/load.py clients --target smollm2 --prompts spec_bench.jsonl
                                           # a deployment's defaults beside AR, many clients

All of it runs in one process on one engine's models, interleaved, and prints medians with spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.batching import Batching
from paceline.bench.prompts import builtin_prompts
from paceline.bench.suites import read_prompts
from paceline.chat import encode_prompt, template_of
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.deployments.config import LimitsConfig
from paceline.engine import Engine, EngineLimits
from paceline.errors import ResourceExhausted
from paceline.loading import limit_threads
from paceline.memory import keep_loaded
from paceline.model_names import resolve_model
from paceline.profile import LoadCosts
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget

AR = SpeculationConfig(method="ar")


def sibling(engine: Engine, **limits: Any) -> Engine:
    """A fresh engine over the same models, with other limits."""
    names = ("draft_model",) if "draft_model" in engine.drafters else ()
    given = {name: engine.drafters[name] for name in names}
    limits = {"prefix_cache": False, **limits}
    return Engine(
        ModelTarget(engine.local_target.runner), given, tokenizer=engine.tokenizer,
        eos_token_ids=engine.eos_token_ids, limits=EngineLimits(**limits),
    )  # fmt: skip


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(prompt.text) for prompt in builtin_prompts()]
    return [ids[i % len(ids)] for i in range(count)]


def closed_loop(
    engine: Engine, prompts: Sequence[list[int]], config: SpeculationConfig, concurrency: int,
    params: SamplingParams,
) -> tuple[float, list[list[int]]]:  # fmt: skip
    """Tokens a second with ``concurrency`` requests at any time, and the tokens of each."""
    waiting, running, done = list(enumerate(prompts)), {}, {}
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            i, prompt = waiting.pop(0)
            running[i] = engine.submit(Request(prompt, params, config))
        engine.step()
        for i in [i for i, session in running.items() if session.finished]:
            done[i] = running.pop(i)
    seconds = time.perf_counter() - started
    sessions: list[Session] = [done[i] for i in sorted(done)]
    return sum(s.stats.num_tokens for s in sessions) / seconds, [s.output_ids for s in sessions]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.2f} ({min(values):.2f}-{max(values):.2f})"


def goodput(engine: Engine, options: argparse.Namespace) -> None:
    """Ratios of neighbours in time: AR, method, AR, method, ..."""
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    print("concurrency  method           tok/s AR   x AR, median (range)   identical")
    for method in options.methods:
        config = SpeculationConfig(method=method, length="goodput")
        for concurrency in options.concurrency:
            prompts = prompts_of(engine, max(8, 2 * concurrency))
            # An engine learns costs and acceptance rates only once.
            fast, plain = sibling(engine), sibling(engine)
            closed_loop(fast, prompts, config, concurrency, params)
            ratios, rates, same = [], [], True
            for _ in range(options.repetitions):
                rate, expected = closed_loop(plain, prompts, AR, concurrency, params)
                ours, tokens = closed_loop(fast, prompts, config, concurrency, params)
                same &= tokens == expected
                rates.append(rate)
                ratios.append(ours / rate)
            print(
                f"{concurrency:11d}  {method:15} {statistics.median(rates):9.0f}  "
                f"{spread(ratios):>22}   {'yes' if same else 'NO'}"
            )


def numbers(engine: Engine, count: int, step: int = 7) -> list[int]:
    """Any tokens."""
    return [step * i % (engine.target.vocab_size - 16) + 16 for i in range(count)]


def longer(model: Path, folder: str, context: int) -> str:
    """The same model with a longer context: the quality of its output there does not matter."""
    for file in model.iterdir():
        if file.name != "config.json":
            (Path(folder) / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = context
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def prefill(engine: Engine, options: argparse.Namespace) -> None:
    """Four sessions decode; a long prompt comes in."""
    length = options.length
    with tempfile.TemporaryDirectory() as folder:
        engine = paceline.load_engine(longer(Path(options.target or TARGET_DIR), folder, 9216))
    long = numbers(engine, length)
    print(f"prompt of {length} tokens beside 4 sessions")
    print("prefill_chunk  stretch  before ms   during ms (p50, max)   first token of the prompt s")
    for chunk, stretch in [(chunk, s) for chunk in options.chunks for s in (None, 4.0)]:
        fresh = sibling(engine, prefill_chunk=chunk, prefill_stretch=stretch)
        params = SamplingParams(max_tokens=1200, ignore_eos=True)
        running = [fresh.submit(Request(p, params, AR)) for p in prompts_of(engine, 4)]
        while any(s.stats.num_tokens < 20 for s in running):
            fresh.step()
        gaps: dict[str, list[float]] = {"before": [], "during": []}
        for _ in range(100):
            gaps["before"].append(_timed(fresh))
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        session = fresh.submit(Request(long, one, AR))
        while not session.finished:
            assert not all(s.finished for s in running), "more tokens are needed"
            gaps["during"].append(_timed(fresh))
        first = (session.stats.first_token_at or 0.0) - session.stats.started_at
        during = gaps["during"]
        print(
            f"{chunk:13d}  {stretch or '-':>7}  {1e3 * statistics.median(gaps['before']):9.2f}   "
            f"{1e3 * statistics.median(during):7.2f}, {1e3 * max(during):7.2f}   {first:9.2f}"
        )
        for each in running:
            fresh.cancel(each.session_id)


def _timed(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def strategies(engine: Engine, options: argparse.Namespace) -> None:
    """Batch 8 from a pool of 24, drafts of the lengths that the drafter chooses."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    prompts = prompts_of(engine, 24)
    config = SpeculationConfig(method="draft_model", length="confidence")
    names = ("ragged", "same_length", "no pool", "pad", "split")
    engines = {
        name: sibling(
            engine, batch_strategy="same_length" if name == "no pool" else name, batch_size=8
        )
        for name in names
    }
    # EXSPEC's groups without its pool: of the sessions that would go anyway.
    engines["no pool"].scheduler.batching = Batching("same_length", 8, window=8)
    rates: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(options.repetitions):
        for name, each in engines.items():
            rate, tokens[name] = closed_loop(each, prompts, config, 24, params)
            rates[name].append(rate)
    print(
        "strategy     tok/s, median (range)       x ragged  grouped  realigned  KV padding  padding"
        "  identical"
    )
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates["ragged"], strict=True))
        counters = engines[name].scheduler.batching.counters
        print(
            f"{name:11} {spread(rates[name]):>26}  {ratio:8.2f}  "
            f"{counters.num_grouped / counters.num_steps:7.0%}  "
            f"{counters.num_realigned / counters.num_steps:9.1f}  "
            f"{counters.padding_share:10.1%}  "
            f"{engines[name].local_target.num_padding / counters.num_steps:7.1f}  "
            f"{'yes' if tokens[name] == tokens['ragged'] else 'NO'}"
        )


def prefixes(engine: Engine, options: argparse.Namespace) -> None:
    """Prompts that share 512 tokens and have 32 of their own, against distinct prompts."""
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    shared = numbers(engine, 512)
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repetitions):
        for cache in (False, True):
            fresh = sibling(engine, prefix_cache=cache)
            fresh.generate([shared], one, AR)
            for kind in ("shared", "distinct"):
                for i in range(4):
                    own = numbers(engine, 32, 11 + i)
                    begin = shared if kind == "shared" else numbers(engine, 512, 17 + i)
                    (session,) = fresh.generate([[*begin, *own]], one, AR)
                    first = (session.stats.first_token_at or 0.0) - session.stats.started_at
                    name = f"{kind}, cache {'on' if cache else 'off'}"
                    seconds.setdefault(name, []).append(1e3 * first)
            engine.local_target.runner.prefixes.evict(10**9)  # type: ignore[attr-defined]
    for name, values in sorted(seconds.items()):
        print(f"{name:20} first token after ms {spread(values)}")


def clients(engine: Engine, options: argparse.Namespace) -> None:
    """Many clients, each with one request at a time, under the limits of a deployment.

    A client that is refused comes back after the time that it was told, as OpenAI's clients do; the
    time to its first token counts from its first try. Each method has an engine with a model and a
    prefix cache of its own, as a deployment, and each repetition the file's next prompts: where a
    prompt comes again, lookups would find its whole answer.
    """
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    methods = {"ar": AR, "auto": SpeculationConfig(method="auto")}
    engines = {}
    for name, config in methods.items():
        loaded = paceline.load_engine(options.target, options.drafter, dtype="auto")
        engines[name] = each = Engine(
            loaded.target, loaded.drafters.given,
            tokenizer=loaded.tokenizer, eos_token_ids=loaded.eos_token_ids,
            limits=LimitsConfig().engine_limits(), length_context=loaded.length_context,
            heads=loaded.drafters.heads,
        )  # fmt: skip
        each.intake.prepare(config)
        if name != "ar" and isinstance(each.length_context.measure, LoadCosts):
            each.length_context.measure.prepare()  # as a target replica does before it is ready
    keep_loaded()
    print(
        "clients  tok/s AR   x AR, median (range)   by processor time    first token s, AR: p50 p99"
        "   auto: p50 p99   refused AR, auto  identical"
    )
    for count in options.concurrency:
        size = max(8, 2 * count)
        prompts = _chat_prompts(engine, options, options.repetitions * size)
        ratios, work, rates, same = [], [], [], True
        waits: dict[str, list[float]] = {"ar": [], "auto": []}
        refused: dict[str, int] = {"ar": 0, "auto": 0}
        for repetition in range(options.repetitions):
            tokens, speed, work_speed = {}, {}, {}
            these = prompts[repetition * size : (repetition + 1) * size]
            for name in sorted(methods, reverse=bool(repetition % 2)):
                answers = _serve_clients(engines[name], these, methods[name], count, params)
                tokens[name], speed[name], work_speed[name], first, num_refused = answers
                waits[name] += first
                refused[name] += num_refused
            same &= tokens["ar"] == tokens["auto"]
            rates.append(speed["ar"])
            ratios.append(speed["auto"] / speed["ar"])
            work.append(work_speed["auto"] / work_speed["ar"])
        quantiles = [np.quantile(waits[name], (0.5, 0.99)) for name in ("ar", "auto")]
        shown = "   ".join(f"{p50:13.2f} {p99:6.2f}" for p50, p99 in quantiles)
        print(
            f"{count:7d}  {statistics.median(rates):8.0f}  {spread(ratios):>22}  "
            f"{spread(work):>18}  {shown}  {refused['ar']:8d} {refused['auto']:4d}   "
            f"{'yes' if same else 'NO'}", flush=True,
        )  # fmt: skip


def _chat_prompts(engine: Engine, options: argparse.Namespace, count: int) -> list[list[int]]:
    """Different prompts, as far as the file has them."""
    if options.prompts is None:
        return prompts_of(engine, count)
    assert engine.tokenizer is not None
    template = template_of(resolve_model(options.target or "demo"), None)
    texts = [prompt.text for prompt in read_prompts(options.prompts)]
    ids = [encode_prompt(engine.tokenizer, template, text) for text in texts]
    short = [each for each in ids if len(each) <= options.prompt_tokens]
    return [short[i % len(short)] for i in range(count)]


def _serve_clients(
    engine: Engine, prompts: Sequence[list[int]], config: SpeculationConfig, count: int,
    params: SamplingParams,
) -> tuple[list[list[int]], float, float, list[float], int]:  # fmt: skip
    """Tokens of each request, tokens a second and a processor second, seconds to the first tokens,
    refused tries.

    Speeds are those while all clients have a request. Later on fewer and fewer are left, and how
    long the last one waits after it was refused is chance.
    """
    waiting = deque((i, prompt) for i, prompt in enumerate(prompts))
    began: dict[int, float] = {}
    later: dict[int, float] = {}  # request -> when it is tried again
    running: dict[int, Session] = {}
    done: dict[int, Session] = {}
    num_refused = 0
    started, began_work, speeds = time.perf_counter(), time.process_time(), (0.0, 0.0)
    while len(done) < len(prompts):
        now = time.perf_counter()
        trying = [i for i, at in later.items() if at <= now]
        while waiting and len(running) + len(later) < count:
            i, _ = waiting.popleft()
            began[i] = later[i] = now
            trying.append(i)
        for i in trying:
            try:
                running[i] = engine.submit(Request(prompts[i], params, config))
                del later[i]
            except ResourceExhausted as error:
                num_refused += 1
                later[i] = now + error.retry_after_s
        if engine.has_work:
            engine.step()
        for i in [i for i, session in running.items() if session.finished]:
            done[i] = running.pop(i)
            assert done[i].error is None
        if not speeds[0] and not waiting and len(running) + len(later) < count:
            so_far = sum(s.stats.num_tokens for s in (*done.values(), *running.values()))
            seconds, work = time.perf_counter() - started, time.process_time() - began_work
            speeds = so_far / seconds, so_far / work
    sessions = [done[i] for i in range(len(prompts))]
    first = [(s.stats.first_token_at or 0.0) - began[i] for i, s in enumerate(sessions)]
    return [s.output_ids for s in sessions], *speeds, first, num_refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["goodput", "prefill", "strategies", "prefixes", "clients"])
    parser.add_argument("--target", help="model folder; default: the demo pair")
    parser.add_argument("--drafter")
    parser.add_argument("--methods", nargs="+", default=["draft_model", "prompt_lookup"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[256])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--prompts", help="for clients: a file of a suite, by default built in")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="longest of these prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="for clients")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    limit_threads(1)
    dtype = "auto" if options.what == "clients" else "float32"
    engine = paceline.load_engine(options.target, options.drafter, dtype=dtype)
    globals()[options.what](engine, options)


if __name__ == "__main__":
    main()
