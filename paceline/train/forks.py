"""The recipe of the small model that forks: `python -m paceline.train.forks --out FOLDER`.

APAR (Liu et al. 2024, arXiv 2401.06761, section 3.1) fine-tunes on answers that are trees. Here the
trees are made: lists of animals, each with details that have details. A branch of a tree is a row
of its own: what its ancestors wrote up to the fork, without loss, then its own tokens. A prompt
that ends in "in one piece" gets the same text without forks, so that the same weights also write
what forks are compared with.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline.config import SpeculationConfig
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.together.forks import ForkedAnswer, ForkTokens
from paceline.train.checkpoints import all_logits, save_model
from paceline.train.pretrain import (
    PretrainConfig,
    Trainer,
    build_optimizers,
    llama_config,
    new_model,
)
from paceline.train.tokenizer import END_OF_TEXT, train_tokenizer

FORK, CHILD = "[Fork]", "[Child]"
MERGED = 768
"""Tokens that are learnt from the made text, single bytes among them."""

# name: (class, what it eats, where it lives)
FACTS = {
    "cat": ("mammal", "mice, small birds and whatever is left on the table", "near people"),
    "owl": ("bird", "voles and frogs that it hears in the dark", "in old trees and barns"),
    "pike": ("fish", "smaller fish that swim past the reeds", "in slow rivers and cold lakes"),
    "fox": ("mammal", "hares, beetles and fallen plums", "in a den at the edge of the wood"),
    "toad": ("amphibian", "slugs and worms after a warm rain", "under stones in damp gardens"),
    "crow": ("bird", "nuts that it drops on the road", "on roofs and in tall poplars"),
    "seal": ("mammal", "herring and squid from deep water", "on rocks along the northern coast"),
    "bee": ("insect", "nectar of clover and lime trees", "in a hive with many thousand others"),
    "wolf": ("mammal", "deer that the pack has tired out", "in wide forests far from roads"),
    "eel": ("fish", "crabs and snails that it finds at night", "in mud, until it swims to sea"),
    "swan": ("bird", "water plants that it reaches with its neck", "on ponds and quiet bays"),
    "newt": ("amphibian", "larvae of gnats and tiny shrimps", "in ditches during the spring"),
    "mole": ("mammal", "earthworms that fall into its tunnels", "below meadows and lawns"),
    "ant": ("insect", "the honeydew of aphids and dead flies", "in hills of needles and earth"),
    "carp": ("fish", "seeds, plants and worms from the ground", "in warm ponds with soft mud"),
    "hawk": ("bird", "pigeons that it catches in the air", "on cliffs and church towers"),
    "bat": ("mammal", "moths that its echoes have found", "in caves and under loose bark"),
    "frog": ("amphibian", "flies that come close enough", "on lily leaves and wet grass"),
    "moth": ("insect", "nothing at all once it has wings", "in dark cupboards full of wool"),
    "trout": ("fish", "mayflies that touch the surface", "in clear streams with much air"),
    "stork": ("bird", "frogs and mice of mown fields", "on chimneys, and in Africa in winter"),
    "hare": ("mammal", "herbs and the bark of young trees", "in a hollow of the open field"),
    "wasp": ("insect", "ripe pears and other insects", "in a paper nest below the roof"),
    "otter": ("mammal", "fish and mussels that it opens", "in burrows on the river bank"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of text, and the branch that begins behind it; () is none."""

    text: str
    details: tuple[Part, ...] = ()


Answer = tuple[Part, ...]


def answer_about(names: Sequence[str]) -> Answer:
    """The list of these animals, with details and details of these."""
    return tuple(
        Part(f"{'' if place == 0 else chr(10)}- the {name}", _details(*FACTS[name]))
        for place, name in enumerate(names)
    )


def _details(kind: str, food: str, home: str) -> Answer:
    return (
        Part(f" is a {kind}. It eats", (Part(f" {food}"),)),
        Part(", and it lives", (Part(f" {home}"),)),
        Part("."),
    )


def in_one_piece(answer: Answer) -> str:
    """An answer as it reads: each branch behind its fork."""
    return "".join(part.text + in_one_piece(part.details) for part in answer)


def prompt_about(names: Sequence[str], forked: bool = True) -> str:
    return ", ".join(names) + (":\n" if forked else " in one piece:\n")


def is_held_out(names: Sequence[str]) -> bool:
    """A seventh of all lists is not trained on."""
    return sum(list(FACTS).index(name) for name in names) % 7 == 0


def some_names(rng: random.Random, held_out: bool) -> list[str]:
    """Three to five animals of a list that is held out, or of one that is not."""
    while True:
        names = rng.sample(list(FACTS), rng.randint(3, 5))
        if is_held_out(names) == held_out:
            return names


