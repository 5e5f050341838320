"""An EAGLE-3 head for a chat model, trained on the model's own conversations.

The data are the conversations of :mod:`paceline.train.conversations`, which hold the target's
likeliest tokens at each token of its answers, and what the target computes for them, stored beside
them (:func:`write_features`). On a GPU it is faster to compute both again for each batch
(:class:`Teacher`). The head learns at the answers' tokens alone; questions are context.
It drafts the most frequent tokens only (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). It starts
from copies of the target's last layers, and learns to draft one token before it learns chains.
"""

from __future__ import annotations

import itertools
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from paceline.errors import ModelNotFound
from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.blocks import BlockLayer
from paceline.models.heads.dspark import DSpark
from paceline.models.heads.eagle3 import Eagle3
from paceline.models.heads.layer import TargetLayers, all_layers
from paceline.models.heads.storage import unpack
from paceline.models.kernels import has_dots
from paceline.models.llama import LlamaRunner
from paceline.models.rope import rope_table
from paceline.train.conversations import TOP_K
from paceline.train.pretrain import Trainer
from paceline.types import Need

HELD_OUT = 25
"""One conversation in so many is not trained on."""
STEP_WEIGHT = 0.85
"""Weight of a drafting step's loss over that of the step before."""
GOING_ON = 0.5
"""Learning rate of a head that goes on from an earlier one, over that of a new one."""
KEPT = 0.5
"""Share of an earlier head in the weights of the one that went on from it: their average keeps most
of what each is better at (WiSE-FT, Wortsman et al. 2022, arXiv 2109.01903)."""
SCALED = 64
"""Conversations that the scale of the features is measured on."""
MEASURED_DEPTH = 5
LOGIT_ROWS = 4096
"""Places whose logits over the whole vocabulary are computed at once."""
CHAINS_FROM = 0.6
"""Share of the training after which it follows more than one drafting step: a step more costs as
much time as the first one."""


def write_features(folder: Path, model: str, layers: Sequence[int], length: int) -> None:
    """Store the target's residual stream for saved conversations; those that have it are left.

    A file for each ``NAME.npz`` has, in its order, the first ``length`` tokens of each
    conversation: bfloat16 as int16  # [num_tokens, num_layers * hidden_size].

    Args:
        layers: numbers of layers after which the stream is read.
    """
    runner = load_runner(model, dtype="auto")
    assert isinstance(runner, LlamaRunner)
    index = [number - 1 for number in layers]
    wants = frozenset({Need.LAYER_STATES})
    for file in tqdm(sorted(folder.glob("*.npz")), desc="features", unit="file"):
        out = _features_file(file, layers)
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
        part = out.with_suffix(".tmp")
        with part.open("wb") as opened:
            np.save(opened, np.concatenate(parts))
        os.replace(part, out)


