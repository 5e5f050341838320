"""An EAGLE-3 head for a chat model, trained on the model's own conversations.

The data are the conversations of :mod:`paceline.train.conversations`, which hold the target's
likeliest tokens at each token of its answers, and what the target computes for them, stored beside
them (:func:`write_features`). The head learns at the answers' tokens alone; questions are context.
It drafts the most frequent tokens only (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). It starts
from copies of the target's last layers, and learns to draft one token before it learns chains.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.eagle3 import Eagle3, Eagle3Options
from paceline.models.heads.layer import TargetLayers
from paceline.models.kernels import has_dots
from paceline.models.llama import LlamaRunner
from paceline.train.pretrain import Trainer
from paceline.types import Need

HELD_OUT = 25
"""One conversation in so many is not trained on."""
STEP_WEIGHT = 0.85
"""Weight of a drafting step's loss over that of the step before."""
MEASURED_DEPTH = 5
CHAINS_FROM = 0.6
"""Share of the training after which it follows more than one drafting step: a step more costs as
much time as the first one."""


def write_features(folder: Path, model: str, layers: Sequence[int], length: int) -> None:
    """Store the target's residual stream for saved conversations; those that have it are left.

    ``NAME.features.npy`` has, in the order of ``NAME.npz``, the first ``length`` tokens of each
    conversation: bfloat16 as int16  # [num_tokens, num_layers * hidden_size].

    Args:
        layers: numbers of layers after which the stream is read.
    """
    runner = load_runner(model, dtype="auto")
    assert isinstance(runner, LlamaRunner)
    index = [number - 1 for number in layers]
    wants = frozenset({Need.LAYER_STATES})
    for file in tqdm(sorted(folder.glob("*.npz")), desc="features", unit="file"):
        out = file.with_suffix(".features.npy")
        if out.exists():
            continue
        parts = []
        for tokens in _conversations(file, length):
            sequence = runner.new_sequence()
            pieces = []
            for chunk in np.split(tokens.astype(np.int64), range(256, len(tokens), 256)):
                result = runner.forward([Segment(sequence, chunk, logits="none")], wants)
                runner.commit(sequence, range(len(chunk)))
                states = result.extras[Need.LAYER_STATES][:, index].flatten(1)
                pieces.append(states.bfloat16().view(torch.int16).numpy())
            runner.free(sequence)
            parts.append(np.concatenate(pieces))
        part = file.with_suffix(".features.tmp")
        with part.open("wb") as opened:
            np.save(opened, np.concatenate(parts))
        os.replace(part, out)


def _conversations(file: Path, length: int) -> Iterator[NDArray[np.uint16]]:
    """The tokens of each conversation, at most ``length``."""
    with np.load(file) as shard:
        tokens, ends = shard["tokens"], shard["ends"].tolist()
    for start, end in itertools.pairwise([0, *ends]):
        yield tokens[start : min(end, start + length)]


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: the target's ``features`` and ``tokens``, and its answers' tokens.

    Attributes:
        features: bfloat16 as int16, on disk.  # [num_tokens, features]
        positions: of the answers' tokens.  # [n]
        top_ids, top_probs: the target's likeliest tokens there.  # [n, k]
    """

    kind: str
    tokens: NDArray[np.uint16]
    features: NDArray[np.int16]
    positions: NDArray[np.int64]
    top_ids: NDArray[np.uint16]
    top_probs: NDArray[np.float16]


def read_talks(folders: Sequence[Path], length: int) -> tuple[list[Talk], list[Talk]]:
    """Saved conversations that have features: those to train on, and those held out."""
    talks: list[Talk] = []
    for folder in folders:
        for file in sorted(folder.glob("*.npz")):
            stored = file.with_suffix(".features.npy")
            if not stored.exists():
                continue
            features = np.load(stored, mmap_mode="r")
            with np.load(file) as opened:
                shard = dict(opened)
            begin = 0
            starts = [0, *shard["ends"].tolist()]
            for kind, (start, end) in zip(shard["kinds"], itertools.pairwise(starts), strict=True):
                end = min(end, start + length)
                # The first draft needs a feature and a token before it.
                first, last = np.searchsorted(shard["positions"], (start + 2, end))
                rows = features[begin : begin + end - start]
                begin += end - start
                if last - first >= 2:
                    talks.append(
                        Talk(
                            str(kind), shard["tokens"][start:end], rows,
                            shard["positions"][first:last] - start,
                            shard["top_ids"][first:last], shard["top_probs"][first:last],
                        )
                    )  # fmt: skip
    # By content: which ones stays the same when conversations are added.
    held_out = [zlib.crc32(talk.tokens.tobytes()) % HELD_OUT == 0 for talk in talks]
    return (
        [talk for talk, held in zip(talks, held_out, strict=True) if not held],
        [talk for talk, held in zip(talks, held_out, strict=True) if held],
    )


def choose_vocabulary(talks: Sequence[Talk], size: int, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that the target finds most likely, in ascending order; after them the
    tokenizer's first ones."""
    mass = np.zeros(vocab_size)
    for talk in talks:
        np.add.at(mass, talk.top_ids.reshape(-1), talk.top_probs.reshape(-1).astype(np.float64))
    mass += np.linspace(1e-6, 0, vocab_size)  # merges are numbered by frequency
    return np.sort(np.argsort(-mass, kind="stable")[:size])