class TreeText:
    """Answers as rows of tokens."""

    def __init__(self) -> None:
        names = [list(each) for each in combinations(FACTS, 2)]
        texts = [prompt_about(each) + in_one_piece(answer_about(each)) for each in names]
        self.tokenizer = train_tokenizer([*texts, prompt_about(names[0], False)], MERGED)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [FORK, CHILD]})
        entries = self.tokenizer.get_vocab()
        self.end, self.fork, self.child = (entries[name] for name in (END_OF_TEXT, FORK, CHILD))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def branches(self, prompt: Sequence[int], answer: Answer) -> Iterator[tuple[list[int], int]]:
        """Each branch's path from the prompt on, and where its own tokens begin in it."""
        path = list(prompt)
        for part in answer:
            path += self.encode(part.text)
            if part.details:
                path.append(self.fork)
                yield from self.branches([*path, self.child], part.details)
        yield [*path, self.end], len(prompt)

    def row(self, rng: random.Random) -> tuple[list[int], int]:
        """A random branch of a random answer; of each depth as many as of the others."""
        names = some_names(rng, held_out=False)
        forked = rng.random() < 0.75
        prompt, answer = self.encode(prompt_about(names, forked)), answer_about(names)
        if not forked:
            return [*prompt, *self.encode(in_one_piece(answer)), self.end], len(prompt)
        branches = list(self.branches(prompt, answer))
        depth = rng.randrange(3)
        return rng.choice([each for each in branches if each[0].count(self.child) == depth])

    def batch(self, rng: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, and the labels of the tokens behind each; -100 has no loss.

        # int64 [count, longest row], int64 [count, longest row - 1]
        """
        rows = [self.row(rng) for _ in range(count)]
        longest = max(len(ids) for ids, _ in rows)
        tokens = torch.full((count, longest), self.end)
        labels = torch.full((count, longest), -100)
        for place, (ids, first) in enumerate(rows):
            tokens[place, : len(ids)] = torch.tensor(ids)
            labels[place, first : len(ids)] = torch.tensor(ids[first:])
        return tokens, labels[:, 1:]


def train(out: Path, steps: int, batch: int = 32, seed: int = 0) -> None:
    """Train and write the model; the same call goes on from its checkpoint after a kill."""
    torch.manual_seed(seed)
    text = TreeText()
    config = PretrainConfig(vocab_size=len(text.tokenizer), hidden_size=96, num_heads=3)
    model = new_model(llama_config(config, 3, 256)).train()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        out / "checkpoint.pt", model, build_optimizers(model, 0.02, 5e-3),
        minutes=10.0, max_steps=steps, warmup=0.02, checkpoint_seconds=20.0, label="forks",
    )  # fmt: skip

    def loss_of_step(step: int, _progress: float) -> tuple[torch.Tensor, float, int]:
        tokens, labels = text.batch(random.Random(seed + step), batch)
        logits = all_logits(model, tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss, float(loss.detach()), tokens.numel()

    trainer.run(loss_of_step)
    model.eval()
    text.tokenizer.save_pretrained(out / "tokenizer")
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(out / "tokenizer")
    save_model(model, out / "tokenizer", out / "model")
    shutil.rmtree(out / "tokenizer")


@dataclass(frozen=True, slots=True)
class ForkQuality:
    """What a model writes about held-out lists.

    Attributes:
        right: share of texts without an error.
        num_tokens: of a text, control tokens included, on average.
        num_steps: forwards of a text, on average.
    """

    right: float
    num_tokens: float
    num_steps: float


def measure(
    model: Path, method: str = "ar", *, forked: bool, count: int = 40, seed: int = 1
) -> ForkQuality:
    """Greedy answers to held-out prompts, with forks or in one piece."""
    engine = load_engine(model)
    assert engine.tokenizer is not None
    tokens = ForkTokens.named(engine.tokenizer, FORK, CHILD)
    rng, right, num_tokens, num_steps = random.Random(seed), 0, 0, 0
    for _ in range(count):
        names = some_names(rng, held_out=True)
        speculation = SpeculationConfig(method=method)
        written = ForkedAnswer(engine, tokens, SamplingParams(max_tokens=300), speculation)
        for _piece in written.write(engine.tokenizer.encode(prompt_about(names, forked))):
            pass
        right += written.text == in_one_piece(answer_about(names))
        num_tokens += written.num_tokens
        num_steps += written.num_steps
    return ForkQuality(right / count, num_tokens / count, num_steps / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets `model` and a checkpoint")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    train(args.out, args.steps)
    for method, forked in product(("ar", "auto"), (True, False)):
        quality = measure(args.out / "model", method, forked=forked)
        print(method, "forked" if forked else "in one piece", quality)


if __name__ == "__main__":
    main()