def _features_file(file: Path, layers: Sequence[int]) -> Path:
    """Beside the conversations."""
    return file.with_suffix(f".features-{'-'.join(map(str, layers))}.npy")


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
        features: bfloat16 as int16, on disk; None: not stored.  # [num_tokens, features]
        positions: of the answers' tokens.  # [n]
        top_ids, top_probs: the target's likeliest tokens there; k is 0 if they are not stored.
            # [n, k]
    """

    kind: str
    tokens: NDArray[np.uint16]
    features: NDArray[np.int16] | None
    positions: NDArray[np.int64]
    top_ids: NDArray[np.uint16]
    top_probs: NDArray[np.float16]


def read_talks(
    folders: Sequence[Path], length: int, layers: Sequence[int] | None
) -> tuple[list[Talk], list[Talk]]:
    """Saved conversations: those to train on, and those held out.

    Args:
        layers: read those that have features of these layers, with them; None: all, without.
    """
    talks: list[Talk] = []
    for folder in folders:
        for file in sorted(folder.glob("*.npz")):
            features = None
            if layers is not None:
                computed = _features_file(file, layers)
                if not computed.exists():
                    continue
                features = np.load(computed, mmap_mode="r")
            with np.load(file) as opened:
                shard = dict(opened)
            begin = 0
            starts = [0, *shard["ends"].tolist()]
            for kind, (start, end) in zip(shard["kinds"], itertools.pairwise(starts), strict=True):
                end = min(end, start + length)
                # The first draft needs a feature and a token before it.
                first, last = np.searchsorted(shard["positions"], (start + 2, end))
                rows = None if features is None else features[begin : begin + end - start]
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
    """The tokens that the target finds most likely, or writes most often where that is not stored,
    in ascending order; after them the tokenizer's first ones."""
    written = [talk.tokens[talk.positions] for talk in talks if not talk.top_ids.size]
    mass = np.zeros(vocab_size)
    if written:
        mass += np.bincount(np.concatenate(written), minlength=vocab_size)
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
        """From what is stored; features that are not are left out."""
        # A little padding: kernels like such lengths, and the last token needs no feature.
        longest = -(-max(len(talk.tokens) for talk in talks) // 64) * 64 + 1
        width = 0 if talks[0].features is None else talks[0].features.shape[1]
        features = torch.zeros(len(talks), longest, width, dtype=torch.bfloat16)
        tokens = torch.zeros(len(talks), longest, dtype=torch.int64)
        for row, talk in enumerate(talks):
            size = len(talk.tokens)
            if talk.features is not None:
                stored = torch.from_numpy(np.array(talk.features))
                features[row, :size] = stored.view(torch.bfloat16)
            tokens[row, :size] = torch.from_numpy(talk.tokens.astype(np.int64))
        sizes = torch.tensor([len(talk.positions) for talk in talks])
        places = np.concatenate([talk.positions for talk in talks]) - 2
        ids = np.concatenate([talk.top_ids for talk in talks]).astype(np.int64)
        probs = np.concatenate([talk.top_probs for talk in talks]).astype(np.float32)
        return cls(
            features, tokens, torch.arange(len(talks)).repeat_interleave(sizes),
            torch.from_numpy(places), torch.from_numpy(ids), torch.from_numpy(probs),
        )  # fmt: skip

    def to(self, device: torch.device) -> ChatBatch:
        """The same on another device."""
        values = (getattr(self, field.name) for field in fields(self))
        return ChatBatch(*(value.to(device, non_blocking=True) for value in values))


class Teacher:
    """Computes what a target says to a batch, instead of reading it.

    Products are those of bfloat16, sums and logits those of float32.

    Args:
        target: in float32, on the device to compute with.
        features: numbers of layers after which the residual stream is read.
        vocabulary: the tokens that count.  # int64 [n]
    """

    def __init__(self, target: HeadTarget, features: Sequence[int], vocabulary: Tensor) -> None:
        self._target, self._features = target, features
        known = all_layers(target)
        self._layers, self._norm = known.layers, known.norm
        self._cos_sin = rope_table(target.config).to(target.embedding.device)
        self._vocabulary = vocabulary.to(target.embedding.device)

    @torch.no_grad()
    def complete(self, batch: ChatBatch) -> ChatBatch:
        """The batch, on the teacher's device, with features and likeliest tokens.

        Probabilities are those among all tokens.
        """
        batch = batch.to(self._target.embedding.device)
        x, read = self._target.embed(batch.tokens), []
        with torch.autocast(x.device.type, torch.bfloat16):
            for number, layer in enumerate(self._layers, 1):
                x = layer(x, self._cos_sin[: x.shape[1]])
                if number in self._features:
                    read.append(x.bfloat16())
        found = []
        rows = self._norm(x[batch.rows, batch.places + 1])
        for part in rows.split(LOGIT_ROWS):
            logits = self._target.logits(part)
            some = logits[:, self._vocabulary]
            best = some.topk(TOP_K)
            found.append(
                (
                    self._vocabulary[best.indices],
                    (best.values - logits.logsumexp(-1, keepdim=True)).exp(),
                )
            )
        ids, probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return replace(batch, features=torch.cat(read, -1), ids=ids, probs=probs)


def loss_of(logits: Tensor, ids: Tensor, probs: Tensor, logit_of: Tensor) -> tuple[Tensor, Tensor]:
    """Distance from the target: forward KL, total variation and cross entropy on its argmax.

    Tokens that the head lacks, and the target's mass outside its k, count as one event.

    Args:
        logits: # [n, num_logits]
        ids, probs: # [n, k]
        logit_of: the logit of each token, or -1.  # [vocab_size]

    Returns:
        The mean loss, and how likely rejection sampling accepts a token that is drawn from each
        row.  # scalar, [n]
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
    loss = (0.4 * kl + 0.4 * hard + 0.6 * total_variation).mean()
    return loss, 1.0 - total_variation.detach()


H = TypeVar("H", Eagle3, DSpark)


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """What a head drafts at one depth, in training.

    Attributes:
        logits: # float32 [n, num_logits]
        answers: to which of the batch's answer tokens each row belongs.  # int64 [n]
        sure: logits of the acceptance of each row, from a head that estimates it.  # [n]
    """

    depth: int
    logits: Tensor
    answers: Tensor
    sure: Tensor | None = None


class ChatTrainer(ABC, Generic[H]):
    """Trains a head on conversations; resumes from ``work`` after an interruption.

    Args:
        model: folder of the target.
        work: for vocabulary and checkpoint.
        steps: number of batches; the learning rate follows the share of them.
        minutes: train for so long instead; the learning rate follows the time.
        batch_tokens: in a batch, about.
        checkpoint_seconds: between checkpoints.
        device: "cuda" computes there, with the target (:class:`Teacher`).
        earlier: folder of a head of the same kind and sizes to go on from; its tokens are chosen
            anew, and the two are averaged in the end. None: from copies of the target's last
            layers.
    """

    head: H

    def __init__(
        self,
        model: Path,
        training: Sequence[Talk],
        work: Path,
        *,
        options: Any,
        steps: int = 0,
        minutes: float = 0.0,
        batch_tokens: int = 4096,
        checkpoint_seconds: float = 120.0,
        seed: int = 0,
        device: str = "cpu",
        earlier: Path | None = None,
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            # cuDNN plans each new shape for milliseconds, and batches differ in shape.
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.set_float32_matmul_precision("high")
        target = HeadTarget.from_folder(model, device=self._device)
        torch.manual_seed(seed)
        self.head = self.new_head(target, options).to(self._device)
        self.start_from(target)
        file = work / "vocabulary.npy"
        if not file.exists():
            size = target.config.vocab_size
            np.save(file, choose_vocabulary(training, options.vocabulary or size, size))
        vocabulary: NDArray[np.int64] = np.load(file)
        self.head.vocabulary.copy_(torch.from_numpy(vocabulary))
        self._logit_of = torch.full((target.config.vocab_size,), -1, device=self._device)
        self._logit_of[self.head.vocabulary] = torch.arange(len(vocabulary), device=self._device)
        self._teacher = None
        if training[0].features is None:
            self._teacher = Teacher(target, options.features, self.head.vocabulary)
        self._scale = self._scale_of(training)
        self._before: dict[str, Tensor] = {}
        self._rate = 1.0 if earlier is None else GOING_ON
        if earlier is not None:
            self._load(earlier)
        # Without such instructions, bfloat16 takes many times as long as float32.
        self._narrow = self._device.type == "cuda" or has_dots()
        self._training, self._batch_tokens, self._seed = training, batch_tokens, seed
        self._order = np.argsort([len(talk.tokens) for talk in training], kind="stable")
        self._work, self._checkpoint_seconds = work, checkpoint_seconds
        self._steps, self._minutes = steps, minutes

    def _batch(self, talks: Sequence[Talk]) -> ChatBatch:
        """What the head reads and learns."""
        batch = ChatBatch.of(talks)
        return batch.to(self._device) if self._teacher is None else self._teacher.complete(batch)

    def _scale_of(self, talks: Sequence[Talk]) -> Tensor:
        """The root mean square of each feature: a residual stream has a few enormous ones."""
        total, count = torch.zeros((), dtype=torch.double, device=self._device), 0
        for talk in talks[:: max(1, len(talks) // SCALED)]:
            rows = self._batch([talk]).features[0, : len(talk.tokens)]
            total, count = total + rows.double().pow(2).sum(0), count + len(rows)
        return (total / count).sqrt().clamp_min(1e-3).float()

    @abstractmethod
    def new_head(self, target: HeadTarget, options: Any) -> H:
        """An untrained head."""

    @abstractmethod
    def start_from(self, target: HeadTarget) -> None:
        """Give the new head what it can use of the target's last layers."""

    @abstractmethod
    def drafts(self, batch: ChatBatch, progress: float) -> Iterator[Drafts]:
        """What the head drafts for the answers' tokens, depth by depth.

        Args:
            progress: share of the training; 1 drafts all depths.
        """

    @property
    @abstractmethod
    def reads(self) -> torch.nn.Linear:
        """The layer of the head that reads the target's features."""

    def run(self) -> Trainer:
        """Train to the last step."""
        head = self.head.train()
        named = dict(head.named_parameters())
        inner = [name for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")]
        matrices = [p for name, p in named.items() if p.ndim == 2 and name not in inner]
        others = [p for p in head.parameters() if p.ndim != 2]
        rate = self._rate
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                others, lr=3e-3 * rate, weight_decay=0.0, betas=(0.9, 0.97), fused=True
            )
        ]
        layers = [named[name] for name in inner]
        if self._device.type == "cuda":
            optimizers.append(
                torch.optim.Muon(layers, lr=0.02 * rate, weight_decay=0.05, momentum=0.95)
            )
        else:
            # Muon learns more in a step, but takes half of a step of this size for itself.
            matrices += layers
        optimizers.append(
            torch.optim.AdamW(
                matrices, lr=1.5e-3 * rate, weight_decay=0.02, betas=(0.9, 0.95), fused=True
            )
        )
        trainer = Trainer(
            self._work / "head.pt", head, optimizers, minutes=self._minutes,
            max_steps=None if self._minutes else self._steps,
            warmup=0.02, checkpoint_seconds=self._checkpoint_seconds, label="head",
        )  # fmt: skip
        trainer.run(self._loss_of_step)
        with torch.no_grad():
            for name, before in self._before.items():
                named[name].lerp_(before, KEPT)
        head.eval()
        return trainer

    def _loss_of_step(self, step: int, progress: float) -> tuple[Tensor, float, int]:
        random = self._random = np.random.default_rng([self._seed, step])
        # Conversations of similar length, so that a batch has little padding.
        last = int(random.integers(len(self._training)))
        count = max(1, self._batch_tokens // len(self._training[self._order[last]].tokens))
        picked = self._order[max(0, last - count + 1) : last + 1]
        batch = self._batch([self._training[i] for i in picked])
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._narrow):
            total, weights = torch.zeros((), device=self._device), 0.0
            for draft in self.drafts(batch, progress):
                at, weight = draft.answers, STEP_WEIGHT**draft.depth
                loss, accepted = loss_of(
                    draft.logits, batch.ids[at], batch.probs[at], self._logit_of
                )
                if draft.sure is not None:
                    loss = loss + F.binary_cross_entropy_with_logits(draft.sure, accepted)
                total, weights = total + weight * loss, weights + weight
        total = total / weights
        return total, float(total.detach()), batch.tokens.numel()

    def scaled(self, batch: ChatBatch) -> Tensor:
        """The features as the head reads them in training.  # [batch, length, features]"""
        return batch.features.float() / self._scale

    @torch.no_grad()
    def measure(self, talks: Sequence[Talk]) -> dict[str, dict[str, Any]]:
        """Agreement by depth and mean accepted length of chains, by kind and for ``all``.

        Both at the answers' own tokens. For a greedy answer the length is exact: up to its first
        miss, a greedy draft continues the text that the target writes.
        """
        self.head.eval()
        sums: dict[str, NDArray[np.float64]] = {}
        for talk in talks:
            batch = self._batch([talk])
            right: NDArray[np.float64] = np.zeros((MEASURED_DEPTH, len(talk.positions)))
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._narrow):
                for draft in itertools.islice(self.drafts(batch, 1.0), MEASURED_DEPTH):
                    drafted = self.head.vocabulary[draft.logits.argmax(-1)].cpu().numpy()
                    at = draft.answers.cpu().numpy()
                    right[draft.depth, at] = drafted == talk.tokens[talk.positions[at]]
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

    def _load(self, folder: Path) -> None:
        """The weights of a saved head, but for its vocabulary.

        Raises:
            ModelNotFound: there is none, or it does not fit.
        """
        file = folder / "model.safetensors"
        if not file.is_file():
            raise ModelNotFound(
                f"head folder {str(folder)!r} has no model.safetensors to go on from"
            )
        stored = unpack(load_file(str(file)))
        stored["vocabulary"] = self.head.vocabulary
        try:
            self.head.load_state_dict(stored)
        except RuntimeError as error:
            raise ModelNotFound(f"head folder {str(folder)!r} does not fit: {error}") from error
        self.reads.weight.data *= self._scale
        self._before = {name: p.detach().clone() for name, p in self.head.named_parameters()}

    def save(self, folder: Path) -> None:
        """Write the head. Its features are the target's own, not scaled as in training."""
        weight = self.reads.weight.data
        scaled = weight.clone()
        weight /= self._scale
        try:
            self.head.save(folder, int8=True)
        finally:
            weight.copy_(scaled)


