"""A small draft model for a chat model: some of its layers, trained on its conversations.

The drafter starts as the target's embedding and a few of its layers, and learns the target's
distribution at each token of the target's answers (:mod:`paceline.train.conversations`). Its head
covers only part of the vocabulary: the most frequent tokens (FR-Spec, Zhao et al. 2025, arXiv
2502.14856).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from paceline.gguf_folder import model_folder
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights
from paceline.train.pretrain import Trainer, layer_states, new_model

HELD_OUT = 0.04
"""Share of the conversations that training does not use."""


@dataclass(frozen=True)
class Talks:
    """Conversations in memory; item i of each list belongs to conversation i."""

    tokens: list[NDArray[np.uint16]]
    positions: list[NDArray[np.int64]]
    top_ids: list[NDArray[np.uint16]]
    top_probs: list[NDArray[np.float16]]

    @classmethod
    def read(cls, folder: Path, length: int) -> Talks:
        """Read saved conversations, of each at most ``length`` tokens."""
        talks = cls([], [], [], [])
        for file in sorted(folder.glob("*.npz")):
            shard = np.load(file)
            starts = [0, *shard["ends"].tolist()]
            for start, end in itertools.pairwise(starts):
                end = min(end, start + length)
                first, last = np.searchsorted(shard["positions"], (start, end))
                if last - first < 2:
                    continue
                talks.tokens.append(shard["tokens"][start:end])
                talks.positions.append(shard["positions"][first:last] - start)
                talks.top_ids.append(shard["top_ids"][first:last])
                talks.top_probs.append(shard["top_probs"][first:last])
        return talks

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self) -> tuple[Talks, Talks]:
        """Split into training and held-out conversations; every n-th one is held out."""
        every = round(1 / HELD_OUT)
        parts = [[i for i in range(len(self)) if (i % every == 7) == held] for held in (0, 1)]
        training, held_out = (
            Talks(*([column[i] for i in part] for column in self._columns)) for part in parts
        )
        return training, held_out

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.positions, self.top_ids, self.top_probs


def build(target: Path, layers: Sequence[int]) -> LlamaForCausalLM:
    """The target reduced to these layers."""
    config = AutoConfig.from_pretrained(model_folder(target))
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: len(layers)]
    model = new_model(config)
    folder = model_folder(target)
    weights = load_weights(folder, LlamaConfig.from_folder(folder))
    own = {}
    for name in model.state_dict():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(layers[int(parts[2])])
        source = ".".join(parts)
        own[name] = weights.get(source, weights["model.embed_tokens.weight"]).float()  # a tied head
    model.load_state_dict(own)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def choose_vocabulary(talks: Talks, size: int, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that the target finds most likely, in ascending order; after them the
    tokenizer's first ones."""
    mass = np.zeros(vocab_size)
    for ids, probs in zip(talks.top_ids, talks.top_probs, strict=True):
        np.add.at(mass, ids.reshape(-1), probs.reshape(-1).astype(np.float64))
    mass += np.linspace(1e-6, 0, vocab_size)  # merges are numbered by frequency
    return np.sort(np.argsort(-mass, kind="stable")[:size])


class ReducedHead(torch.nn.Module):
    """Logits of a part of the vocabulary: rows of the target's own table, which are not trained.

    So a drafter's file has neither embedding nor head: they are the target's.

    Args:
        embedding: of the target.  # [vocab_size, hidden_size]
        vocabulary: token ids, ascending.
    """

    places: Tensor
    """The index of each token in the vocabulary, or -1."""

    def __init__(self, embedding: Tensor, vocabulary: NDArray[np.int64]) -> None:
        super().__init__()
        rows = embedding[torch.from_numpy(vocabulary)].clone()
        self.weight = torch.nn.Parameter(rows, requires_grad=False)
        places = torch.full((len(embedding),), -1, dtype=torch.int64)
        places[torch.from_numpy(vocabulary)] = torch.arange(len(vocabulary))
        self.register_buffer("places", places, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight)


class ChatDrafter(torch.nn.Module):
    """Body and head as one module, for an optimiser and a checkpoint."""

    def __init__(self, body: LlamaForCausalLM, head: ReducedHead) -> None:
        super().__init__()
        self.body, self.head = body, head

    def logits(self, tokens: Tensor, rows: Tensor, before: Tensor) -> Tensor:
        """Logits after the chosen tokens.  # [batch, length], [n], [n] -> [n, vocabulary]"""
        states = layer_states(self.body, tokens)[-1][rows, before]
        logits: Tensor = self.head(self.body.model.norm(states))
        return logits


