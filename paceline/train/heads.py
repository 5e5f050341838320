"""Train a draft head of any kind: its own loss, on what the frozen target computes for text."""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.architectures import MODEL_TYPES, text_config
from paceline.models.base import Segment
from paceline.models.heads import HEADS, load_any_head
from paceline.models.heads.base import Head, HeadBatch, HeadTarget
from paceline.models.layouts import read_config
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.train.data import TrainingText
from paceline.train.trainer import Batch
from paceline.types import STATES, IntArray, Need

DataSource = Literal["corpus", "target"]
DATA_SOURCES: tuple[str, ...] = get_args(DataSource)

_ROWS = 4  # that the target reads at once
_TEMPERATURES = (0.0, 1.0)  # of the rows that the target writes, in turn


def _target(
    folder: Path, device: str, kv_tokens: int
) -> tuple[HeadTarget, LlamaRunner | TransformersRunner]:
    """A target's parts for training in float32, and the target itself."""
    if text_config(read_config(folder)).get("model_type") in MODEL_TYPES:
        parts = HeadTarget.from_folder(folder, device=device)
        return parts, LlamaRunner(folder, device=device, kv_tokens=kv_tokens)
    runner = TransformersRunner(folder, device=device, kv_tokens=kv_tokens)
    return HeadTarget.of_runner(folder, runner), runner


class DraftHeadTask:
    """Trains a head of any kind; the target stays unchanged.

    Held-out measurements, from the agreement a_1, a_2, ... of the head with the target's argmax at
    each depth: ``accepted_length`` is 1 + a_1 + a_1 a_2 + ..., the tokens of a round with a chain
    of the deepest measured depth if depths were independent; ``acceptance`` is the share of the
    drafted tokens in it.

    Args:
        target: folder of a model; on the general path it must give its states.
        kind: one of :data:`paceline.models.heads.HEADS`.
        options: the head's options by name; missing ones have the kind's defaults.
        data_source: ``corpus`` trains on the text as it is. With ``target`` the target continues
            the first quarter of each row, by turns greedily and at temperature 1, because a head
            reads such text when it serves.
        device: of the training.
        seed: of the head's first weights and of what the target writes.
        start: folder of another head of this target, also of another kind, to take first weights
            from: those of equal names and shapes.
        int8: save matrices in eight bits.

    Raises:
        InvalidArgument, ModelNotFound: an argument does not fit, or a file is missing.
    """

    criterion = "acceptance"

    def __init__(
        self,
        target: Path,
        text: TrainingText,
        *,
        kind: str,
        options: Mapping[str, Any] | None = None,
        data_source: str = "corpus",
        device: str = "cpu",
        seed: int = 0,
        start: Path | None = None,
        int8: bool = False,
    ) -> None:
        if kind not in HEADS:
            raise InvalidArgument("kind", kind, f"one of {', '.join(HEADS)}")
        if data_source not in DATA_SOURCES:
            raise InvalidArgument("data_source", data_source, f"one of {', '.join(DATA_SOURCES)}")
        # A row that the target writes also needs room for its draft.
        parts, self._runner = _target(target, device, 2 * _ROWS * (text.length + 8))
        context = parts.config.context_length
        if text.length >= context:
            raise InvalidArgument("length", text.length, f"below the target's context, {context}")
        chosen = read_options(HEADS[kind], options or {})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.head: Head = HEADS[kind].made(parts, chosen)
        if start is not None:
            start_from(self.head, start)
        self.head.bind(target)
        self._int8 = int8
        self.name, self.model = kind, typing.cast(nn.Module, self.head)
        self._text, self._seed, self._device = text, seed, device
        self._writes = data_source == "target"
        self._written: dict[int, Tensor] = {}
        self._held_out = text.held_out
        if self._writes:
            self._held_out = self._continued(text.held_out, range(-len(text.held_out), 0))
        self.num_rows = len(text.training)
        self.settings: Mapping[str, Any] = {
            "target": parts.identity, "data": text.digest, "options": asdict(chosen),
            "data_source": data_source, "model_seed": seed,
        }  # fmt: skip
        if start is not None:
            self.settings = {**self.settings, "start": weights_digest(self.head)}

    def loss(self, batch: Batch) -> Tensor:
        rows, mask = self._rows(batch.rows), self._mask_of(batch.rows)
        loss, _ = self.head.loss(self._read(rows, mask, batch.generator))
        return loss

    def evaluate(self) -> dict[str, float]:
        generator = torch.Generator(self._device).manual_seed(0)
        loss, sums = 0.0, dict[str, Tensor]()
        count = len(self._held_out)
        mask = self._written_mask(self._text.held_out_mask)
        for rows, places in zip(
            self._held_out.split(_ROWS), torch.arange(count).split(_ROWS), strict=True
        ):
            part = None if mask is None else mask[places]
            share = len(rows) / count
            if mask is not None and part is not None:
                share = int(part[:, 1:].sum()) / int(mask[:, 1:].sum())
            value, metrics = self.head.loss(self._read(rows, part, generator))
            loss += share * float(value)
            for name, metric in metrics.items():
                sums[name] = sums.get(name, torch.zeros(())) + share * metric.double().cpu()
        agreement = sums.pop("agreement")
        accepted = agreement.cumprod(0)
        each = {f"agreement_{i}": float(value) for i, value in enumerate(agreement, 1)}
        others = {name: float(value) for name, value in sums.items() if value.dim() == 0}
        return {
            "acceptance": float(accepted.mean()),
            "accepted_length": 1 + float(accepted.sum()),
            **each,
            "loss": loss,
            **others,
        }

    def save(self, folder: Path) -> None:
        self.head.save(folder, int8=self._int8)

    def describe_rows(self, rows: IntArray) -> str:
        return self._text.describe(rows)

    # --- what the target says -------------------------------------------------------------------

    @torch.no_grad()
    def _read(self, rows: Tensor, mask: Tensor | None, generator: torch.Generator) -> HeadBatch:
        """Run the target over rows of text.

        Args:
            rows: # [batch, length + 1] int64
            mask: the tokens that have a loss; None: all.  # bool [batch, length + 1]
        """
        wants = self.head.needs | self.head.training_needs
        wants &= STATES
        wants |= {Need.HIDDEN_STATES}
        hidden, logits, states = [], [], []
        for part in rows.split(_ROWS):
            segments = [
                Segment(self._runner.new_sequence(), row) for row in part.numpy().astype(np.int64)
            ]
            try:
                result = self._runner.forward(segments, wants)
            finally:
                for segment in segments:
                    self._runner.free(segment.sequence)
            shape = tuple(part.shape)
            hidden.append(result.extras[Need.HIDDEN_STATES].unflatten(0, shape))
            logits.append(result.logits.unflatten(0, shape))
            if Need.LAYER_STATES in wants:
                states.append(result.extras[Need.LAYER_STATES].unflatten(0, shape))
        counts = None
        if mask is not None:  # no label follows the last token
            counts = F.pad(mask[:, 1:], (0, 1)).to(self._device)
        return HeadBatch(
            rows.to(self._device), torch.cat(hidden), torch.cat(logits),
            torch.cat(states) if states else None, generator, counts,
        )  # fmt: skip

    def _rows(self, chosen: IntArray) -> Tensor:
        """Rows of the training text, or the target's versions of them.  # [batch, length + 1]"""
        if not self._writes:
            return self._text.training[chosen]
        new = [row for row in chosen.tolist() if row not in self._written]
        if new:
            rows = self._continued(self._text.training[new], new)
            self._written |= dict(zip(new, rows, strict=True))
        return torch.stack([self._written[row] for row in chosen.tolist()])

    def _mask_of(self, chosen: IntArray) -> Tensor | None:
        """The tokens of :meth:`_rows` that have a loss; None: all.  # bool [batch, length + 1]"""
        if self._text.training_mask is None:
            return None
        return self._written_mask(self._text.training_mask[chosen])

    def _written_mask(self, mask: Tensor | None) -> Tensor | None:
        """A mask of rows that the target may have written: whatever it wrote has a loss."""
        if mask is None or not self._writes:
            return mask
        places = torch.arange(mask.shape[1])
        return mask | (places >= _prompt_length(mask.shape[1]))

    def _continued(self, rows: Tensor, numbers: Sequence[int]) -> Tensor:
        """Rows that keep their first quarter; the target writes the rest.

        A row's text depends only on its number and the seed, so that an interrupted training
        finds the same text.  # [batch, length + 1]
        """
        engine = Engine(ModelTarget(self._runner))
        size = rows.shape[1]
        prompt = _prompt_length(size)
        plain = SamplingParams(max_tokens=size - prompt, ignore_eos=True)
        params = [
            replace(plain, temperature=_TEMPERATURES[n % 2], seed=(self._seed << 32) + n % 2**32)
            for n in numbers
        ]
        ar = SpeculationConfig(method="ar")
        sessions = engine.generate(rows[:, :prompt].tolist(), params, ar)
        return torch.tensor([session.token_ids for session in sessions])