class ChainTrainer(ChatTrainer[Eagle3]):
    """Trains EAGLE-3's head.

    Args:
        chains_from: share of the training after which it follows more than one drafting step.
    """

    def __init__(
        self, model: Path, training: Sequence[Talk], work: Path, *,
        chains_from: float = CHAINS_FROM, **options: Any,
    ) -> None:  # fmt: skip
        self._chains_from = chains_from
        super().__init__(model, training, work, **options)

    def new_head(self, target: HeadTarget, options: Any) -> Eagle3:
        return Eagle3(target, options)

    def start_from(self, target: HeadTarget) -> None:
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
        head.fc.weight.data[:, :size] += torch.eye(size, device=self._device)

    @property
    def reads(self) -> torch.nn.Linear:
        return self.head.project

    def drafts(self, batch: ChatBatch, progress: float) -> Iterator[Drafts]:
        head = self.head
        steps = head.options.unroll if progress >= self._chains_from else 1
        features = head.read(self.scaled(batch)[:, :-1])
        steps = steps if head.training else MEASURED_DEPTH
        for depth, drafted in enumerate(head(features, batch.tokens[:, 1:], steps)):
            seen = (batch.places >= depth).nonzero()[:, 0]
            states = drafted[batch.rows[seen], batch.places[seen]].float()
            yield Drafts(depth, head.some_logits(states).float(), seen)


