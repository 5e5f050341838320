"""The kinds of ``paceline train``: a name, and a function that builds its task.

The functions take plain values, so that a worker on another machine builds the same task, and
resolves the names of models (:mod:`paceline.model_names`) there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument
from paceline.gguf_folder import model_folder
from paceline.model_names import resolve_model
from paceline.models.heads import HEADS
from paceline.train.data import load_text
from paceline.train.draft_models import DraftTask
from paceline.train.early_exit import ExitsTask
from paceline.train.heads import DraftHeadTask
from paceline.train.trainer import Task


def exits(
    *,
    target: str | Path | None = None,
    data: Sequence[Path] = (),
    length: int = 256,
    held_out_rows: int = 32,
    chat: bool | None = None,
    device: str = "cpu",
    seed: int = 0,
    **knobs: Any,
) -> Task:
    """Train early exits of ``target``, by default the demo's, by layer dropout and exit losses."""
    target = resolve_model(target or "demo")
    return ExitsTask(target, load_text(target, data, length, held_out_rows, chat), **knobs)


def distill(
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    fresh: bool = False,
    data: Sequence[Path] = (),
    length: int = 256,
    held_out_rows: int = 32,
    chat: bool | None = None,
    **knobs: Any,
) -> Task:
    """DistillSpec; without ``target``, for the demo pair and from its drafter on.

    Args:
        fresh: start from the target's first layers even if the target has a drafter.
    """
    if target is None:
        target, drafter = "demo", drafter or (None if fresh else "demo-drafter")
    target = model_folder(resolve_model(target))
    drafter = None if drafter is None else resolve_model(drafter)
    text = load_text(target, data, length, held_out_rows, chat)
    return DraftTask(target, text, drafter=drafter, **knobs)


def align(**knobs: Any) -> Task:
    """Direct alignment: TVD++ on text that the target writes."""
    chosen = {"name": "align", "divergence": "tvdpp", "data_source": "target"}
    return distill(**(chosen | knobs))


def nested(*, exits: Sequence[int] = (1,), **knobs: Any) -> Task:
    """Sorted fine-tuning: the sum of the losses of the drafter's nested models."""
    return distill(**({"name": "sorted", "divergence": "ce"} | knobs), exits=exits)


def head(
    kind: str,
    *,
    target: str | Path | None = None,
    data: Sequence[Path] = (),
    length: int = 256,
    held_out_rows: int = 32,
    chat: bool | None = None,
    **knobs: Any,
) -> Task:
    """Train a draft head for ``target``, by default the demo's."""
    target = model_folder(resolve_model(target or "demo"))
    text = load_text(target, data, length, held_out_rows, chat)
    return DraftHeadTask(target, text, kind=kind, **knobs)


KINDS: Mapping[str, Callable[..., Task]] = {
    "exits": exits,
    "distill": distill,
    "align": align,
    "sorted": nested,
    **{kind: partial(head, kind) for kind in HEADS},
}


def build(kind: str, **knobs: Any) -> Task:
    """The task of a kind.

    Raises:
        InvalidArgument: an unknown kind, or a knob with a wrong value.
    """
    if kind not in KINDS:
        raise InvalidArgument("kind", kind, f"one of {', '.join(KINDS)}")
    return KINDS[kind](**knobs)
