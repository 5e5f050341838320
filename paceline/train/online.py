"""A draft model that learns as it serves: Online Speculative Decoding, and OmniDraft.

Liu et al. 2023 (arXiv 2310.07177): each update is one step of distillation on the positions where
the target rejected the draft model's token, with the target's distribution there
(:mod:`paceline.rejections`); nothing else has a loss.

Ramakrishnan et al. 2025 (arXiv 2507.02659): a draft model with tokens of its own learns from what
became of its drafts, by a hybrid loss, and with it the head that ends its drafts.

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
from paceline.rejections import JudgedDraft, RejectedPosition, RejectionBuffer, packed_rows
from paceline.train.checkpoints import check_layers, load_model
from paceline.train.length_heads import AcceptanceBlocks, weighted_cross_entropy
from paceline.train.losses import divergence_loss
from paceline.types import FloatArray

OnlineDivergence = Literal["forward_kl", "reverse_kl", "jsd"]
ONLINE_DIVERGENCES: tuple[str, ...] = get_args(OnlineDivergence)
JSD_BETA = 0.9
"""Weight of the target in ``jsd``."""
NGRAM_WEIGHT = 1.0
"""Weight of tokens that several draft tokens spell, beside those that one stands for."""


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
    hidden, rows, places = _hidden(model, rejections)
    logits = model.lm_head(hidden[rows, places]).float()
    return _divergence(logits, rejections, divergence)


def _hidden(model: Any, rejections: Sequence[RejectedPosition]) -> tuple[Tensor, Tensor, Tensor]:
    """The states behind all tokens of the packed rows, and where each rejection is.

    # [num_rows, longest, hidden_size], and as :func:`packed_rows`
    """
    ids, rows, places = packed_rows(rejections)
    # Attention looks back only, so what fills a row up changes nothing before it.
    hidden = model.model(ids.to(model.device), use_cache=False).last_hidden_state
    return hidden, rows, places


def _divergence(logits: Tensor, rejections: Sequence[RejectedPosition], divergence: str) -> Tensor:
    """The mean over rejections with equally many ``top_ids``.  # [n, vocab_size] -> scalar"""
    top_ids = torch.stack([torch.from_numpy(each.top_ids) for each in rejections])
    probs = torch.stack([torch.from_numpy(each.top_probs) for each in rejections]).float()
    if probs.shape[1] < logits.shape[1]:
        probs = torch.cat([probs, 1.0 - probs.sum(1, keepdim=True)], 1)
    return divergence_loss(
        divergence, top_events(logits, top_ids.to(logits.device)),
        probs.clamp_min(1e-9).log().to(logits.device), torch.empty(0), beta=JSD_BETA,
    )  # fmt: skip


def hybrid_loss(
    model: Any,
    drafts: Sequence[JudgedDraft],
    divergence: str = "forward_kl",
    ngram_weight: float = NGRAM_WEIGHT,
    head: AcceptanceBlocks | None = None,
) -> Tensor:
    """OmniDraft's loss, a scalar: the mean over the tokens that the target has judged.

    Of an accepted token it is the negative log-likelihood. Where a token was rejected and one draft
    token stands for the target's, it is the divergence over the draft tokens that stand for one
    target token; all others count as one event. Where several draft tokens spell the target's
    token, it is their negative log-likelihood, times ``ngram_weight``.

    Args:
        head: of acceptance; adds its loss on what became of the drafted tokens. Its gradient does
            not reach the draft model.
    """
    hidden, rows, places = _hidden(model, drafts)
    logits = model.lm_head(hidden).float()  # [num_rows, longest, vocab_size]
    total: Tensor = torch.zeros((), device=logits.device)
    rejected = [i for i, draft in enumerate(drafts) if len(draft.spelling)]
    by_size: dict[int, list[int]] = {}  # number of top_ids -> drafts
    for i in rejected:
        by_size.setdefault(len(drafts[i].top_ids), []).append(i)
    for size, members in by_size.items():
        if size:
            at = logits[rows[members], places[members]]
            chosen = [drafts[i] for i in members]
            total = total + len(members) * _divergence(at, chosen, divergence)
            continue
        for i in members:
            spelling = torch.from_numpy(drafts[i].spelling).to(logits.device)
            at = logits[rows[i], places[i] : places[i] + len(spelling)].log_softmax(-1)
            total = total - ngram_weight * at.gather(1, spelling[:, None]).sum()
    num_judged = len(rejected)
    for draft, row, place in zip(drafts, rows, places.tolist(), strict=True):
        if count := draft.num_accepted:
            tokens = torch.from_numpy(draft.token_ids[-count:]).to(logits.device)
            at = logits[row, place - count : place].log_softmax(-1)
            total = total - at.gather(1, tokens[:, None]).sum()
            num_judged += count
    total = total / max(1, num_judged)
    if head is not None:
        judged = [each.judged(place) for each, place in zip(drafts, places.tolist(), strict=True)]
        states = torch.cat([hidden[row, at] for row, (at, _) in zip(rows, judged, strict=True)])
        accepted = torch.cat([labels for _, labels in judged])
        if len(accepted):
            logit = head(states.detach().float())
            total = total + weighted_cross_entropy(logit, accepted.to(logit.device))
    return total


class OnlineTrainer:
    """Trains a draft model on rejections: an update whenever the buffer has enough new ones.

    With a head of acceptance the buffer has :class:`JudgedDraft` in it, of a draft model with
    tokens of its own, and both learn in the same step.

    Args:
        drafter: folder of the draft model; unchanged.
        buffer: of rejections; :meth:`update` takes from it.
        divergence: one of :data:`ONLINE_DIVERGENCES`.
        learning_rate: of AdamW, which is constant: traffic has no end.
        device: of the training.
        head: of acceptance; None: the draft model has the target's tokens.
        head_learning_rate: of the head's weights.
        ngram_weight: see :func:`hybrid_loss`.

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
        head: AcceptanceBlocks | None = None,
        head_learning_rate: float = 1e-3,
        ngram_weight: float = NGRAM_WEIGHT,
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
        self._head, self._ngram_weight = None if head is None else head.to(device), ngram_weight
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        if head is not None:
            own = {"params": list(head.parameters()), "lr": head_learning_rate}
            self._optimizer.add_param_group(own)
        self.num_updates = 0

    def update(self) -> float | None:
        """One step on the buffer's rejections, if an update is due; returns its loss.

        A step whose loss or gradient is not finite is left out.
        """
        if not self.buffer.due:
            return None
        loss = self._loss(self.buffer.take())
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
        self.num_updates += 1
        return float(loss.detach())

    def _loss(self, rejections: Sequence[RejectedPosition]) -> Tensor:
        if self._head is None:
            return rejection_loss(self.model, rejections, self._divergence)
        drafts = [each for each in rejections if isinstance(each, JudgedDraft)]
        return hybrid_loss(self.model, drafts, self._divergence, self._ngram_weight, self._head)

    def head_weights(self) -> dict[str, FloatArray]:
        """The head's weights now, for :class:`paceline.lengths.specdecpp.AcceptanceHead`."""
        state = {} if self._head is None else self._head.state_dict()
        return {name: value.detach().cpu().numpy().copy() for name, value in state.items()}

    def weights(self) -> bytes:
        """The weights now, as the tensors of the drafter's checkpoint, in safetensors."""
        state = self.model.state_dict()
        return save(
            {n: state[n].detach().to("cpu", dtype).clone() for n, dtype in self._stored.items()}
        )