class BlockTrainer(ChatTrainer[DSpark]):
    """Trains DSpark's head, on blocks at some places of the answers."""

    def new_head(self, target: HeadTarget, options: Any) -> DSpark:
        return DSpark(target, options)

    def start_from(self, target: HeadTarget) -> None:
        """The target's last layers; features begin as the last of those that the head reads."""
        head, config = self.head, target.config
        last = TargetLayers(target, -len(head.layers), "num_layers")
        sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        for layer, known in zip(head.layers, last.layers, strict=True):
            assert isinstance(layer, BlockLayer)
            own, mlp = layer.self_attn, layer.mlp
            q, k, v = known.qkv.weight.split(sizes)
            gate, up = known.gate_up.weight.chunk(2)
            for linear, weight in (
                (own.q_proj, q), (own.k_proj, k), (own.v_proj, v), (own.o_proj, known.out.weight),
                (mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, known.down.weight),
            ):  # fmt: skip
                linear.weight.data.copy_(weight)
            layer.input_layernorm.load_state_dict(known.input_norm.state_dict())
            layer.post_attention_layernorm.load_state_dict(known.post_norm.state_dict())
        head.norm.load_state_dict(last.norm.state_dict())
        torch.nn.init.normal_(head.fc.weight, std=0.05 * head.fc.in_features**-0.5)
        size = head.fc.out_features
        head.fc.weight.data[:, -size:] += torch.eye(size, device=self._device)

    @property
    def reads(self) -> torch.nn.Linear:
        return self.head.fc

    def drafts(self, batch: ChatBatch, progress: float) -> Iterator[Drafts]:
        head, tokens, device = self.head, batch.tokens, self._device
        # Which answer token is where; a block may reach beyond the text.
        depths = torch.arange(head.max_depth, device=device)
        answers = tokens.new_full((len(tokens), tokens.shape[1] + head.max_depth), -1)
        answers[batch.rows, batch.places + 2] = torch.arange(len(batch.rows), device=device)
        anchors = (batch.places + 1).unique()
        if head.training:
            chosen = self._random.permutation(len(anchors))[: head.options.anchors]
            anchors = anchors[torch.from_numpy(np.sort(chosen)).to(device)]
        hidden = head(self.scaled(batch), tokens, anchors)
        places = anchors[:, None] + depths
        before = tokens[:, places.clamp_max(tokens.shape[1] - 1)]
        logits, sure = head.heads(hidden, before)
        found = answers[:, places + 1]
        for depth in range(head.max_depth):
            rows, blocks = (found[..., depth] >= 0).nonzero(as_tuple=True)
            at = rows, blocks, torch.full_like(rows, depth)
            yield Drafts(
                depth, logits[at].float(), found[at], None if sure is None else sure[at].float()
            )
