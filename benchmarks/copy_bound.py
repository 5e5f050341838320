"""How fast is perfect copying on each category of the built-in prompts?

A copier that knows AR's output proposes, in each round, the longest continuation that occurs in the
text so far and that the target accepts as a whole. Real drafters find a place to
copy from by the last few tokens; ``match`` is how many of them must precede the copy. No drafter
with that match can have more accepted tokens, or verify fewer tokens for them, and this one
searches nothing. It runs through the real engine, in turn with AR, so its speedup bounds that of
every such drafter on these prompts. The last column copies from the prompt alone: it shows how much
of the prompt the target repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence

from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft, Need, Outcome

AR = SpeculationConfig(method="ar")
LONGEST = 16
COPYING = SpeculationConfig(method="prompt_lookup", num_speculative_tokens=LONGEST)
MATCHES = 0, 1, 2, 3


def longest_copy(text: Sequence[int], suffix: Sequence[int], future: Sequence[int]) -> int:
    """Length of the longest start of ``future`` that follows ``suffix`` somewhere in ``text``."""
    best, match = 0, len(suffix)
    for start in range(match, len(text)):
        if text[start - match : start] == suffix:
            length = 0
            while (
                length < min(LONGEST, len(future), len(text) - start)
                and text[start + length] == future[length]
            ):
                length += 1
            best = max(best, length)
    return best


def copies(
    prompt: list[int], output: list[int], match: int, prompt_only: bool = False
) -> list[int]:
    """The number of tokens that can be copied at each position of an output."""
    found = []
    for i in range(len(output)):
        text = prompt + output[:i]
        suffix = text[len(text) - match :]
        found.append(longest_copy(prompt if prompt_only else text, suffix, output[i:]))
    return found


class PerfectCopier(Drafter):
    """Stands in for ``prompt_lookup``."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, known: Mapping[tuple[int, ...], list[int]], match: int) -> None:
        self._tokens = known
        self._lengths = {p: copies(list(p), output, match) for p, output in known.items()}

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: Session, budget: Budget) -> Draft:
        prompt = tuple(session.token_ids[: session.prompt_length])
        at = session.length - session.prompt_length
        length = min(self._lengths[prompt][at], budget.depth)
        return Draft.chain(self._tokens[prompt][at : at + length])


def timed(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, config: SpeculationConfig
) -> tuple[float, list[Session]]:
    started = time.perf_counter()
    sessions = [engine.generate([prompt], params, config)[0] for prompt in prompts]
    return time.perf_counter() - started, sessions


def bound(
    engine: Engine, known: Mapping[tuple[int, ...], list[int]], match: int, params: SamplingParams,
    repetitions: int,
) -> str:  # fmt: skip
    prompts = [list(prompt) for prompt in known]
    copying = engine.sibling()
    copying.drafters["prompt_lookup"] = PerfectCopier(known, match)
    ratios = []
    for _ in range(repetitions):
        ar_seconds, _ = timed(engine, prompts, params, AR)
        seconds, sessions = timed(copying, prompts, params, COPYING)
        assert [s.output_ids for s in sessions] == list(known.values())
        ratios.append(ar_seconds / seconds)
    tokens = sum(len(output) for output in known.values())
    rounds = sum(session.stats.num_rounds for session in sessions)
    return f"{statistics.median(ratios):.2f} (τ {tokens / rounds:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, help="prompts of each category; all by default")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    limit_threads(1)
    engine = load_engine()
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=options.max_tokens)
    heads = [f"match {match}" for match in MATCHES]
    print(f"{'× AR':24}" + "".join(f"{head:>16}" for head in heads) + "     from the prompt")
    chosen = limit_per_category(builtin_prompts(), options.limit)
    for category in dict.fromkeys(prompt.category for prompt in chosen):
        texts = [prompt.text for prompt in chosen if prompt.category == category]
        prompts = [engine.tokenizer.encode(text) for text in texts]
        _, sessions = timed(engine, prompts, params, AR)
        known = {tuple(p): s.output_ids for p, s in zip(prompts, sessions, strict=True)}
        cells = [bound(engine, known, match, params, options.repetitions) for match in MATCHES]
        repeated = [
            n > 0 for p, o in known.items() for n in copies(list(p), o, 2, prompt_only=True)
        ]
        share = sum(repeated) / len(repeated)
        print(f"{category:24}" + "".join(f"{cell:>16}" for cell in cells) + f"{share:20.0%}")


if __name__ == "__main__":
    main()
