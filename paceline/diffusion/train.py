"""The recipe of the small masked model that ships: `python -m paceline.diffusion.train`.

Starts from the first layers of the demo's target and learns block diffusion as Fast-dLLM v2 does
(arXiv 2509.26328, section 3): each row is seen three times in one forward, once clean and twice
masked. The two masks are complementary, so each token is predicted exactly once. A masked block
sees itself and the clean blocks before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from paceline.demo import TARGET_DIR
from paceline.diffusion.model import Blocks, MaskedModel, block_causal
from paceline.diffusion.tasks import TASKS, example
from paceline.models.llama_config import LlamaConfig
from paceline.tokenizer import load_tokenizer
from paceline.train import corpus
from paceline.train.trainer import read_checkpoint, write_checkpoint

Tensor = torch.Tensor
MASK, END = 1, 0
"""The target's padding token, which no text has, serves as mask; END ends an answer."""


def start_from_target(num_layers: int, blocks: Blocks) -> tuple[MaskedModel, dict[str, Any]]:
    """The target's embedding and first layers, which its early exits taught to predict alone."""
    raw = json.loads((TARGET_DIR / "config.json").read_text(encoding="utf-8"))
    raw |= {
        "num_hidden_layers": num_layers,
        "mask_token_id": blocks.mask_token_id,
        "block_size": blocks.block_size,
        "sub_block_size": blocks.sub_block_size,
    }
    if blocks.causal_past:
        raw["causal_past"] = True
    weights = {
        name: tensor.float()
        for name, tensor in load_file(TARGET_DIR / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    return MaskedModel(LlamaConfig.from_dict(raw), weights, blocks), raw


def complementary_masks(maskable: Tensor, block_size: int, generator: torch.Generator) -> Tensor:
    """Two masks a row, which cover each maskable token exactly once; a rate for each block.

    Args:
        maskable: bool [rows, length]

    Returns:
        bool [2, rows, length]
    """
    rows, length = maskable.shape
    rates = torch.rand(rows, -(-length // block_size), generator=generator)
    rates = rates.repeat_interleave(block_size, 1)[:, :length]
    first = torch.rand(rows, length, generator=generator) < rates
    return torch.stack([first & maskable, ~first & maskable])


def training_mask(length: int, blocks: Blocks) -> Tensor:
    """Who sees whom in [clean; masked; masked the other way].  # bool [3 length, 3 length]

    A masked block sees itself and the clean blocks before it; a clean one those up to itself, or,
    with a causal past, the clean positions up to its own.
    """
    within = block_causal(length, blocks.block_size)
    own = within & within.T
    earlier = within & ~own
    nothing = torch.zeros_like(within)
    return torch.cat(
        [
            torch.cat([blocks.past_mask(length), nothing, nothing], 1),
            torch.cat([earlier, own, nothing], 1),
            torch.cat([earlier, nothing, own], 1),
        ]
    )


def packed_states(model: MaskedModel, tokens: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """The states behind which each token stands: in the clean text, and under both masks.

    Token i is predicted at i - 1: in its own masked block, or, at the beginning of a block, by the
    clean block before it.

    Returns:
        # [rows, length - 1, hidden] and [2, rows, length - 1, hidden]
    """
    length, blocks = tokens.shape[1], model.blocks
    views = [tokens, *(tokens.masked_fill(mask, blocks.mask_token_id) for mask in masks)]
    positions = torch.arange(length).repeat(3)
    states, _ = model.forward(torch.cat(views, 1), positions, training_mask(length, blocks))
    clean, *noisy = (view[:, :-1] for view in states.split(length, 1))
    starts = (torch.arange(1, length) % blocks.block_size == 0)[:, None]
    return clean, torch.stack([torch.where(starts, clean, view) for view in noisy])


def masked_loss(
    model: MaskedModel,
    tokens: Tensor,
    masks: Tensor,
    *,
    next_token: float = 0.0,
    certainty: float = 0.0,
) -> Tensor:
    """Mean cross-entropy of masked tokens, in nats, and what a recipe adds to it.

    Args:
        next_token: weight of the clean text's next-token loss, of the tokens that may be masked
            (Set Block Decoding, arXiv 2509.04185).
        certainty: weight of :func:`certainty_loss`.
    """
    clean, noisy = packed_states(model, tokens, masks)
    chosen, targets = masks[:, :, 1:], tokens[:, 1:]
    logits, wanted = model.logits(noisy[chosen]), targets.expand(2, -1, -1)[chosen]
    loss = F.cross_entropy(logits, wanted)
    if certainty:
        loss = loss + certainty * certainty_loss(logits, wanted)
    if next_token:
        maskable = chosen.any(0)
        loss = loss + next_token * F.cross_entropy(model.logits(clean[maskable]), targets[maskable])
    return loss


CERTAINTY_TEMPERATURE = 0.5


def certainty_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean entropy, in nats at temperature 0.5, of the rows whose best token is right; else 0.

    dParallel's certainty-forcing (arXiv 2509.26488): a right token that the model is sure of can be
    committed along with others.

    Args:
        logits: # [rows, vocab_size]
        targets: # [rows]
    """
    right = logits.argmax(-1) == targets
    if not right.any():
        return logits.sum() * 0.0
    each: Tensor = torch.special.entr((logits[right] / CERTAINTY_TEMPERATURE).softmax(-1))
    return each.sum(-1).mean()


class MaskedRows:
    """Rows of text and of tasks; row ``n`` is the same whenever it is asked for."""

    def __init__(
        self, extra: list[Path], length: int, task_share: float, max_tokens: int = 500_000
    ) -> None:
        self._tokenizer = load_tokenizer(TARGET_DIR)
        documents, _ = corpus.split(extra)
        random.Random(0).shuffle(documents)
        texts, self._text = (document.text for document in documents), list[int]()
        while len(self._text) < max_tokens and (text := next(texts, None)) is not None:
            self._text += [*self._tokenizer.encode(text, False), END]
        self._length, self._task_share = length, task_share

    def row(self, number: int) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them may be masked."""
        rng = random.Random(number)
        if rng.random() >= self._task_share:
            start = rng.randrange(len(self._text) - self._length)
            return self._text[start : start + self._length], [True] * self._length
        tokens: list[int] = []
        maskable: list[bool] = []
        while len(tokens) < self._length:
            one = example(rng.choice(TASKS), rng)
            prompt = self._tokenizer.encode(one.prompt, False)
            answer = [*self._tokenizer.encode(one.answer, False), END]
            tokens += prompt + answer
            maskable += [False] * len(prompt) + [True] * len(answer)
        return tokens[: self._length], maskable[: self._length]

    def batch(self, step: int, count: int) -> tuple[Tensor, Tensor]:
        rows = [self.row(step * count + index) for index in range(count)]
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([may for _, may in rows])


def train(args: argparse.Namespace) -> None:
    """The model that ships, or another one of the demo's tokenizer."""
    blocks = Blocks(MASK, 32, 8, causal_past=args.next_token > 0)
    model, raw = start_from_target(args.layers, blocks)
    if args.start is not None:
        model.weights = MaskedModel.load(args.start).weights
    rows = MaskedRows(args.extra_corpus, args.length, args.task_share)

    def loss(step: int) -> Tensor:
        tokens, maskable = rows.batch(step, args.batch)
        generator = torch.Generator().manual_seed(step)
        masks = complementary_masks(maskable, blocks.block_size, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            return masked_loss(
                model, tokens, masks, next_token=args.next_token, certainty=args.certainty
            )

    def keep() -> None:
        save(model, raw, args.out)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (args.out / name).write_bytes((TARGET_DIR / name).read_bytes())

    fit(model, loss, keep, args.out / "training.pt", steps=args.steps, lr=args.lr)


def fit(
    model: MaskedModel,
    loss_of: Callable[[int], Tensor],
    keep: Callable[[], None],
    file: Path,
    *,
    steps: int,
    lr: float,
    every: int = 50,
) -> None:
    """Train, with a checkpoint every ``every`` steps from which the same call goes on.

    Args:
        loss_of: the loss of a step, by its number.
        keep: write the model's folder.
        file: the checkpoint.
    """
    torch.manual_seed(0)
    state = read_checkpoint(file) if file.exists() else None
    if state is not None:
        model.weights = state["weights"]
    for tensor in model.weights.values():
        tensor.requires_grad_(True)
    inner = [t for name, t in model.weights.items() if t.ndim == 2 and "embed" not in name]
    outer = [t for name, t in model.weights.items() if t.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=lr / 10, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    first = 0
    if state is not None:
        first = state["step"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    began, recent = time.time(), 0.0
    for step in range(first, steps):
        left = 1 - step / steps
        scale = min(1.0, (step + 1) / 20) * min(1.0, left / 0.4)
        for optimizer, rate in zip(optimizers, (lr, lr / 10), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(itertools.chain(inner, outer)), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent = loss.item() if step == first else 0.95 * recent + 0.05 * loss.item()
        if (step + 1) % (every // 2) == 0 or step + 1 == steps:
            print(f"{step + 1} {recent:.3f} {time.time() - began:.0f}s", flush=True)  # noqa: T201
        if (step + 1) % every == 0 or step + 1 == steps:
            keep()
            optimizers_state = [optimizer.state_dict() for optimizer in optimizers]
            weights = {name: tensor.detach() for name, tensor in model.weights.items()}
            write_checkpoint(
                file, {"step": step + 1, "weights": weights, "optimizers": optimizers_state}
            )


def save(model: MaskedModel, raw: dict[str, Any], folder: Path) -> None:
    """Write config and bfloat16 weights: all that :meth:`MaskedModel.load` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    tensors = {name: t.detach().to(torch.bfloat16) for name, t in model.weights.items()}
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extra-corpus", type=Path, action="append", default=[])
    parser.add_argument("--start", type=Path, help="a masked model whose weights to train on")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--task-share", type=float, default=0.75)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument(
        "--certainty", type=float, default=0.0,
        help="weight of the entropy of right tokens (dParallel); the paper's: 1",
    )  # fmt: skip
    parser.add_argument(
        "--next-token", type=float, default=0.0,
        help="weight of the next token's loss; finished blocks become causal (Set Block Decoding)",
    )  # fmt: skip
    parser.add_argument("--bfloat16", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
