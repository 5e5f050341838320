"""Chunks of actions, and the recipe of their model: `python -m paceline.diffusion.actions`.

A toy of what Discrete Diffusion VLA (arXiv 2508.20072) decodes: actions binned into tokens, a whole
chunk of them at once, in one transformer with what the robot is told. Here a hand wipes a table of
8 x 8 cells. It moves at a constant speed along each axis and turns at the edges; the prompt tells
where it is and how it moves at one step of the chunk, any of them. So no fixed order of writing
suits all chunks: the actions near the told step are easy, those far away follow from their
neighbours.
"""

from __future__ import annotations

import argparse
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.diffusion.model import Blocks, MaskedModel
from paceline.diffusion.train import complementary_masks, fit, masked_loss, save
from paceline.models.llama_config import LlamaConfig

CELLS, STEPS = 8, 8
SPEEDS = ("-2", "-1", "+1", "+2")
TIMES = tuple(f"t{step}" for step in range(STEPS))
WORDS = ("[MASK]", "wipe:", "in", "at", "by", "->", *SPEEDS, *TIMES, *map(str, range(CELLS)))
PROMPT_WORDS = 10
CHUNK_TOKENS = 2 * STEPS
BLOCK = 32
WHOLE = 0.3
"""Share of training rows whose chunk is masked altogether, as at the first step of decoding."""


@dataclass(frozen=True, slots=True)
class Wipe:
    """Where the hand is and how it moves at one step of a chunk."""

    step: int
    cells: tuple[int, int]
    speeds: tuple[int, int]

    @staticmethod
    def drawn(rng: random.Random, *, held_out: bool) -> Wipe:
        """One that is trained on, or one that is not."""
        speeds = [int(speed) for speed in SPEEDS]
        while True:
            wipe = Wipe(
                rng.randrange(STEPS),
                (rng.randrange(CELLS), rng.randrange(CELLS)),
                (rng.choice(speeds), rng.choice(speeds)),
            )
            if wipe.is_held_out == held_out:
                return wipe

    @property
    def is_held_out(self) -> bool:
        """An eighth of all is not trained on."""
        return zlib.crc32(self.prompt.encode()) % 8 == 0

    @property
    def prompt(self) -> str:
        (x, y), (dx, dy) = self.cells, self.speeds
        return f"wipe: in t{self.step} at {x} {y} by {dx:+d} {dy:+d} ->"

    def chunk(self) -> list[tuple[int, int]]:
        """The cells of all steps."""
        axes = zip(self.cells, self.speeds, strict=True)
        x, y = ([_cell(at + (t - self.step) * by) for t in range(STEPS)] for at, by in axes)
        return list(zip(x, y, strict=True))

    def right_tokens(self, text: str) -> int:
        """How many of the chunk's tokens a written text has right."""
        wanted = [str(cell) for cells in self.chunk() for cell in cells]
        return sum(a == b for a, b in zip(text.split(), wanted, strict=False))


def _cell(distance: int) -> int:
    """Where a hand is that has gone so far along one axis, the edges reflecting it."""
    turn = distance % (2 * (CELLS - 1))
    return min(turn, 2 * (CELLS - 1) - turn)


def word_tokenizer() -> Tokenizer:
    """A token for each word."""
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[MASK]")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def config(layers: int, width: int) -> dict[str, Any]:
    """config.json of a model of chunks."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(WORDS),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "max_position_embeddings": PROMPT_WORDS + CHUNK_TOKENS,
        "tie_word_embeddings": True,
        "mask_token_id": WORDS.index("[MASK]"),
        "block_size": BLOCK,
        "sub_block_size": BLOCK,
    }


def batch(step: int, count: int) -> torch.Tensor:
    """Prompts with their chunks; the same for a step whenever it is asked for.

    Returns:
        # [count, PROMPT_WORDS + CHUNK_TOKENS]
    """
    rng, ids = random.Random(step), {word: i for i, word in enumerate(WORDS)}
    rows = []
    for _ in range(count):
        wipe = Wipe.drawn(rng, held_out=False)
        cells = [str(cell) for cells in wipe.chunk() for cell in cells]
        rows.append([ids[word] for word in (*wipe.prompt.split(), *cells)])
    return torch.tensor(rows)


def train(args: argparse.Namespace) -> None:
    """Train on made chunks; the same command goes on with an interrupted training."""
    raw = config(args.layers, args.width)
    blocks = Blocks(raw["mask_token_id"], BLOCK, BLOCK)
    model = MaskedModel.untrained(LlamaConfig.from_dict(raw), blocks)
    maskable = torch.arange(PROMPT_WORDS + CHUNK_TOKENS) >= PROMPT_WORDS

    def loss(step: int) -> torch.Tensor:
        tokens = batch(step, args.batch)
        generator = torch.Generator().manual_seed(step)
        masks = complementary_masks(maskable.expand_as(tokens), BLOCK, generator)
        whole = torch.rand(args.batch, generator=generator) < WHOLE
        masks[0, whole], masks[1, whole] = maskable, False
        return masked_loss(model, tokens, masks)

    def keep() -> None:
        save(model, raw, args.out)
        word_tokenizer().save(str(args.out / "tokenizer.json"))

    fit(model, loss, keep, args.out / "training.pt", steps=args.steps, lr=args.lr, every=500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
