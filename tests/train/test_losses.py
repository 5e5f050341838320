"""Losses against brute force, and what the policy gradient promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.train.losses import acceptance, divergence_loss, measure, policy_gradient_loss

N, VOCAB = 5, 7


def logits(seed: int, n: int = N, vocab: int = VOCAB, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, vocab, generator=generator, dtype=torch.float64)


def loss(kind: str, draft: Tensor, target: Tensor, **options: object) -> Tensor:
    labels = torch.arange(len(draft)) % draft.shape[1]
    return divergence_loss(kind, draft, target, labels, **options)  # type: ignore[arg-type]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True) if x > 0)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd", "ce"])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_divergences_equal_their_sums_over_the_vocabulary(kind: str, beta: float) -> None:
    draft, target = logits(0), logits(1)
    expected = 0.0
    for i in range(N):
        p = [float(x) for x in draft[i].exp() / draft[i].exp().sum()]
        q = [float(x) for x in target[i].exp() / target[i].exp().sum()]
        m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
        expected += {
            "forward_kl": kl(q, p),
            "reverse_kl": kl(p, q),
            "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m),
            "tvd": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
            "ce": -math.log(p[i % VOCAB]),
        }[kind]
    assert float(loss(kind, draft, target, beta=beta)) == pytest.approx(expected / N, abs=1e-12)


def test_tvd_is_one_minus_the_acceptance() -> None:
    draft, target = logits(2, n=50), logits(3, n=50)
    accepted = acceptance(draft, target)
    assert float(loss("tvd", draft, target)) == pytest.approx(1 - float(accepted.mean()), abs=1e-14)
    assert float(loss("tvd", draft, draft)) == 0.0


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_a_certain_target_gives_finite_losses_and_gradients(kind: str) -> None:
    draft = torch.zeros(2, VOCAB, requires_grad=True)
    target = torch.full((2, VOCAB), -1e4)
    target[:, 3] = 1e4
    value = loss(kind, draft, target)
    value.backward()
    assert math.isfinite(value.item())
    assert draft.grad is not None and bool(draft.grad.isfinite().all())


def test_the_target_gets_no_gradient() -> None:
    draft, target = logits(0).requires_grad_(), logits(1).requires_grad_()
    loss("forward_kl", draft, target).backward()
    assert target.grad is None and draft.grad is not None


def gradient(value: Tensor, parameter: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, parameter)
    return grad


def test_the_tvd_gradient_is_a_policy_gradient() -> None:
    """grad TVD(p, q) = -E_{x ~ p}[1{q(x) > p(x)} grad log p(x)], summed over the vocabulary."""
    draft, target = logits(4, n=3).requires_grad_(), logits(5, n=3)
    p, q = draft.softmax(-1), target.softmax(-1)
    expected = torch.zeros_like(draft)
    for i in range(3):
        for x in range(VOCAB):
            if q[i, x] > p[i, x]:
                log_p = draft.log_softmax(-1)[i, x]
                expected -= p[i, x].detach() * gradient(log_p, draft) / 3
    actual = gradient(loss("tvd", draft, target), draft)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


def test_the_normalised_reward_keeps_the_direction_and_loses_variance() -> None:
    n = 96
    draft, target = logits(6, n=n, scale=0.7).requires_grad_(), logits(7, n=n, scale=0.7)
    exact = gradient(loss("tvd", draft, target), draft)
    generator = torch.Generator().manual_seed(0)
    means, spreads = {}, {}
    for normalise in (False, True):
        draws = []
        for _ in range(2000):
            value = policy_gradient_loss(draft, target, generator, normalise=normalise)
            draws.append(gradient(value, draft))
        samples = torch.stack(draws)
        # Dividing by the reward's standard deviation rescales: compare at the same length.
        scale = float((samples.mean(0) * exact).sum() / (exact * exact).sum())
        if normalise:
            assert scale > 1, "the standard deviation of a reward of 0 or 1 is at most a half"
        else:
            assert scale == pytest.approx(1, abs=0.05)
        samples /= scale
        means[normalise] = samples.mean(0)
        spreads[normalise] = float(samples.var(0).sum())
        error = float((means[normalise] - exact).norm() / exact.norm())
        assert error < 0.25, "the mean of the estimator is the exact gradient"
    # E[r^2] falls to Var[r]; here that is more than a fifth.
    assert spreads[True] < 0.8 * spreads[False]


def test_measure_averages_over_rows_of_all_chunks() -> None:
    rows = torch.randint(VOCAB, (6, 5), generator=torch.Generator().manual_seed(1))
    tables = [
        torch.from_numpy(np.random.default_rng(s).normal(size=(VOCAB, VOCAB))) for s in (1, 2)
    ]
    target = torch.from_numpy(np.random.default_rng(3).normal(size=(VOCAB, VOCAB)))
    metrics = measure(rows, lambda ids: ([t[ids] for t in tables], target[ids]), ["a", "b"])
    flat = rows[:, :-1].flatten()
    each = [float(acceptance(t[flat], target[flat]).mean()) for t in tables]
    same = [(t[flat].argmax(-1) == target[flat].argmax(-1)).double().mean() for t in tables]
    assert metrics["acceptance_a"] == pytest.approx(each[0])
    assert metrics["acceptance"] == pytest.approx(sum(each) / 2)
    assert metrics["agreement"] == pytest.approx(float(sum(same)) / 2)
