"""Distances of a drafter from its target, as losses over positions.

``draft_logits`` and ``target_logits`` are float32 [n, vocab_size], a row for each position. p is
the drafter's distribution and q the target's, as in the TVD++ paper. A loss is the mean over
positions, and its gradients reach the drafter only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "tvdpp", "ce"]
DIVERGENCES: tuple[str, ...] = get_args(Divergence)


def acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """sum_x min(p, q), the chance that rejection sampling accepts a drafted token.  # [n]"""
    p, q = draft_logits.softmax(-1), target_logits.softmax(-1)
    return torch.minimum(p, q).sum(-1)


def divergence_loss(
    kind: str,
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.5,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The loss of DistillSpec (Zhou et al. 2023, arXiv 2310.08461, table 1) or TVD++: a scalar.

    ``forward_kl`` is KL(q || p), ``reverse_kl`` KL(p || q), ``jsd`` is beta KL(q || m) +
    (1 - beta) KL(p || m) with m = beta q + (1 - beta) p, ``tvd`` is half the sum of |p - q|, which
    is one minus the acceptance, ``tvdpp`` is :func:`policy_gradient_loss` and ``ce`` the cross
    entropy on ``labels`` (int64 [n]), which needs no target.
    """
    if kind == "ce":
        return F.cross_entropy(draft_logits, labels)
    if kind == "tvdpp":
        return policy_gradient_loss(draft_logits, target_logits, generator)
    log_p, log_q = draft_logits.log_softmax(-1), target_logits.detach().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        value = (q * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl":
        value = (p * (log_p - log_q)).sum(-1)
    elif kind == "jsd":
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
        value = beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)
    else:
        assert kind == "tvd", kind
        value = 0.5 * (p - q).abs().sum(-1)
    return value.mean()


def policy_gradient_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    generator: torch.Generator | None,
    *,
    normalise: bool = True,
) -> Tensor:
    """A scalar whose gradient is that of the total variation, estimated from one token a position.

    grad TVD(p, q) = -E_{x ~ p}[r(x) grad log p(x)] with the reward r(x) = 1{q(x) > p(x)}. TVD++
    (Goel et al. 2024, arXiv 2403.00858) subtracts the batch's mean reward and divides by its
    standard deviation: the same direction with less noise. The value itself has no meaning.

    Args:
        normalise: False gives the plain estimator.
    """
    log_p, log_q = draft_logits.log_softmax(-1), target_logits.detach().log_softmax(-1)
    drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)  # [n, 1]
    log_p_drawn = log_p.gather(-1, drawn)[:, 0]
    reward = (log_q.gather(-1, drawn)[:, 0] > log_p_drawn.detach()).float()
    if normalise:
        reward = (reward - reward.mean()) / (reward.std(correction=0) + 1e-6)
    return -(reward * log_p_drawn).mean()


@torch.no_grad()
def measure(
    rows: Tensor,
    logits_of: Callable[[Tensor], tuple[list[Tensor], Tensor]],
    names: Sequence[str],
    first: int = 0,
    counts: Tensor | None = None,
) -> dict[str, float]:
    """Compare one or several drafters with their target on held-out text.

    Args:
        rows: # int64 [num_rows, length + 1]
        logits_of: from token ids [batch, length] the logits of each drafter and of the target,
            float32 [batch, length, vocab_size].
        names: of the drafters.
        first: positions before this one do not count.
        counts: the tokens that count as labels; None: all.  # bool [num_rows, length + 1]

    Returns:
        Means over positions and drafters: ``acceptance`` (sum_x min(p, q)), ``agreement`` (both
        have the same argmax), ``loss`` (cross entropy on the text); ``target_loss``, the target's;
        and, where there are several drafters, ``acceptance_NAME`` of each.
    """
    accepted, agreed, loss = (torch.zeros(len(names), dtype=torch.float64) for _ in range(3))
    target_loss = 0.0
    if counts is None:
        counts = torch.ones_like(rows, dtype=torch.bool)
    total = int(counts[:, 1 + first :].sum())
    for chunk, counted in zip(rows.split(4), counts[:, 1 + first :].split(4), strict=True):
        if not counted.any():
            continue
        drafts, target = logits_of(chunk[:, :-1])
        share, labels = int(counted.sum()) / total, chunk[:, 1 + first :][counted]
        target = target[:, first:][counted]
        target_loss += share * float(F.cross_entropy(target, labels))
        for i, draft in enumerate(logits[:, first:][counted] for logits in drafts):
            accepted[i] += share * float(acceptance(draft, target).mean())
            same = draft.argmax(-1) == target.argmax(-1)
            agreed[i] += share * float(same.double().mean())
            loss[i] += share * float(F.cross_entropy(draft, labels))
    metrics = {
        "acceptance": float(accepted.mean()),
        "agreement": float(agreed.mean()),
        "loss": float(loss.mean()),
        "target_loss": target_loss,
    }
    if len(names) > 1:
        each = zip(names, accepted.tolist(), strict=True)
        metrics |= {f"acceptance_{name}": value for name, value in each}
    return metrics
