"""The recipe of the drafter with a tokenizer of its own: `python -m paceline.train.own_tokens`.

OmniDraft (Ramakrishnan et al. 2025, arXiv 2507.02659) drafts for targets with other tokenizers.
This draft model for the demo target has a byte-level BPE of 768 entries, so that most of its tokens
are parts of the target's. It learns the next token of the demo's code.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline.train import corpus
from paceline.train.checkpoints import all_logits, save_model
from paceline.train.pretrain import (
    PretrainConfig,
    Trainer,
    build_optimizers,
    llama_config,
    new_model,
    token_batch,
)
from paceline.train.tokenizer import pack, train_tokenizer

VOCAB_SIZE = 768


def train(
    out: Path, steps: int, texts: Sequence[str], batch: int = 16, length: int = 256, seed: int = 0
) -> None:
    """Train and write the model; the same call goes on from its checkpoint after a kill."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    stream = pack(tokenizer, texts)
    config = PretrainConfig(vocab_size=VOCAB_SIZE, hidden_size=96, num_heads=3)
    model = new_model(llama_config(config, 2, 224)).train()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        out / "checkpoint.pt", model, build_optimizers(model, 0.02, 5e-3),
        minutes=10.0, max_steps=steps, warmup=0.02, checkpoint_seconds=20.0, label="own tokens",
    )  # fmt: skip

    def loss_of_step(step: int, _progress: float) -> tuple[torch.Tensor, float, int]:
        ids = token_batch(stream, step, batch, length, seed)
        logits = all_logits(model, ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss, float(loss.detach()), ids.numel()

    trainer.run(loss_of_step)
    model.eval()
    tokenizer.save_pretrained(out / "tokenizer")
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(out / "tokenizer")
    save_model(model, out / "tokenizer", out / "model")
    shutil.rmtree(out / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets `model` and a checkpoint")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    training, _ = corpus.split()
    train(args.out, args.steps, [document.text for document in training])


if __name__ == "__main__":
    main()
