"""The recipe of the small BlockFFN model: `python -m paceline.train.block_ffn --out FOLDER`.

Song et al. 2025 (arXiv 2507.08771) add two losses to the next token's, so that a chunk of
consecutive tokens uses few experts together: *activation locality* lets neighbours agree on which
experts they use, and *chunk sparsification* lowers the chance that a chunk uses one. Their weights
are constants here.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.block_ffn import BlockFfnConfig, BlockFfnForCausalLM, routed, share_used
from paceline.train.checkpoints import all_logits, save_model
from paceline.train.corpus import held_out_modules, split
from paceline.train.pretrain import Trainer
from paceline.train.tokenizer import train_tokenizer

CHUNK = 8
"""Tokens whose experts are to be few together; the paper's main measure has as many."""
STEEPNESS = 100.0
"""Of the sigmoid that turns a router's score into the chance that the expert is used."""
LENGTH = 128
MERGED = 512
"""Tokens that are learnt from the corpus, single bytes among them."""
TOKENIZER_TEXTS = 60


def locality_loss(scores: Tensor) -> Tensor:
    """Cross entropy of the experts that a token uses and those of the next one.

    # [batch, length, num_experts] -> scalar
    """
    before, after = STEEPNESS * scores[:, :-1], STEEPNESS * scores[:, 1:]
    loss: Tensor = F.binary_cross_entropy_with_logits(before, after.sigmoid())
    return loss


def chunk_loss(scores: Tensor) -> Tensor:
    """The mean chance that a chunk uses an expert, if each token used one by its gates.

    # [batch, length, num_experts] -> scalar
    """
    active = F.relu(scores)
    chance = active / (active.sum(-1, keepdim=True) + 1e-5)
    unused: Tensor = (1 - chance).unflatten(1, (-1, CHUNK)).prod(2)
    return 1 - unused.mean()


@dataclass(frozen=True)
class Weights:
    """Of the two losses beside that of the next token; 0 leaves one out."""

    locality: float = 0.001
    chunk: float = 0.6


class SourceRows:
    """The standard library's source in rows of tokens."""

    def __init__(self) -> None:
        training = [document.text for document in split()[0]]
        chosen = random.Random(0).sample(training, TOKENIZER_TEXTS)
        self.tokenizer = train_tokenizer(chosen, MERGED)
        self.training = self._rows(chosen)
        self.held_out = self._rows([text for _, text in held_out_modules()[:12]])

    def _rows(self, texts: Sequence[str]) -> Tensor:
        """# int64 [num_rows, LENGTH + 1]"""
        ids: list[int] = []
        for text in texts:
            ids += [self.tokenizer.eos_token_id]
            ids += self.tokenizer.encode(text[:20_000], add_special_tokens=False)
        count = len(ids) // (LENGTH + 1)
        return torch.tensor(ids[: count * (LENGTH + 1)]).view(count, LENGTH + 1)


def new_model(vocab_size: int) -> Any:
    """A random model: two layers of width 64, 32 experts of width 12 in each."""
    config = BlockFfnConfig(
        vocab_size=vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=1, num_experts=32, expert_size=12, initializer_range=0.05,
    )  # fmt: skip
    return BlockFfnForCausalLM(config)


def training_loss(model: Any, rows: Tensor, weights: Weights) -> tuple[Tensor, float]:
    """The loss of rows, and the next token's part of it.  # int64 [batch, length + 1]"""
    with routed(model) as scores:
        logits = all_logits(model, rows[:, :-1])
    text = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss = text
    for each in scores:
        loss = loss + (
            weights.locality * locality_loss(each) + weights.chunk * chunk_loss(each)
        ) / len(scores)
    return loss, float(text.detach())


def train(
    out: Path, steps: int, weights: Weights = Weights(), *, batch: int = 16, seed: int = 0
) -> Any:
    """Train and write the model; the same call goes on from its checkpoint after a kill."""
    torch.manual_seed(seed)
    rows = SourceRows()
    model = new_model(len(rows.tokenizer)).train()
    out.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    trainer = Trainer(
        out / "checkpoint.pt", model, [optimizer], minutes=10.0, max_steps=steps, warmup=0.05,
        checkpoint_seconds=20.0, label="block_ffn",
    )  # fmt: skip

    def loss_of_step(step: int, _progress: float) -> tuple[Tensor, float, int]:
        generator = torch.Generator().manual_seed(seed + step)
        chosen = rows.training[torch.randint(len(rows.training), (batch,), generator=generator)]
        loss, shown = training_loss(model, chosen, weights)
        return loss, shown, chosen.numel()

    trainer.run(loss_of_step)
    model.eval()
    model.config.dtype = torch.bfloat16
    like = out / "tokenizer"
    rows.tokenizer.save_pretrained(like)
    model.config.save_pretrained(like)
    save_model(model, like, out / "model")
    shutil.rmtree(like)
    return model


@torch.no_grad()
def measure(model: Any, rows: Tensor, chunks: Sequence[int]) -> dict[str, float]:
    """The next token's loss on rows, in nats, and the share of experts that chunks use."""
    with routed(model) as scores:
        logits = all_logits(model, rows[:, :-1])
    found = {"loss": float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))}
    every = torch.stack(scores)
    return found | {f"chunk {chunk}": share_used(every, chunk) for chunk in chunks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets `model` and a checkpoint")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--locality", type=float, default=Weights.locality)
    parser.add_argument("--chunk", type=float, default=Weights.chunk)
    args = parser.parse_args()
    weights = Weights(locality=args.locality, chunk=args.chunk)
    model = train(args.out, args.steps, weights)
    for name, value in measure(model, SourceRows().held_out[:64], (1, 2, 4, 8, 16, 32)).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