@dataclass(frozen=True, slots=True)
class ChatBatch:
    """Padded conversations, and the places in them from which the answers' tokens are drafted.

    Attributes:
        rows, places: of each answer token, the conversation and the place that predicts it: the
            one of the token two before.  # [n]
        ids, probs: the target's likeliest tokens.  # [n, k]
    """

    features: Tensor  # [batch, length, features]
    tokens: Tensor  # [batch, length]
    rows: Tensor
    places: Tensor
    ids: Tensor
    probs: Tensor

    @classmethod
    def of(cls, talks: Sequence[Talk]) -> ChatBatch:
        longest = max(len(talk.tokens) for talk in talks)
        width = talks[0].features.shape[1]
        features = torch.zeros(len(talks), longest, width, dtype=torch.bfloat16)
        tokens = torch.zeros(len(talks), longest, dtype=torch.int64)
        for row, talk in enumerate(talks):
            size = len(talk.tokens)
            features[row, :size] = torch.from_numpy(np.array(talk.features)).view(torch.bfloat16)
            tokens[row, :size] = torch.from_numpy(talk.tokens.astype(np.int64))
        sizes = torch.tensor([len(talk.positions) for talk in talks])
        places = np.concatenate([talk.positions for talk in talks]) - 2
        ids = np.concatenate([talk.top_ids for talk in talks]).astype(np.int64)
        probs = np.concatenate([talk.top_probs for talk in talks]).astype(np.float32)
        return cls(
            features, tokens, torch.arange(len(talks)).repeat_interleave(sizes),
            torch.from_numpy(places), torch.from_numpy(ids), torch.from_numpy(probs),
        )  # fmt: skip


def loss_of(logits: Tensor, ids: Tensor, probs: Tensor, logit_of: Tensor) -> Tensor:
    """Distance from the target: forward KL, total variation and cross entropy on its argmax.

    Tokens that the head lacks, and the target's mass outside its k, count as one event.

    Args:
        logits: # [n, num_logits]
        ids, probs: # [n, k]
        logit_of: the logit of each token, or -1.  # [vocab_size]

    Returns:
        A scalar.
    """
    own = logit_of[ids]  # [n, k]
    inside = (own >= 0).float()
    log_q_k = logits.gather(1, own.clamp_min(0)) - logits.logsumexp(-1, keepdim=True)
    p, q_k = probs * inside, log_q_k.exp() * inside
    rest_p = (1.0 - p.sum(-1)).clamp_min(0.0)
    rest_q = (1.0 - q_k.sum(-1)).clamp_min(1e-5)
    kl = -(p * log_q_k).sum(-1) - rest_p * rest_q.log()
    total_variation = 0.5 * ((p - q_k).abs().sum(-1) + (rest_p - rest_q).abs())
    hard = -log_q_k[:, 0] * inside[:, 0]
    return (0.4 * kl + 0.4 * hard + 0.6 * total_variation).mean()


