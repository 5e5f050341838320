"""ParallelBench's list tasks (arXiv 2510.04767), small enough for a small model.

`copy`, `replace` and `sort` have one right answer, so tokens can be written in parallel without
harm. `shuffle` has n! right answers of equal probability: tokens that are written in one forward do
not know of one another, so they repeat items, and accuracy falls with the tokens a forward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

ITEMS = tuple("abcdefghijklmnop")
TASKS = ("copy", "replace", "shuffle", "sort")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, one right answer, and the test of any answer."""

    task: str
    prompt: str
    answer: str
    is_right: Callable[[str], bool]


def example(task: str, rng: random.Random, count: int | None = None) -> Example:
    """One example of a task, with ``count`` items (default: 3 to 6)."""
    items = rng.sample(ITEMS, count or rng.randint(3, 6))
    line = " ".join(items)
    if task == "replace":
        old = rng.choice(items)
        new = rng.choice([item for item in ITEMS if item not in items])
        answer = " ".join(new if item == old else item for item in items)
        prompt = f"replace {old} by {new}: {line} ->"
    else:
        prompt = f"{task}: {line} ->"
        if task == "shuffle":
            rng.shuffle(items)
        answer = " ".join(sorted(items) if task == "sort" else items)
    if task == "shuffle":
        return Example(
            task, prompt, f" {answer}", lambda text: sorted(text.split()) == sorted(items)
        )
    return Example(task, prompt, f" {answer}", lambda text: text.split() == answer.split())


def shuffle_accuracy(count: int, tokens_per_step: int) -> float:
    """Of an ideal model that samples ``tokens_per_step`` of ``count`` items in each forward.

    With m items left, k independent draws are distinct with probability m! / (m - k)! / m^k.
    """
    accuracy, left = 1.0, count
    while left:
        drawn = min(tokens_per_step, left)
        accuracy *= math.perm(left, drawn) / left**drawn
        left -= drawn
    return accuracy
