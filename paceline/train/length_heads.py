"""Train the length controllers that learn: `specdecpp`, `disco` and `ldlp`.

The target writes text greedily, then draft model and target run over it once. Up to its first miss
a draft continues that same text. So the draft model's hits are exactly the labels "accepted if all
tokens before were accepted" that the three controllers predict, and runs of hits are the best
speculation lengths.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner, Segment
from paceline.sampling import SamplingParams
from paceline.train.trainer import LOG_FOLDER, Batch, TrainOptions, train
from paceline.types import FloatArray, IntArray, Need

KINDS = ("specdecpp", "disco", "ldlp")
MAX_LENGTH = 20
MISMATCH_WEIGHT = 6.0  # weight of rejected tokens in SpecDec++'s loss
EMBEDDING_SIZE = 8  # components that LDLP keeps of a token's embedding
_HIDDEN = frozenset({Need.HIDDEN_STATES})


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRows:
    """Outputs of both models on all texts that the target wrote, one after the other.

    ``hits[i]`` tells whether the draft model would have drafted token ``i``, ``run_before[i]`` how
    many tokens before it were hits, ``run_from[i]`` how many from it on (-1: the text ends first).
    """

    token_ids: IntArray  # [n]
    hits: IntArray  # [n]
    run_before: IntArray  # [n]
    run_from: IntArray  # [n]
    draft_hidden: Tensor  # [n, hidden] that token i was drafted from
    draft_scores: FloatArray  # [n, 2] top probability and entropy there
    target_hidden: Tensor  # [n, hidden] that the target chose token i from
    is_validation: IntArray  # [n] a tenth of the texts


def collect(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> LabelledRows:
    """Let the target write ``num_tokens`` after each prompt, and record both models there.

    Raises:
        InvalidArgument: the engine has no draft model, or a model gives no hidden states.
    """
    drafter = engine.drafters.get("draft_model")
    if not isinstance(drafter, DraftModel):
        raise InvalidArgument("drafter", None, "a draft model in this process")
    parts: list[dict[str, Any]] = []
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for start in tqdm(range(0, len(prompts), 8), desc="writing", unit="batch"):
        batch = prompts[start : start + 8]
        config = SpeculationConfig(method="draft_model")
        for session in engine.generate(batch, params, config):
            parts.append(_look(engine.local_target.runner, drafter.runner, session))
            parts[-1]["is_validation"] = np.full(num_tokens, len(parts) % 10 == 0, np.int64)
    joined: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        joined[name] = torch.cat(values) if torch.is_tensor(values[0]) else np.concatenate(values)
    return LabelledRows(**joined)


def _look(target: ModelRunner, drafter: ModelRunner, session: Any) -> dict[str, Any]:
    ids = np.asarray(session.token_ids, np.int64)
    first = session.prompt_length
    logits, draft_hidden = _run(drafter, ids[:-1])
    _, target_hidden = _run(target, ids[:-1])
    log_q = logits[first - 1 :].log_softmax(-1)
    hits = (log_q.argmax(-1).numpy() == ids[first:]).astype(np.int64)
    count = len(hits)
    before, onwards = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    for i in range(1, count):
        before[i] = before[i - 1] + 1 if hits[i - 1] else 0
    for i in range(count - 1, -1, -1):
        if not hits[i]:
            onwards[i] = 0
        elif i + 1 < count and onwards[i + 1] >= 0:
            onwards[i] = onwards[i + 1] + 1
    entropy = -(log_q.exp() * log_q).sum(-1)
    return {
        "token_ids": ids[first:],
        "hits": hits,
        "run_before": before,
        "run_from": onwards,
        "draft_hidden": draft_hidden[first - 1 :],
        "draft_scores": torch.stack([log_q.max(-1).values.exp(), entropy], -1).numpy(),
        "target_hidden": target_hidden[first - 1 :],
    }


def _run(runner: ModelRunner, token_ids: IntArray) -> tuple[Tensor, Tensor]:
    """Logits and hidden states after every token.  # [n, vocab], [n, hidden] float32"""
    sequence = runner.new_sequence()
    try:
        result = runner.forward([Segment(sequence, token_ids)], _HIDDEN)
    finally:
        runner.free(sequence)
    hidden = result.beside_logits(Need.HIDDEN_STATES)
    if hidden is None:
        raise InvalidArgument("target", type(runner).__name__, "a model with hidden states")
    return result.logits.float().cpu(), hidden.float().cpu()


