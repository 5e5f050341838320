"""Prompts from code that the demo pair was not trained on."""

from __future__ import annotations

import random

from paceline.tokenizer import Tokenizer
from paceline.train.corpus import held_out_modules


def code_prompts(tokenizer: Tokenizer, count: int, *, seed: int = 0) -> list[list[int]]:
    """``count`` different prompts of 8 to 96 tokens, cut from held-out modules at random lines."""
    rng = random.Random(seed)
    modules = [text for _, text in held_out_modules() if len(text) > 2000]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        text = rng.choice(modules)
        start = text.rfind("\n", 0, rng.randrange(len(text) - 1000)) + 1
        ids = tokenizer.encode(text[start : start + 1000])[: rng.randint(8, 96)]
        if len(ids) >= 8 and ids not in prompts:
            prompts.append(ids)
    return prompts