def _prompt_length(size: int) -> int:
    """Tokens of a row of ``size`` that the target continues."""
    return max(2, size // 4)


def start_from(head: Head, folder: Path) -> None:
    """Copy the parameters that another head of the same target has under equal names.

    Raises:
        InvalidArgument: the folder has no head, one for another target, or nothing that fits.
    """
    other = load_any_head(folder, head.target)
    given = dict(other.named_parameters())
    fitting = {
        name: parameter
        for name, parameter in head.named_parameters()
        if name in given and given[name].shape == parameter.shape
    }
    if not fitting:
        allowed = f"a head with parameters of a {head.kind} head"
        raise InvalidArgument("start", f"{folder}, a {other.kind} head", allowed)
    with torch.no_grad():
        for name, parameter in fitting.items():
            parameter.copy_(given[name])


def weights_digest(head: Head) -> str:
    """A name for the values of the head's parameters.  # 16 hex digits"""
    digest = hashlib.sha256()
    for parameter in head.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def read_options(head: type[Head], given: Mapping[str, Any]) -> Any:
    """The options of a head, from values or from JSON texts.

    Raises:
        InvalidArgument: an option that the head does not have, or a value of another type.
    """
    hints = typing.get_type_hints(head.Options)
    names = [f.name for f in fields(head.Options)]
    values = {}
    for name, value in given.items():
        if name not in names:
            raise InvalidArgument("set", name, f"an option of {head.kind}: {', '.join(names)}")
        values[name] = _value(f"set {name}", value, hints[name])
    return head.Options(**values)


def _value(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``: a bool, a number, a string, a tuple of these, or None."""
    if isinstance(value, str) and (hint is not str or value.startswith('"')):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidArgument(name, value, _described(hint)) from None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # a type or None
        if value is None:
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_value(name, item, get_args(hint)[0]) for item in value)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise InvalidArgument(name, value, _described(hint))
    return value


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of values: each {_described(get_args(hint)[0])}"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_described, get_args(hint)))
    words = {
        types.NoneType: "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
    }
    return words.get(hint, str(hint))
