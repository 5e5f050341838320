"""Train the head of the acceptance rule `judge` (Judge Decoding, arXiv 2501.19309).

The paper's labels come from people; these come from the target alone. The target writes texts, by
turns greedily and at temperature 1. Wherever the draft model's most probable token is another one
than the text's, that token takes the place of the text's, and the target reads the text's next
``LOOK`` tokens behind it. The replacement counts as right if they lose at most ``MARGIN`` nats a
token of their log-likelihood by it: what the target wanted to say is then still what it would say.

The head is a logistic regression on the target's last hidden state at the replacement. Its output
is a probability, and ``judge_threshold`` decides between speed and likeness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from paceline.train.length_heads import LengthHeadTask, is_validation, text_params
from paceline.train.trainer import LOG_FOLDER, TrainOptions, train
from paceline.types import FloatArray, IntArray, Need

LOOK = 8
MARGIN = 0.5
MOST = 48  # replacements that are tried in a text
_HIDDEN = frozenset({Need.HIDDEN_STATES})


@dataclass(frozen=True, slots=True, eq=False)
class JudgeRows:
    """Replacements of tokens in the target's texts.

    Attributes:
        token_ids: the draft model's token, not the text's.  # [n]
        loss: nats a token that the text after it loses.  # [n]
        target_hidden: the target's state at the replacement.  # [n, hidden]
        is_validation: 1 for a fifth of the texts.  # [n]
    """

    token_ids: IntArray
    loss: FloatArray
    target_hidden: Tensor
    is_validation: IntArray

    @property
    def accepted(self) -> FloatArray:
        """1 where the replacement counts as right.  # [n]"""
        return (self.loss <= MARGIN).astype(np.float64)


def collect_replacements(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int = 0
) -> JudgeRows:
    """Let the target write ``num_tokens`` after each prompt, and try other tokens there.

    Raises:
        InvalidArgument: the engine has no draft model, the target gives no hidden states, or the
            models never differ.
    """
    drafter = engine.drafters.get("draft_model")
    if not isinstance(drafter, DraftModel):
        raise InvalidArgument("drafter", None, "a draft model in this process")
    if Need.HIDDEN_STATES not in engine.target.provides:
        raise InvalidArgument("target", "no hidden states", "a model with hidden states")
    runner = engine.local_target.runner
    found: list[tuple[IntArray, FloatArray, Tensor]] = []
    validation: list[int] = []
    for start in tqdm(range(0, len(prompts), 8), desc="writing", unit="batch"):
        numbers = range(start, min(start + 8, len(prompts)))
        params = [text_params(number, num_tokens, seed) for number in numbers]
        config = SpeculationConfig(method="draft_model")
        sessions = engine.generate([prompts[i] for i in numbers], params, config)
        for number, session in zip(numbers, sessions, strict=True):
            ids, first = np.asarray(session.token_ids, np.int64), session.prompt_length
            places, tokens = _other_choices(drafter.runner, ids, first)
            if len(places):
                found.append((tokens, *try_replacements(runner, ids, places, tokens)))
                validation += [int(is_validation(number))] * len(places)
    if not found:
        raise InvalidArgument("drafter", "the target's equal", "one that sometimes differs")
    return JudgeRows(
        np.concatenate([tokens for tokens, _, _ in found]),
        np.concatenate([losses for _, losses, _ in found]),
        torch.cat([hidden for _, _, hidden in found]),
        np.array(validation, np.int64),
    )  # fmt: skip