class _Blocks(nn.Module):
    """SpecDec++'s acceptance head: residual blocks and a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # type: ignore[arg-type]
        self.out = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        logits: Tensor = self.out(x)
        return logits[:, 0]


class _Lengths(nn.Module):
    """LDLP: three layers over a hidden state and a token's embedding."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, EMBEDDING_SIZE)
        nn.init.normal_(self.embedding.weight, std=0.1)
        sizes = (size + EMBEDDING_SIZE, 64, 32, 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        x = torch.cat([hidden, self.embedding(token_ids)], -1)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers):
                x = F.relu(x)
        return x[:, 0]


class LengthHeadTask:
    """One length controller's head; see :class:`paceline.train.trainer.Task`.

    Such a head drafts nothing, so the criterion is its negated loss on the validation texts.

    Args:
        loss: the loss of ``model`` on some rows.
        index: rows to train on.
        weights: the tensors of ``model`` to save.
    """

    criterion = "negative_loss"

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Callable[[Tensor], Tensor],
        rows: LabelledRows,
        index: IntArray,
        metadata: dict[str, str],
        weights: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.name, self.model, self._loss = name, model, loss
        self._training = torch.from_numpy(index[rows.is_validation[index] == 0])
        self._validation = torch.from_numpy(index[rows.is_validation[index] == 1])
        self._metadata, self._weights = metadata, weights
        self.num_rows = len(self._training)
        digest = hashlib.sha256(rows.token_ids.tobytes() + rows.hits.tobytes())
        digest.update(rows.target_hidden.numpy().tobytes())
        self.settings: Mapping[str, Any] = {**metadata, "data": digest.hexdigest()[:16]}

    def loss(self, batch: Batch) -> Tensor:
        return self._loss(self._training[batch.rows])

    def evaluate(self) -> dict[str, float]:
        return {self.criterion: -float(self._loss(self._validation))}

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        weights = {name: value.half().contiguous() for name, value in self._weights().items()}
        save_file(weights, str(folder / f"{self.name}.safetensors"), self._metadata)

    def describe_rows(self, rows: IntArray) -> str:
        return f"tokens {self._training[rows].tolist()} of the target's texts"


def specdecpp_task(rows: LabelledRows, metadata: dict[str, str]) -> LengthHeadTask:
    """Weighted cross entropy on hits."""
    hits = torch.from_numpy(rows.hits).float()
    model = _Blocks(rows.draft_hidden.shape[1])

    def loss(index: Tensor) -> Tensor:
        weight = torch.where(hits[index] > 0, 1.0, MISMATCH_WEIGHT)
        logits = model(rows.draft_hidden[index])
        return F.binary_cross_entropy_with_logits(logits, hits[index], weight)

    index = np.arange(len(hits))
    return LengthHeadTask("specdecpp", model, loss, rows, index, metadata, model.state_dict)


def disco_task(rows: LabelledRows, metadata: dict[str, str], seed: int) -> LengthHeadTask:
    """Logistic regression on hits; the depth of each token is drawn from its possible ones."""
    random = np.random.default_rng(seed)
    depth = random.integers(1, np.minimum(rows.run_before + 1, MAX_LENGTH) + 1)
    x = torch.from_numpy(
        np.column_stack([rows.draft_scores, np.log(depth)]).astype(np.float32)
    )  # the columns of paceline.lengths.disco.features
    hits = torch.from_numpy(rows.hits).float()
    model = nn.Linear(x.shape[1], 1)

    def loss(index: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x[index])[:, 0], hits[index])

    def weights() -> dict[str, Tensor]:
        return {"weight": model.weight.data[0], "bias": model.bias.data}

    return LengthHeadTask("disco", model, loss, rows, np.arange(len(hits)), metadata, weights)


