"""The recipe of the any-subset model that ships: `python -m paceline.diffusion.train_any_subset`.

Each row of bytes is learned in an order of its own: half of the rows in a random one, half with
random positions known and the others from left to right (arXiv 2504.20456). One forward of the two
streams gives the loss of all of a row's conditionals.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from paceline.diffusion.any_subset import KEY, MASK, whole_text
from paceline.diffusion.model import MaskedModel
from paceline.diffusion.tasks import TASKS, example
from paceline.models.llama_config import LlamaConfig
from paceline.train import corpus

Tensor = torch.Tensor
VOCAB, LENGTH = 258, 64


def config(layers: int, width: int) -> dict[str, Any]:
    """config.json of a byte model."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        KEY: True,
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    }


def untrained(raw: dict[str, Any], seed: int = 0) -> MaskedModel:
    """The model of a config with random weights."""
    return MaskedModel.untrained(LlamaConfig.from_dict(raw), whole_text(LENGTH), seed)


def random_order(length: int, rng: random.Random) -> list[int]:
    """Positions in the order in which a row is learned."""
    if rng.random() < 0.5:
        return rng.sample(range(length), length)
    rate = rng.random()
    known = [place for place in range(length) if rng.random() < rate]
    return [*known, *sorted(set(range(length)) - set(known))]


def permutation_masks(orders: list[list[int]]) -> Tensor:
    """Who sees whom in [tokens; asking rows], both by position.  # bool [rows, 1, 2 L, 2 L]"""
    ranks = torch.tensor(orders).argsort(-1)
    up_to = ranks[:, None, :] <= ranks[:, :, None]
    before = ranks[:, None, :] < ranks[:, :, None]
    own = torch.eye(ranks.shape[1], dtype=torch.bool).expand_as(up_to)
    top = torch.cat([up_to, torch.zeros_like(up_to)], 2)
    return torch.cat([top, torch.cat([before, own], 2)], 1)[:, None]


def order_loss(model: MaskedModel, tokens: Tensor, orders: list[list[int]]) -> Tensor:
    """Mean negative log-likelihood of a token given those before it in its row's order, in nats.

    Args:
        tokens: # [rows, length]
    """
    length = tokens.shape[1]
    asked = torch.full_like(tokens, MASK)
    positions = torch.arange(length).repeat(2)
    states, _ = model.forward(torch.cat([tokens, asked], 1), positions, permutation_masks(orders))
    logits = model.logits(states[:, length:])
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class ByteRows:
    """Rows of tasks, one behind the other, and of the demo's text."""

    def __init__(self, extra: list[Path], task_share: float, max_bytes: int = 2_000_000) -> None:
        documents, _ = corpus.split(extra)
        random.Random(0).shuffle(documents)
        text = bytearray()
        for document in documents:
            if len(text) >= max_bytes:
                break
            text += document.text.encode()
        self._text, self._task_share = bytes(text), task_share

    def row(self, rng: random.Random) -> list[int]:
        if rng.random() >= self._task_share:
            start = rng.randrange(len(self._text) - LENGTH)
            return list(self._text[start : start + LENGTH])
        row = b""
        while len(row) < LENGTH:
            one = example(rng.choice(TASKS), rng)
            row += f"{one.prompt}{one.answer}\n".encode()
        return list(row[:LENGTH])


def train(args: argparse.Namespace) -> None:
    """Train until the steps are done or the time is over, whichever comes first."""
    raw = config(args.layers, args.width)
    model, rng = untrained(raw), random.Random(0)
    weights = model.weights
    for tensor in weights.values():
        tensor.requires_grad_(True)
    inner = [t for name, t in weights.items() if t.ndim == 2 and "embed" not in name]
    outer = [t for name, t in weights.items() if t.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(inner, lr=args.lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=args.lr / 5, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    rows, began, recent, done = ByteRows(args.extra_corpus, args.task_share), time.time(), 0.0, 0.0
    step = 0
    while done < 1:
        done = max(step / args.steps, (time.time() - began) / (60 * args.minutes))
        scale = min(1.0, (step + 1) / 20) * min(1.0, max(0.0, 1 - done) / 0.4)
        for optimizer, lr in zip(optimizers, (args.lr, args.lr / 5), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        tokens = torch.tensor([rows.row(rng) for _ in range(args.batch)])
        orders = [random_order(LENGTH, rng) for _ in range(args.batch)]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            loss = order_loss(model, tokens, orders)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*inner, *outer], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent = loss.item() if not step else 0.95 * recent + 0.05 * loss.item()
        step += 1
        if step % 25 == 0 or done >= 1:
            print(f"{step} {recent:.3f} {time.time() - began:.0f}s", flush=True)  # noqa: T201
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.detach().to(torch.bfloat16) for name, tensor in weights.items()},
        args.out / "model.safetensors",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extra-corpus", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--task-share", type=float, default=0.7)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bfloat16", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
