"""The cost of drafting with the drafters that look tokens up instead of running a model.

The demo target continues a prompt of `--context` tokens of the standard library's source. Its
context is stretched; the quality of its output there does not matter. The benchmark times the
drafter's own calls of each round, `propose` and `observe`, without the engine around them; reading
the prompt is a call before the first round.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import time
from collections.abc import Callable
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.load import longer
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.loading import limit_threads, load_engine
from paceline.sampling import SamplingParams

ROWS = (
    "prompt_lookup", "suffix_decoding", "suffix_decoding_tree", "sam_decoding", "copyspec",
    "lookahead", "aggressive", "token_recycling", "sam_token_recycling", "stand", "aded",
)  # fmt: skip


class Timed:
    """A drafter that times its calls."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.seconds: dict[str, list[float]] = {"open": [], "propose": [], "observe": []}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._drafter, name)
        return self._timing(name, found) if name in self.seconds else found

    def _timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[name].append(time.perf_counter() - started)

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4000, help="tokens of the prompt")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--methods", default=",".join(ROWS), help="separated by commas")
    options = parser.parse_args()
    limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = longer(TARGET_DIR, folder, options.context + options.max_tokens + 100)
        engine = load_engine(target, kv_tokens=2 * (options.context + options.max_tokens + 100))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(inspect.getsource(argparse))[: options.context]
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    print(f"{'method':22}{'rounds':>8}{'drafted':>9}{'p50 ms':>9}{'mean ms':>9}{'p99 ms':>9}"
          f"{'prompt ms':>11}")  # fmt: skip
    for method in options.methods.split(","):
        config = SpeculationConfig(method=method, length="fixed")
        session_engine = engine.sibling()
        name = session_engine.catalogue[method].drafter
        timed = Timed(session_engine.local_drafter(name))
        session_engine.drafters[name] = timed
        (session,) = session_engine.generate([prompt], params, config)
        found = timed.seconds
        rounds = [1e3 * sum(both) for both in zip(found["propose"], found["observe"], strict=False)]
        stats = session.stats
        print(f"{method:22}{stats.num_rounds:8}{stats.num_drafted / stats.num_rounds:9.1f}"
              f"{median(rounds):9.3f}{mean(rounds):9.3f}{quantiles(rounds, n=100)[-1]:9.3f}"
              f"{1e3 * sum(found['open']):11.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