def ldlp_task(rows: LabelledRows, metadata: dict[str, str], vocab_size: int) -> LengthHeadTask:
    """Absolute error of the number of hits that follow a token."""
    # token i + 1 and the hits after it, predicted at i
    known = np.flatnonzero(rows.run_from[1:] >= 0)
    wanted = torch.from_numpy(np.minimum(rows.run_from, MAX_LENGTH)).float()
    tokens = torch.from_numpy(rows.token_ids)
    model = _Lengths(rows.target_hidden.shape[1], vocab_size)

    def loss(index: Tensor) -> Tensor:
        predicted = model(rows.target_hidden[index], tokens[index])
        return F.l1_loss(predicted, wanted[index + 1])

    def weights() -> dict[str, Tensor]:
        state = dict(model.state_dict())
        return {"embedding": state.pop("embedding.weight"), **state}

    return LengthHeadTask("ldlp", model, loss, rows, known, metadata, weights)


def train_length_head(
    engine: Engine,
    kind: str,
    out: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 128,
    epochs: int = 12,
    seed: int = 0,
) -> dict[str, Any]:
    """Train one controller (or all of :data:`KINDS`) and write ``out/<kind>.safetensors``.

    The weights with the best validation loss are kept. Checkpoint and plot of each kind are in
    ``out/training/<kind>``.

    Returns:
        The file, its bytes and the validation loss of each kind.

    Raises:
        InvalidArgument: an unknown kind; an engine that gives no training data; too few prompts.
    """
    kinds = KINDS if kind == "all" else (kind,)
    if not set(kinds) <= set(KINDS):
        raise InvalidArgument("kind", kind, f"all, {', '.join(KINDS)}")
    if len(prompts) < 10:
        raise InvalidArgument("prompts", len(prompts), "at least 10: a tenth is for validation")
    rows = collect(engine, prompts, num_tokens)
    vocab_size = engine.target.vocab_size
    result: dict[str, Any] = {}
    for name in kinds:
        metadata = {
            "kind": name,
            "vocab_size": str(vocab_size),
            "target_hidden_size": str(rows.target_hidden.shape[1]),
            "drafter_hidden_size": str(rows.draft_hidden.shape[1]),
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for the first weights
            if name == "specdecpp":
                task = specdecpp_task(rows, metadata)
            elif name == "disco":
                task = disco_task(rows, metadata, seed)
            else:
                task = ldlp_task(rows, metadata, vocab_size)
        epoch = math.ceil(task.num_rows / 256)
        trained = train(
            task,
            TrainOptions(
                out=out,
                log=out / LOG_FOLDER / name,
                steps=epochs * epoch,
                batch_size=256,
                learning_rate=0.02 if name == "disco" else 1e-3,
                seed=seed,
                eval_every=epoch,
                patience=epochs + 1,  # never stops early, and keeps the best
            ),
        )
        file = out / f"{name}.safetensors"
        result[name] = {
            "file": str(file),
            "bytes": file.stat().st_size,
            "validation_loss": round(-trained.metrics[task.criterion], 4),
        }
    result["num_positions"] = len(rows.hits)
    result["acceptance_rate"] = round(float(rows.hits.mean()), 4)
    return result


def training_prompts(engine: Engine, count: int, length: int = 64) -> list[list[int]]:
    """Beginnings of standard library modules outside the benchmark's prompts."""
    from paceline.train.corpus import split

    assert engine.tokenizer is not None
    training, _ = split()
    step = max(1, len(training) // count)
    prompts = []
    for i, document in enumerate(training[::step]):
        middle = len(document.text) * (i % 7) // 8  # do not always take a file's first lines
        ids = engine.tokenizer.encode(document.text[middle : middle + 8 * length])
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts[:count]
