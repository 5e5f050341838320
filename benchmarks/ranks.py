"""What trees gain from measured ranks: tokens of a target forward, at the same number of nodes.

    python -m benchmarks.ranks                     # the demo pair, its heads, the built-in prompts
    python -m benchmarks.ranks --nodes 32 --methods sequoia,stand

Ranks are counted on one half of the prompts, and the tree that is best for them drafts on the other
half; then the halves change places. Nothing is timed: the numbers are the same on every machine
with the same kernels' numerics.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paceline.bench.prompts import builtin_prompts
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.methods import METHODS
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.shapes.sequoia import FIRST_RATES

METHODS_WITH_RANKS = tuple(name for name, method in METHODS.items() if method.shape == "sequoia")
BATCH = 8


def generate(
    engine: Engine, prompts: Sequence[list[int]], config: SpeculationConfig, params: SamplingParams
) -> list[Session]:
    """Sessions of an engine that has learnt nothing yet, a few at a time."""
    fresh = engine.sibling()
    done: list[Session] = []
    for start in range(0, len(prompts), BATCH):
        done += fresh.generate(prompts[start : start + BATCH], params, config)
    return done


def accepted_length(sessions: Sequence[Session]) -> float:
    """Committed tokens of a target forward, of all sessions together."""
    tokens = sum(session.stats.num_tokens for session in sessions)
    return tokens / sum(session.stats.num_target_forwards for session in sessions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--methods", default=",".join(METHODS_WITH_RANKS))
    parser.add_argument("--prompts", type=int, default=64, help="of the built-in ones")
    parser.add_argument("--tokens", type=int, default=64, help="that each session generates")
    parser.add_argument("--nodes", type=int, help="of a tree; default: the method's")
    options = parser.parse_args()
    limit_threads(1)
    engine = load_engine()
    assert engine.tokenizer is not None
    known = builtin_prompts()
    chosen = known[:: max(1, len(known) // options.prompts)][: options.prompts]
    prompts = [engine.tokenizer.encode(prompt.text) for prompt in chosen]
    halves = prompts[::2], prompts[1::2]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    print("method     nodes  constant  measured  gain    ranks counted on the first half")
    for method in options.methods.split(","):
        config = SpeculationConfig(method=method, length="fixed", node_budget=options.nodes)
        constant: list[Session] = []
        measured: list[Session] = []
        first: tuple[float, ...] = ()
        for counted, used in (halves, halves[::-1]):
            (*_, last) = generate(engine, counted, config, params)
            assert last.ranks is not None
            first = first or last.ranks.rates()
            for sessions, rates in ((constant, FIRST_RATES), (measured, last.ranks.rates())):
                tree = config.model_copy(update={"rank_acceptance": rates})
                sessions += generate(engine, used, tree, params)
        assert [s.output_ids for s in constant] == [s.output_ids for s in measured]
        before, now = accepted_length(constant), accepted_length(measured)
        print(
            f"{method:10} {measured[0].config.node_budget:5}  {before:8.3f}  {now:8.3f}  "
            f"{now / before - 1:+6.1%}  {' '.join(f'{rate:.2f}' for rate in first)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