class ChatHeadTrainer:
    """Trains a head on conversations; resumes from ``work`` after an interruption.

    Args:
        model: folder of the target.
        work: for vocabulary and checkpoint.
        steps: number of batches; the learning rate follows the share of them.
        batch_tokens: in a batch, about.
        checkpoint_seconds: between checkpoints.
    """

    def __init__(
        self,
        model: Path,
        training: Sequence[Talk],
        work: Path,
        *,
        options: Eagle3Options,
        steps: int,
        batch_tokens: int = 4096,
        checkpoint_seconds: float = 120.0,
        seed: int = 0,
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        target = HeadTarget.from_folder(model)
        torch.manual_seed(seed)
        self.head = Eagle3(target, options)
        self._start_from(target)
        file = work / "vocabulary.npy"
        if not file.exists():
            size = target.config.vocab_size
            np.save(file, choose_vocabulary(training, options.vocabulary or size, size))
        vocabulary: NDArray[np.int64] = np.load(file)
        self.head.vocabulary.copy_(torch.from_numpy(vocabulary))
        self._logit_of = torch.full((target.config.vocab_size,), -1)
        self._logit_of[self.head.vocabulary] = torch.arange(len(vocabulary))
        self._scale = _scale_of(training)
        # Without such instructions, bfloat16 takes many times as long as float32.
        self._narrow = has_dots()
        self._training, self._batch_tokens, self._seed = training, batch_tokens, seed
        self._order = np.argsort([len(talk.tokens) for talk in training], kind="stable")
        self._work, self._steps, self._checkpoint_seconds = work, steps, checkpoint_seconds

    def _start_from(self, target: HeadTarget) -> None:
        """The target's last layers and final norm, fed with the token; features join from 0 on."""
        head = self.head
        last = TargetLayers(target, -len(head.layers), "num_layers")
        for layer, known in zip(head.layers, last.layers, strict=True):
            layer.load_state_dict(known.state_dict())
        head.norm.load_state_dict(last.norm.state_dict())
        torch.nn.init.normal_(head.project.weight, std=head.project.in_features**-0.5)
        torch.nn.init.normal_(head.fc.weight, std=0.05 * head.fc.in_features**-0.5)
        torch.nn.init.zeros_(head.fc.bias)
        size = head.fc.out_features
        head.fc.weight.data[:, :size] += torch.eye(size)

    def run(self) -> Trainer:
        """Train to the last step."""
        head = self.head.train()
        matrices = [p for p in head.parameters() if p.ndim == 2]
        others = [p for p in head.parameters() if p.ndim != 2]
        # Not Muon: it learns more in a step, but takes half of a step of this size for itself.
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                matrices, lr=1.5e-3, weight_decay=0.02, betas=(0.9, 0.95), fused=True
            ),
            torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.97), fused=True),
        ]
        trainer = Trainer(
            self._work / "head.pt", head, optimizers, minutes=0.0, max_steps=self._steps,
            warmup=0.02, checkpoint_seconds=self._checkpoint_seconds, label="head",
        )  # fmt: skip
        trainer.run(self._loss_of_step)
        head.eval()
        return trainer

    def _loss_of_step(self, step: int, progress: float) -> tuple[Tensor, float, int]:
        random = np.random.default_rng([self._seed, step])
        # Conversations of similar length, so that a batch has little padding.
        last = int(random.integers(len(self._training)))
        count = max(1, self._batch_tokens // len(self._training[self._order[last]].tokens))
        picked = self._order[max(0, last - count + 1) : last + 1]
        batch = ChatBatch.of([self._training[i] for i in picked])
        with torch.autocast("cpu", torch.bfloat16, enabled=self._narrow):
            total, weights = torch.zeros(()), 0.0
            steps = self.head.options.unroll if progress >= CHAINS_FROM else 1
            for k, logits, seen in self._drafts(batch, steps):
                weight = STEP_WEIGHT**k
                loss = loss_of(logits, batch.ids[seen], batch.probs[seen], self._logit_of)
                total, weights = total + weight * loss, weights + weight
        total = total / weights
        return total, float(total.detach()), batch.tokens.numel()

    def _drafts(self, batch: ChatBatch, steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each drafting step: its logits, and the answers' tokens to which they belong."""
        head = self.head
        features = head.read(batch.features[:, :-1].float() / self._scale)
        for k, drafted in enumerate(head(features, batch.tokens[:, 1:], steps)):
            seen = batch.places >= k
            logits = head.some_logits(drafted[batch.rows[seen], batch.places[seen]].float())
            yield k, logits.float(), seen

    @torch.no_grad()
    def measure(self, talks: Sequence[Talk]) -> dict[str, dict[str, Any]]:
        """Agreement by depth and mean accepted length of chains, by kind and for ``all``.

        Both at the answers' own tokens. For a greedy answer the length is exact: up to its first
        miss, a greedy draft continues the text that the target writes.
        """
        sums: dict[str, NDArray[np.float64]] = {}
        for talk in talks:
            batch = ChatBatch.of([talk])
            right = np.zeros((MEASURED_DEPTH, len(talk.positions)))
            with torch.autocast("cpu", torch.bfloat16, enabled=self._narrow):
                for k, logits, seen in self._drafts(batch, MEASURED_DEPTH):
                    drafted = self.head.vocabulary[logits.argmax(-1)].numpy()
                    right[k, seen.numpy()] = drafted == talk.tokens[talk.positions[seen.numpy()]]
            place = rounds = 0
            while place + MEASURED_DEPTH < right.shape[1]:
                hits = right[range(MEASURED_DEPTH), place + np.arange(MEASURED_DEPTH)]
                place += int(hits.cumprod().sum()) + 1
                rounds += 1
            row = np.array([*right.sum(1), right.shape[1], place, rounds])
            for kind in ("all", talk.kind):
                sums[kind] = sums.get(kind, 0.0) + row
        return {
            kind: {
                "agreement": (row[:MEASURED_DEPTH] / row[-3]).round(4).tolist(),
                "accepted_length": round(row[-2] / max(1.0, row[-1]), 3),
                "tokens": int(row[-3]),
            }
            for kind, row in sorted(sums.items())
        }

    def save(self, folder: Path) -> None:
        """Write the head. Its features are the target's own, not scaled as in training."""
        self.head.project.weight.data /= self._scale
        try:
            self.head.save(folder)
        finally:
            self.head.project.weight.data *= self._scale


def _scale_of(talks: Sequence[Talk]) -> Tensor:
    """The root mean square of each feature: a residual stream has a few enormous ones."""
    picked = [np.array(talk.features) for talk in talks[:: max(1, len(talks) // 256)]]
    values = torch.from_numpy(np.concatenate(picked)).view(torch.bfloat16)
    return values.double().pow(2).mean(0).sqrt().clamp_min(1e-3).float()
