"""What the readers of published checkpoints share.

Every tensor of a file is used, and every one that a head needs is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.layouts import listed


def layers_config(raw: Mapping[str, Any], default_type: str) -> dict[str, Any]:
    """config.json of a drafter's layers, with what transformers has as a default.

    Args:
        default_type: of layers whose config names no ``model_type``.
    """
    from transformers import AutoConfig

    kind = raw.get("model_type", default_type)
    whole = AutoConfig.for_model(kind, **{k: v for k, v in raw.items() if k != "model_type"})
    return dict(whole.to_dict())


def fill(head: nn.Module, tensors: Mapping[str, Tensor], named: str) -> None:
    """Load tensors under the head's names.

    Args:
        named: what the errors call the head.

    Raises:
        InvalidArgument: a tensor is missing, left over, or has another shape.
    """
    wanted = {name: value.shape for name, value in head.state_dict().items()}
    missing, left = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing:
        allowed = f"the {len(wanted)} tensors of its kind"
        raise InvalidArgument("head", f"{named}, without {listed(missing)}", allowed)
    if left:
        allowed = f"only the {len(wanted)} tensors of its kind"
        raise InvalidArgument("head", f"{named}, with {listed(left)}", allowed)
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            found = f"{named}, {name} of shape {list(tensors[name].shape)}"
            raise InvalidArgument("head", found, f"{list(shape)}, as config.json says")
    head.load_state_dict(dict(tensors))


def draft_vocabulary(
    d2t: Tensor | None, t2d: Tensor | None, count: int, size: int, named: str
) -> Tensor:
    """The target's number of each token that a head drafts.  # int64 [count]

    Args:
        d2t: differences of the numbers.  # [count]
        t2d: whether the head drafts each of the target's tokens; None: not given.  # [size]
        count: tokens that the head drafts.
        size: tokens of the target.
        named: what the errors call the head.

    Raises:
        InvalidArgument: d2t is missing, has another length, names other tokens than ``t2d``, one
            twice, or one that the target does not have.
    """
    if d2t is None or d2t.shape != (count,):
        found = "without d2t" if d2t is None else f"d2t of shape {list(d2t.shape)}"
        allowed = f"{count} entries, one for each logit"
        raise InvalidArgument("head", f"{named}, {found}", allowed)
    tokens = torch.arange(count) + d2t.long()
    inside = int(tokens.min()) >= 0 and int(tokens.max()) < size
    if not inside or len(tokens.unique()) != count:
        allowed = f"{count} different tokens below {size}"
        raise InvalidArgument("head", f"{named}, d2t with other entries", allowed)
    if t2d is not None and (
        t2d.shape != (size,) or t2d.nonzero().flatten().tolist() != sorted(tokens.tolist())
    ):
        found = f"{named}, t2d with other tokens than d2t"
        raise InvalidArgument("head", found, f"the same ones, of {size}")
    return tokens
