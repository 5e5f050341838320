"""A draft model that learns as it serves: Online Speculative Decoding.

Liu et al. 2023 (arXiv 2310.07177).

Each update is one step of distillation on the positions where the target rejected the draft model's
token, with the target's distribution there (:mod:`paceline.rejections`); nothing else has a loss.
The target does not change, and drafts never change the output, so neither does an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.layouts import stored_tensors
from paceline.rejections import RejectedPosition, RejectionBuffer
from paceline.train.checkpoints import check_layers, load_model
from paceline.train.losses import divergence_loss

OnlineDivergence = Literal["forward_kl", "reverse_kl", "jsd"]
ONLINE_DIVERGENCES: tuple[str, ...] = get_args(OnlineDivergence)
JSD_BETA = 0.9
"""Weight of the target in ``jsd``."""


def packed_rows(rejections: Sequence[RejectedPosition]) -> tuple[Tensor, Tensor, Tensor]:
    """The contexts as rows, of which rejections of one session share one.

    Returns:
        Token ids, filled up at the right  # int64 [num_rows, longest]
        The row of each rejection, and its place there: that of its last token.  # int64 [n]
    """
    longest: dict[tuple[str, int], RejectedPosition] = {}
    for each in rejections:
        key = each.session_id, each.start
        if key not in longest or len(longest[key].token_ids) < len(each.token_ids):
            longest[key] = each
    number = {key: i for i, key in enumerate(longest)}
    size = max(len(each.token_ids) for each in longest.values())
    ids = torch.zeros(len(longest), size, dtype=torch.long)
    for i, each in enumerate(longest.values()):
        ids[i, : len(each.token_ids)] = torch.from_numpy(each.token_ids)
    rows = torch.tensor([number[each.session_id, each.start] for each in rejections])
    places = torch.tensor([len(each.token_ids) - 1 for each in rejections])
    return ids, rows, places


def top_events(logits: Tensor, top_ids: Tensor) -> Tensor:
    """Log-probabilities of some tokens, and of all others as one event if there are others.

    # [n, vocab_size], int64 [n, k] -> [n, k + 1], or [n, k] if k is the whole vocabulary
    """
    log_p = logits.log_softmax(-1)
    kept = log_p.gather(1, top_ids)
    if kept.shape == log_p.shape:
        return kept
    others = log_p.scatter(1, top_ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([kept, others], 1)


def rejection_loss(
    model: Any, rejections: Sequence[RejectedPosition], divergence: str = "forward_kl"
) -> Tensor:
    """The mean divergence at the rejected positions, a scalar; no other position has a loss.

    ``forward_kl`` is the soft cross entropy less what does not depend on the model.

    Args:
        model: the draft model, in transformers.
        rejections: with equally many ``top_ids``.
    """
    ids, rows, places = packed_rows(rejections)
    # Attention looks back only, so what fills a row up changes nothing before it.
    hidden = model.model(ids.to(model.device), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[rows, places]).float()
    top_ids = torch.stack([torch.from_numpy(each.top_ids) for each in rejections])
    probs = torch.stack([torch.from_numpy(each.top_probs) for each in rejections]).float()
    if probs.shape[1] < logits.shape[1]:
        probs = torch.cat([probs, 1.0 - probs.sum(1, keepdim=True)], 1)
    return divergence_loss(
        divergence, top_events(logits, top_ids.to(model.device)),
        probs.clamp_min(1e-9).log().to(model.device), torch.empty(0), beta=JSD_BETA,
    )  # fmt: skip


class OnlineTrainer:
    """Trains a draft model on rejections: an update whenever the buffer has enough new ones.

    Args:
        drafter: folder of the draft model; unchanged.
        buffer: of rejections; :meth:`update` takes from it.
        divergence: one of :data:`ONLINE_DIVERGENCES`.
        learning_rate: of AdamW, which is constant: traffic has no end.
        device: of the training.

    Attributes:
        num_updates: updates so far, which is the version of the weights.

    Raises:
        InvalidArgument: an unknown divergence, or a model that is not of Llama's kind.
        ModelNotFound: there is no such model, or something in its folder is damaged.
    """

    def __init__(
        self,
        drafter: Path,
        buffer: RejectionBuffer,
        *,
        divergence: str = "forward_kl",
        learning_rate: float = 3e-4,
        device: str = "cpu",
    ) -> None:
        if divergence not in ONLINE_DIVERGENCES:
            allowed = f"one of {', '.join(ONLINE_DIVERGENCES)}"
            raise InvalidArgument("divergence", divergence, allowed)
        self.model = load_model(drafter).to(device)
        check_layers(self.model, "drafter")
        self._stored = {name: each.dtype for name, each in stored_tensors(drafter).items()}
        missing = sorted(self._stored.keys() - self.model.state_dict().keys())
        if missing:
            raise InvalidArgument("drafter", str(drafter), f"no tensor {missing[0]!r}")
        self.buffer = buffer
        self._divergence = divergence
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.num_updates = 0

    def update(self) -> float | None:
        """One step on the buffer's rejections, if an update is due; returns its loss.

        A step whose loss or gradient is not finite is left out.
        """
        if not self.buffer.due:
            return None
        loss = rejection_loss(self.model, self.buffer.take(), self._divergence)
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
        self.num_updates += 1
        return float(loss.detach())

    def weights(self) -> bytes:
        """The weights now, as the tensors of the drafter's checkpoint, in safetensors."""
        state = self.model.state_dict()
        return save(
            {n: state[n].detach().to("cpu", dtype).clone() for n, dtype in self._stored.items()}
        )
