"""Batch shaping: the distribution function of Beta against scipy, its gradient, and what the loss draws gates to."""

import pytest
import torch
from scipy import stats
from scipy.special import expit

from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.channel_gate import ChannelGate
from moesaic.training.batch_shaping_loss import batch_shaping_loss, beta_cdf

SHAPES = [(0.6, 0.4), (0.05, 0.9), (2.0, 3.0), (1.0, 1.0), (10.0, 0.3)]


@pytest.mark.parametrize(("alpha", "beta"), SHAPES)
def test_the_distribution_function_is_that_of_scipy_and_so_is_its_density(alpha: float, beta: float):
    scores = torch.linspace(-12, 12, 201, dtype=torch.float64, requires_grad=True)
    x = expit(scores.detach().numpy())
    found = beta_cdf(scores, alpha, beta)
    found.sum().backward()
    torch.testing.assert_close(found, torch.from_numpy(stats.beta.cdf(x, alpha, beta)), rtol=0, atol=1e-9)
    density = torch.from_numpy(stats.beta.pdf(x, alpha, beta) * x * expit(-scores.detach().numpy()))
    torch.testing.assert_close(scores.grad, density, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences():
    scores = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: beta_cdf(each, 0.6, 0.4), scores)


def test_scores_far_out_have_finite_values_and_gradients():
    scores = torch.tensor([-1e4, -100.0, 100.0, 1e4], requires_grad=True)
    found = beta_cdf(scores, 0.6, 0.4)
    found.sum().backward()
    assert found.tolist() == [0, pytest.approx(0, abs=1e-12), 1, 1]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def loss(*layers: torch.Tensor, **options) -> torch.Tensor:
    gate = ChannelGate(1, channels=layers[0].shape[1], mode="hard")
    return batch_shaping_loss([gate.choose(scores) for scores in layers], 0.6, 0.4, **options)


def test_the_loss_is_the_cramer_von_mises_distance():
    scores = torch.randn(7, 1, dtype=torch.float64)
    x = expit(scores[:, 0].sort().values.numpy())
    expected = ((torch.arange(1, 8) / 8 - torch.from_numpy(stats.beta.cdf(x, 0.6, 0.4))) ** 2).mean()
    torch.testing.assert_close(loss(scores), expected)
    torch.testing.assert_close(loss(scores, scores.flip(0)), 2 * expected)  # summed over layers, whatever the order


def test_gates_that_are_the_same_for_all_images_come_to_differ():
    scores = (0.01 * torch.randn(64, 2, generator=torch.Generator().manual_seed(0))).requires_grad_()
    optimizer = torch.optim.SGD([scores], lr=500.0)
    for _ in range(100):
        optimizer.zero_grad()
        loss(scores).backward()
        optimizer.step()
    expected = float(stats.beta.sf(0.5, 0.6, 0.4))
    assert (scores > 0).float().mean(0).tolist() == pytest.approx([expected] * 2, abs=0.05)
    assert loss(scores).item() < 1e-3


def test_parts_of_a_batch_have_the_loss_and_the_gradients_of_the_whole():
    scores = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    class Part(GlobalBatch):
        def __init__(self, first: int, samples: int) -> None:
            self._part = (first, samples, 6)

        def gather(self, samples):
            return scores.detach()

    whole = loss(scores)
    parts = [
        loss(scores[first:last], batch=Part(first, last - first)) * (last - first) / 6
        for first, last in ((0, 2), (2, 6))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    [expected], [found] = (torch.autograd.grad(each, scores) for each in (whole, parts[0] + parts[1]))
    torch.testing.assert_close(found, expected)
