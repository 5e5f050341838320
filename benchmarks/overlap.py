"""PEARL in one process: rounds whose drafts are made beside the target, and before it.

    python -m benchmarks.overlap                                  # the demo pair
    python -m benchmarks.overlap --target smollm2 --drafter FOLDER --threads 1

Both kinds of rounds run interleaved on the same prompts, and so does the choice between them that
`pearl` makes by itself. Tokens are compared with those of AR. It says how often a draft was ready,
and what a round took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from paceline.bench.prompts import builtin_prompts
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.lengths import pearl
from paceline.lengths.pearl import Overlap
from paceline.loading import limit_threads, load_engine
from paceline.models.threads import usable_cores
from paceline.sampling import SamplingParams
from paceline.session import Session


class Beside(Overlap):
    """All rounds overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._left = True, None


class InTurn(Overlap):
    """No rounds do."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._left = False, None


KINDS = {"in turn": InTurn, "beside": Beside, "chosen": Overlap}


def engines_of(engine: Engine) -> dict[str, Engine]:
    """An engine for AR, and one for each kind of round."""
    return {"ar": engine.sibling(), **{kind: engine.sibling() for kind in KINDS}}


def timed(
    engine: Engine, kind: str, prompt: Sequence[int], depth: int, params: SamplingParams
) -> tuple[Session, float]:
    """A session, and the seconds that it took."""
    config = SpeculationConfig(method="ar")
    if kind in KINDS:
        pearl.Overlap = KINDS[kind]  # type: ignore[misc]
        config = SpeculationConfig(method="pearl", length="pearl", num_speculative_tokens=depth)
    started = time.perf_counter()
    (session,) = engine.generate([prompt], params, config)
    return session, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--threads", type=int, help="of each model; default: what is fastest")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depths", default="2,5")
    options = parser.parse_args()
    if options.threads:
        limit_threads(options.threads)
    engine = load_engine(options.target, options.drafter)
    assert engine.tokenizer is not None
    known = builtin_prompts()
    chosen = known[:: max(1, len(known) // options.prompts)][: options.prompts]
    prompts = [engine.tokenizer.encode(prompt.text) for prompt in chosen]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    print(f"{usable_cores()}; tokens per second over AR's: median (quartiles)")
    for depth in map(int, options.depths.split(",")):
        engines = engines_of(engine)
        speed: dict[str, list[float]] = {kind: [] for kind in KINDS}
        rounds: dict[str, list[Session]] = {kind: [] for kind in KINDS}
        for i, prompt in enumerate((prompts[0], *prompts)):
            (ar, ar_s), *others = [
                timed(each, kind, prompt, depth, params) for kind, each in engines.items()
            ]
            for kind, (session, seconds) in zip(KINDS, others, strict=True):
                assert session.output_ids == ar.output_ids
                if i:  # the first prompt warms up
                    speed[kind].append(ar_s / seconds)
                    rounds[kind].append(session)
        for kind in KINDS:
            low, middle, high = statistics.quantiles(speed[kind], n=4)
            stats = [session.stats for session in rounds[kind]]
            count = sum(each.num_rounds for each in stats)
            drafted = sum(each.drafted_by_depth[0] for each in stats if each.drafted_by_depth)
            seconds = sum(each.draft_seconds + each.verify_seconds for each in stats)
            print(
                f"gamma {depth}  {kind:8} {middle:5.2f} ({low:.2f}-{high:.2f})  "
                f"{sum(each.num_tokens for each in stats) / count:.2f} tokens and "
                f"{1e3 * seconds / count:.2f} ms a round, {drafted / count:.0%} with a draft",
                flush=True,
            )


if __name__ == "__main__":
    main()
