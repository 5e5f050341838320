"""SpecReason by threshold: which steps stay, who writes how much, and how long answers take.

By default the demo target writes, and SmolLM2 grades and rewrites: two models with other tokens,
which exchange text.

    python -m benchmarks.reasoning
    python -m benchmarks.reasoning --prompts gsm8k_train.jsonl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.bench.prompts import builtin_prompts
from paceline.bench.suites import read_prompts
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.sampling import SamplingParams
from paceline.together.reasoning import EngineWriter, ReasonedAnswer, ReasonOptions, reason

THRESHOLDS = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Row:
    """The answers with one threshold.

    Attributes:
        kept: share of the small model's steps that stayed.
        graded: grades for each step.
        large_share: share of the answers' tokens that the large model has written.
        pure: answers that are the text that one of the models writes alone.
        seconds: mean of an answer.
        tokens: mean of an answer.
    """

    threshold: float
    kept: float
    graded: float
    large_share: float
    pure: int
    seconds: float
    tokens: float


def measure(
    small: Engine,
    large: Engine,
    prompts: Sequence[str],
    options: ReasonOptions,
    thresholds: Sequence[float] = THRESHOLDS,
    speculation: SpeculationConfig | None = None,
) -> Iterator[Row]:
    """One row for each threshold, and what each model writes alone."""
    alone = {_alone(engine, p, options) for engine in (small, large) for p in prompts}
    for threshold in thresholds:
        chosen = replace(options, threshold=threshold)
        answers, seconds = [], 0.0
        for prompt in prompts:
            writers = EngineWriter(small, speculation), EngineWriter(large, speculation)
            began = time.perf_counter()
            answers.append(ReasonedAnswer(tuple(reason(*writers, prompt, chosen))))
            seconds += time.perf_counter() - began
        steps = [step for answer in answers for step in answer.steps]
        tokens = sum(answer.num_tokens for answer in answers)
        by_large = sum(answer.large_share * answer.num_tokens for answer in answers)
        yield Row(
            threshold=threshold,
            kept=sum(not step.by_large for step in steps) / len(steps),
            graded=sum(answer.num_graded for answer in answers) / len(steps),
            large_share=by_large / tokens,
            pure=sum((p, a.text) in alone for p, a in zip(prompts, answers, strict=True)),
            seconds=seconds / len(prompts),
            tokens=tokens / len(prompts),
        )


def _alone(engine: Engine, prompt: str, options: ReasonOptions) -> tuple[str, str]:
    """The prompt, and what a model writes behind it in one go."""
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=options.token_budget)
    ids = engine.tokenizer.encode(prompt)
    (session,) = engine.generate([ids], params, SpeculationConfig(method="ar"))
    return prompt, session.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", default="demo")
    parser.add_argument("--large", default="smollm2")
    parser.add_argument(
        "--dtypes", nargs=2, default=["float32", "auto"], metavar=("SMALL", "LARGE")
    )
    parser.add_argument("--prompts", help="file of a suite; default: the built-in prompts")
    parser.add_argument("--suite", default="gsm8k", help="the format of that file")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--separator", default="\n")
    parser.add_argument("--method", default="ar", help="how both models decode")
    given = parser.parse_args()
    limit_threads(1)
    small, large = (
        load_engine(name, dtype=dtype)
        for name, dtype in zip((given.small, given.large), given.dtypes, strict=True)
    )
    options = ReasonOptions(
        token_budget=given.max_tokens, max_step_tokens=64, separator=given.separator
    )
    found = read_prompts(given.prompts, given.suite) if given.prompts else builtin_prompts()
    prompts = [each.text for each in found[: given.limit]]
    speculation = SpeculationConfig(method=given.method)
    print("| threshold | steps kept | grades a step | large model's tokens | one model's text |"
          " tokens | seconds |")  # fmt: skip
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in measure(small, large, prompts, options, speculation=speculation):
        print(
            f"| {row.threshold:g} | {row.kept:.0%} | {row.graded:.2f} | {row.large_share:.0%} "
            f"| {row.pure} of {len(prompts)} | {row.tokens:.0f} | {row.seconds:.2f} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