def loss_of(logits: Tensor, ids: Tensor, probs: Tensor, places: Tensor) -> Tensor:
    """Distance from the target: forward KL, total variation and cross entropy on its argmax.

    ``logits`` [n, vocabulary]; ``ids``, ``probs`` [n, k]; the result is a scalar. Tokens that the
    head lacks, and the target's mass outside its k, count as one event.
    """
    own = places[ids]  # [n, k]
    inside = (own >= 0).float()
    log_q = logits.log_softmax(-1)
    log_q_k = log_q.gather(1, own.clamp_min(0))
    p, q_k = probs * inside, log_q_k.exp() * inside
    rest_p = (1.0 - p.sum(-1)).clamp_min(0.0)
    rest_q = (1.0 - q_k.sum(-1)).clamp_min(1e-5)
    kl = -(p * log_q_k).sum(-1) - rest_p * rest_q.log()
    total_variation = 0.5 * ((p - q_k).abs().sum(-1) + (rest_p - rest_q).abs())
    hard = -log_q_k[:, 0] * inside[:, 0]
    return (0.4 * kl + 0.4 * hard + 0.6 * total_variation).mean()


def batch_of(talks: Talks, picked: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens [batch, length]; of n answer tokens: row, place before it, ids and probs [n, k]."""
    longest = max(len(talks.tokens[i]) for i in picked)
    tokens = np.zeros((len(picked), longest), np.int64)
    rows, before = [], []
    for row, i in enumerate(picked):
        tokens[row, : len(talks.tokens[i])] = talks.tokens[i]
        rows.append(np.full(len(talks.positions[i]), row))
        before.append(talks.positions[i] - 1)
    ids = np.concatenate([talks.top_ids[i] for i in picked]).astype(np.int64)
    probs = np.concatenate([talks.top_probs[i] for i in picked]).astype(np.float32)
    parts = tokens, np.concatenate(rows), np.concatenate(before), ids, probs
    tensors = [torch.from_numpy(part) for part in parts]
    return tensors[0], tensors[1], tensors[2], tensors[3], tensors[4]


@torch.no_grad()
def measure(
    drafter: ChatDrafter, talks: Talks, vocabulary: NDArray[np.int64], depth: int = 5
) -> dict[str, float]:
    """``agreement`` with the target's argmax, and ``tau``, the mean accepted length of chains.

    Both are measured at the answers' own tokens. For a greedy answer tau is exact: up to its first
    miss, a greedy draft continues the text that the target writes.
    """
    rounds = committed = matches = total = 0
    for i in range(len(talks)):
        tokens, rows, before, _, _ = batch_of(talks, [i])
        best = vocabulary[drafter.logits(tokens, rows, before).argmax(-1).numpy()]
        right = best == talks.tokens[i][talks.positions[i]]
        matches, total = matches + int(right.sum()), total + len(right)
        place = 0
        while place + depth < len(right):
            accepted = 0
            while accepted < depth and right[place + accepted]:
                accepted += 1
            rounds, committed, place = rounds + 1, committed + accepted + 1, place + accepted + 1
    return {"agreement": matches / max(1, total), "tau": committed / max(1, rounds)}


def train(
    target: Path,
    data: Path,
    work: Path,
    *,
    layers: Sequence[int],
    vocabulary_size: int = 16384,
    minutes: float = 60.0,
    batch_tokens: int = 2048,
    length: int = 512,
    start: Mapping[str, Tensor] | None = None,
    lr: float = 1e-3,
) -> tuple[ChatDrafter, NDArray[np.int64], dict[str, float]]:
    """Train; resumes from ``work`` after an interruption.

    Args:
        start: weights of a previously trained :class:`ChatDrafter`.
    """
    training, held_out = Talks.read(data, length).split()
    body = build(target, layers).train()
    work.mkdir(parents=True, exist_ok=True)
    file = work / "vocabulary.npy"
    if not file.exists():
        np.save(file, choose_vocabulary(training, vocabulary_size, body.config.vocab_size))
    vocabulary: NDArray[np.int64] = np.load(file)
    drafter = ChatDrafter(body, ReducedHead(body.model.embed_tokens.weight.detach(), vocabulary))
    if start is not None:
        drafter.load_state_dict(dict(start))
    # Not Muon: its products are in bfloat16, which takes a minute a step without AVX-512.
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01, betas=(0.9, 0.95), fused=True)
    trainer = Trainer(
        work / "drafter.pt", drafter, [optimizer], minutes=minutes, max_steps=None, warmup=0.02,
        checkpoint_seconds=120.0, label="drafter",
    )  # fmt: skip
    order_by_length = np.argsort([len(tokens) for tokens in training.tokens], kind="stable")

    def loss_of_step(step: int, progress: float) -> tuple[Tensor, float, int]:
        random = np.random.default_rng([1, step])
        # Conversations of similar length, so that a batch has little padding.
        first = int(random.integers(len(training)))
        longest = len(training.tokens[order_by_length[first]])
        count = max(1, batch_tokens // longest)
        picked = order_by_length[max(0, first - count + 1) : first + 1].tolist()
        tokens, rows, before, ids, probs = batch_of(training, picked)
        loss = loss_of(drafter.logits(tokens, rows, before), ids, probs, drafter.head.places)
        return loss, float(loss.detach()), tokens.numel()

    trainer.run(loss_of_step)
    drafter.eval()
    return drafter, vocabulary, measure(drafter, held_out, vocabulary)