def _other_choices(drafter: ModelRunner, ids: IntArray, first: int) -> tuple[IntArray, IntArray]:
    """Places from ``first`` on where the draft model has another token, and that token."""
    sequence = drafter.new_sequence()
    try:
        logits = drafter.forward([Segment(sequence, ids[:-1])]).logits
    finally:
        drafter.free(sequence)
    choices = np.concatenate([[-1], logits.argmax(-1).cpu().numpy()])
    places = np.arange(first, len(ids) - LOOK)  # enough text follows to judge by
    places = places[choices[places] != ids[places]]
    places = places[:: max(1, -(-len(places) // MOST))]
    return places, choices[places]


def try_replacements(
    target: ModelRunner, ids: IntArray, places: IntArray, tokens: IntArray
) -> tuple[FloatArray, Tensor]:
    """What the text loses if ``tokens`` take the place of its own tokens at ``places``.

    One forward reads the text, and beside it each replacement with the ``LOOK`` tokens behind it.

    Returns:
        Mean loss of log-likelihood of those tokens, in nats; below 0: they become likelier.  # [n]
        The target's last hidden state at each replacement.  # [n, hidden]
    """
    rows, parents = [ids[:-1]], [np.arange(-1, len(ids) - 2)]
    begins, count = [], len(ids) - 1
    for place, token in zip(places, tokens, strict=True):
        rows.append(np.concatenate([[token], ids[place + 1 : place + LOOK]]))
        parents.append(np.concatenate([[place - 1], np.arange(count, count + LOOK - 1)]))
        begins.append(count)
        count += LOOK
    sequence = target.new_sequence()
    try:
        segment = Segment(sequence, np.concatenate(rows), np.concatenate(parents).astype(np.int32))
        result = target.forward([segment], _HIDDEN)
    finally:
        target.free(sequence)
    likelihood = result.logits.float().cpu().log_softmax(-1)
    hidden = result.beside_logits(Need.HIDDEN_STATES)
    assert hidden is not None
    losses = []
    for place, begin in zip(places, begins, strict=True):
        text = torch.from_numpy(ids[place + 1 : place + 1 + LOOK])[:, None]
        own = likelihood[place : place + LOOK].gather(1, text)
        replaced = likelihood[begin : begin + LOOK].gather(1, text)
        losses.append(float((own - replaced).mean()))
    return np.array(losses), hidden[begins].float().cpu()


class _Linear(nn.Module):
    """The head; states are scaled to unit variance, which :meth:`weights` folds in again."""

    scale: Tensor
    mean: Tensor

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", 1.0 / hidden.std(0).clamp(min=1e-6))
        self.register_buffer("mean", hidden.mean(0))
        self.out = nn.Linear(hidden.shape[1], 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.out((hidden - self.mean) * self.scale)
        return scores[:, 0]

    def weights(self) -> dict[str, Tensor]:
        weight = self.out.weight.data[0] * self.scale
        return {"weight": weight, "bias": self.out.bias.data - weight @ self.mean}


def train_judge(
    engine: Engine,
    out: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 128,
    epochs: int = 12,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the judge of a pair of models and write ``out/judge.safetensors``.

    The weights with the best validation loss are kept. Checkpoint and plot are in
    ``out/training/judge``.

    Returns:
        The file and its bytes; the number of replacements and the share of right ones; on the
        texts that no weight is fitted to, the loss, and at threshold 0.5 the shares of right and of
        wrong replacements that the judge accepts.

    Raises:
        InvalidArgument: an engine that gives no training data; too few prompts.
    """
    if len(prompts) < 10:
        raise InvalidArgument("prompts", len(prompts), "at least 10: a fifth is for validation")
    rows = collect_replacements(engine, prompts, num_tokens, seed)
    right = torch.from_numpy(rows.accepted).float()
    metadata = {
        "kind": "judge",
        "vocab_size": str(engine.target.vocab_size),
        "target_hidden_size": str(rows.target_hidden.shape[1]),
        "drafter_hidden_size": "0",  # it fits the target with any draft model
    }
    fitted = torch.from_numpy(rows.is_validation == 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Linear(rows.target_hidden[fitted])

    def loss(index: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(rows.target_hidden[index]), right[index])

    task = LengthHeadTask(
        "judge", model, loss, rows, np.arange(len(right)), metadata, model.weights
    )
    epoch = math.ceil(task.num_rows / 256)
    trained = train(
        task,
        TrainOptions(
            out=out,
            log=out / LOG_FOLDER / "judge",
            steps=epochs * epoch,
            batch_size=256,
            learning_rate=0.02,
            seed=seed,
            eval_every=epoch,
            patience=epochs + 1,  # never stops early, and keeps the best
        ),
    )
    file = out / "judge.safetensors"
    accepted = (model(rows.target_hidden) > 0).numpy()[~fitted.numpy()]
    held_out = rows.accepted[~fitted.numpy()]
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "num_replacements": len(right),
        "right": round(float(rows.accepted.mean()), 4),
        "validation_loss": round(-trained.metrics[task.criterion], 4),
        "accepted_of_right": round(float(accepted[held_out == 1].mean()), 4),
        "accepted_of_wrong": round(float(accepted[held_out == 0].mean()), 4),
    }
