"""``distill``, ``align`` and ``sorted``: draft models that learn their target's distribution.

It is one task in three variants:

- DistillSpec (Zhou et al. 2023, arXiv 2310.08461): any of several divergences between drafter and
  target, on text of the corpus, of the target, or of the drafter itself (on-policy).
- Direct alignment (Goel et al. 2024, arXiv 2403.00858): the target's answers and TVD++.
- Sorted fine-tuning (SoFT) for S2D (Kavehzadeh et al. 2024, arXiv 2407.01955): the losses of
  nested sub-models, which are the drafter's first layers with its norm and head, are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.tokenizer import check_same_tokenizer, load_tokenizer
from paceline.train.checkpoints import (
    all_logits,
    check_exits,
    check_layers,
    check_length,
    first_layers,
    has_weights,
    load_model,
    save_model,
)
from paceline.train.data import TrainingText
from paceline.train.distill import sample_text
from paceline.train.early_exit import read_out
from paceline.train.losses import DIVERGENCES, divergence_loss, measure
from paceline.train.pretrain import layer_states
from paceline.train.trainer import Batch
from paceline.types import IntArray

DataSource = Literal["corpus", "target", "on_policy", "mixed"]
DATA_SOURCES: tuple[str, ...] = get_args(DataSource)


class DraftTask:
    """The task of the three kinds; it measures ``acceptance`` and ``agreement``.

    On held-out text, ``acceptance`` is sum_x min(p, q), and ``agreement`` the share of positions
    with the same argmax. With the suffix ``_written`` both are measured on text that the target
    writes after held-out prompts, which is what a drafter reads when it serves.

    Args:
        target: folder of the model to draft for; unchanged.
        drafter: folder to start from. A folder with a config.json and no weights (it borrows the
            target's tokenizer) gives random weights; None takes the target's first ``layers``.
        divergence: one of :data:`paceline.train.losses.DIVERGENCES`.
        data_source: what stands in rows after their first quarter. ``corpus``: its own text;
            ``target``, ``on_policy``: what target or drafter writes at temperature 1, with a loss
            on that part only; ``mixed``: the drafter writes the share ``mix`` of the rows, the
            others are the corpus's.
        beta: weight of the target in ``jsd``.
        exits: nested sub-models, in layers; their losses are added to the whole drafter's.
        device: of the training.
        seed: of random weights.

    Raises:
        InvalidArgument, ModelNotFound: an argument does not fit, or a file is missing.
        TokenizerMismatch: drafter and target do not share a tokenizer.
    """

    criterion = "acceptance"

    def __init__(
        self,
        target: Path,
        text: TrainingText,
        *,
        name: str = "distill",
        drafter: Path | None = None,
        layers: int = 2,
        divergence: str = "forward_kl",
        data_source: str = "corpus",
        mix: float = 0.5,
        beta: float = 0.5,
        exits: Sequence[int] = (),
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        if divergence not in DIVERGENCES:
            raise InvalidArgument("divergence", divergence, f"one of {', '.join(DIVERGENCES)}")
        if data_source not in DATA_SOURCES:
            raise InvalidArgument("data_source", data_source, f"one of {', '.join(DATA_SOURCES)}")
        if not 0 <= mix <= 1:
            raise InvalidArgument("mix", mix, "0 to 1")
        if not 0 < beta < 1:
            raise InvalidArgument("beta", beta, "above 0 and below 1")
        self.name = name
        self._target = load_model(target).to(device).requires_grad_(False)
        check_length(self._target, text.length)
        if drafter is None:
            self.model = first_layers(self._target.cpu(), layers)
            self._target.to(device)
        else:
            if has_weights(drafter):
                check_same_tokenizer(load_tokenizer(target), load_tokenizer(drafter))
            self.model = load_model(drafter, random_weights=not has_weights(drafter), seed=seed)
            check_length(self.model, text.length)
        vocab_sizes = [int(m.config.vocab_size) for m in (self._target, self.model)]
        self._vocab_size = min(vocab_sizes)  # some models pad theirs
        depth = int(self.model.config.num_hidden_layers)
        check_exits(exits, depth)
        self.exits = tuple(sorted({*exits, depth}))
        if len(self.exits) > 1:
            check_layers(self.model, "drafter")
            check_length(self.model, text.length, windows=False)
        self._folder, self._text = target, text
        self._divergence, self._source = divergence, data_source
        self._mix, self._beta = mix, beta
        self._prompt = max(1, (text.length + 1) // 4)
        self._written: Tensor | None = None
        self.num_rows = len(text.training)
        self.settings: Mapping[str, Any] = {
            "target": str(target.resolve()), "data": text.digest,
            "drafter": str(drafter.resolve()) if drafter else f"{layers} layers of the target",
            "divergence": divergence, "data_source": data_source, "mix": mix, "beta": beta,
            "exits": list(self.exits), "model_seed": seed,
        }  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        rows = self._text.training[batch.rows].to(self._target.device)
        mask = self._text.mask(batch.rows).to(rows.device)
        rows, counts = self._rewrite(rows, batch, mask)  # counts: bool [batch, length]
        ids, labels = rows[:, :-1], rows[:, 1:][counts]
        size = self._vocab_size
        if self._divergence == "ce":
            target = torch.empty(0)
        else:
            with torch.no_grad():
                target = all_logits(self._target, ids)[counts][:, :size]
        total = torch.zeros((), device=rows.device)
        for logits in self._nested(ids):
            total = total + divergence_loss(
                self._divergence, logits[counts][:, :size], target, labels,
                beta=self._beta, generator=batch.generator,
            )  # fmt: skip
        return total

    def _rewrite(
        self, rows: Tensor, batch: Batch, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows with the data source's text, and the positions that have a loss.

        Args:
            mask: the tokens that have a loss in the rows as they are.  # bool [batch, length + 1]
        """
        counts = torch.ones(rows.shape[0], rows.shape[1] - 1, dtype=torch.bool, device=rows.device)
        if mask is not None:
            counts &= mask[:, 1:]
        if self._source == "corpus":
            return rows, counts
        written = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        if self._source == "mixed":
            chance = torch.rand(len(rows), generator=batch.generator, device=rows.device)
            written = chance < self._mix
            if not written.any():
                return rows, counts
        writer = self._target if self._source == "target" else self.model
        seed = int(torch.randint(2**31, (1,), generator=batch.generator, device=rows.device))
        rows = rows.clone()
        rows[written] = self._write(writer, rows[written], seed)
        # Whatever the writer wrote has a loss, also where the corpus has a question.
        counts[written] = torch.arange(counts.shape[1], device=rows.device) >= self._prompt - 1
        return rows, counts

    def _write(self, writer: Any, rows: Tensor, seed: int) -> Tensor:
        """The text that ``writer`` writes at temperature 1 after the first quarter of each row."""
        was_training = writer.training
        writer.eval()
        ones = torch.ones(len(rows), device=rows.device)
        own = sample_text(writer, rows[:, : self._prompt], rows.shape[1], ones, seed)
        writer.train(was_training)
        return own.clamp_max(self._vocab_size - 1)

    def _nested(self, ids: Tensor) -> list[Tensor]:
        """Logits of each sub-model, the whole drafter last.  # float32 [batch, length, vocab]"""
        if len(self.exits) == 1:
            return [all_logits(self.model, ids)]
        states = layer_states(self.model, ids)
        return [read_out(self.model, states[e - 1]) for e in self.exits]

    def evaluate(self) -> dict[str, float]:
        size = self._vocab_size

        def logits_of(ids: Tensor) -> tuple[list[Tensor], Tensor]:
            nested = [logits[..., :size] for logits in self._nested(ids)]
            return nested, all_logits(self._target, ids)[..., :size]

        names = [f"exit_{e}" for e in self.exits]
        rows = self._text.held_out.to(self._target.device)
        mask = self._text.held_out_mask
        counts = None if mask is None else mask.to(rows.device)
        metrics = measure(rows, logits_of, names, counts=counts)
        if self._written is None:  # once: the target does not change
            self._written = self._write(self._target, rows, seed=0)
        written = measure(self._written, logits_of, names, first=self._prompt - 1)
        return metrics | {f"{key}_written": written[key] for key in ("acceptance", "agreement")}

    def save(self, folder: Path) -> None:
        save_model(self.model, self._folder, folder)

    def describe_rows(self, rows: IntArray) -> str:
        return self._text.describe(rows)
