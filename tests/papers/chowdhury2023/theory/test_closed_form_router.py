"""The closed form of the router is what Algorithm 1's steps lead to."""

import pytest
import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.theory.closed_form_router import (
    batch_weights,
    class_sums,
    opponents,
    router_init_std,
    trained_routers,
)


def algorithm_1(sums: Tensor, positive: Tensor, start: Tensor, orders: Tensor, batch: int, rate: float) -> Tensor:
    """Kernels (2, D), of y = +1 and y = −1, after the steps of SGD on eq. (11), one batch after the other."""
    w = start.clone().requires_grad_()
    y = torch.where(positive, 1.0, -1.0).double()
    for order in orders:
        for chosen in order.split(batch):
            loss = -(y[chosen] * (sums[chosen] @ (w[0] - w[1]))).mean()
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w - rate * gradient).detach().requires_grad_()
    return w.detach()


def shuffles(epochs: int, samples: int) -> Tensor:
    return torch.stack([torch.randperm(samples) for _ in range(epochs)])


@pytest.mark.parametrize("classes", [2, 4, 5])
def test_it_equals_the_steps_of_algorithm_1_for_every_pair(classes: int):
    torch.manual_seed(classes)
    each, D, batch, epochs, rate = 6, 7, 4, 3, 0.2
    labels = torch.arange(classes).repeat(each)[torch.randperm(classes * each)]
    patches = torch.randn(len(labels), 5, D, dtype=torch.float64)
    sums, start = patches.sum(1), torch.randn(classes, D, dtype=torch.float64)
    trained = trained_routers(class_sums(sums, labels, classes), start, learning_rate=rate, epochs=epochs, batch=batch)
    for s, other in enumerate([1, 0, 3, 2, 0][:classes] if classes > 2 else [1, 0]):
        pair = (labels == s) | (labels == other)
        pair_start = torch.stack([start[s], start[other]])
        literal = algorithm_1(sums[pair], labels[pair] == s, pair_start, shuffles(epochs, 2 * each), batch, rate)
        torch.testing.assert_close(trained[s], literal[0], rtol=0, atol=1e-12)


def test_a_shorter_last_batch_is_exact_with_weights():
    torch.manual_seed(0)
    B, D, batch, epochs, rate = 11, 4, 4, 5, 0.3
    labels = torch.arange(B) % 2
    sums, start = torch.randn(B, D, dtype=torch.float64), torch.randn(2, D, dtype=torch.float64)
    orders = shuffles(epochs, B)
    weighted = class_sums(sums, labels, 2, batch_weights(orders, batch))
    trained = trained_routers(weighted, start, learning_rate=rate, batch=batch)
    literal = algorithm_1(sums, labels == 1, start.flip(0), orders, batch, rate).flip(0)
    torch.testing.assert_close(trained, literal, rtol=0, atol=1e-12)
    unweighted = trained_routers(class_sums(sums, labels, 2), start, learning_rate=rate, epochs=epochs, batch=batch)
    assert (unweighted - literal).abs().max() > 0.01


def test_trials_along_leading_axes_are_as_if_alone():
    torch.manual_seed(0)
    T, B, D = 3, 8, 5
    sums = torch.randn(T, 2, B, D, dtype=torch.float64)
    labels = torch.stack([torch.randperm(B) % 4 for _ in range(2 * T)]).view(T, 2, B)
    weights = batch_weights(torch.stack([shuffles(2, B) for _ in range(2 * T)]).view(T, 2, 2, B), 3)
    start = torch.randn(T, 2, 4, D, dtype=torch.float64)
    together = trained_routers(class_sums(sums, labels, 4, weights), start, learning_rate=0.1, batch=3)
    alone = trained_routers(
        class_sums(sums[1, 0], labels[1, 0], 4, weights[1, 0]), start[1, 0], learning_rate=0.1, batch=3
    )
    torch.testing.assert_close(together[1, 0], alone, rtol=0, atol=1e-14)


def test_the_last_of_an_odd_number_of_classes_leaves_class_0_alone():
    sums = torch.eye(3)
    trained = trained_routers(sums, torch.zeros(3, 3), learning_rate=1.0)
    assert trained.tolist() == [[1, -1, 0], [-1, 1, 0], [-1, 0, 1]]
    assert opponents(3) == [1, 0, 0]


def test_the_initial_spread_is_that_of_equation_7():
    assert router_init_std(16, 784) == pytest.approx(1 / (256 * 2.772588722239781 * 28))
    with pytest.raises(ValueError, match="n ≥ 2 fails"):
        router_init_std(1, 784)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"must end in \(classes, D\)"):
        trained_routers(torch.zeros(2, 3), torch.zeros(3, 2), learning_rate=1.0)
    with pytest.raises(ValueError, match="c ≥ 2 fails"):
        opponents(1)
    with pytest.raises(ValueError, match="1 ≤ batch fails"):
        trained_routers(torch.zeros(2, 3), torch.zeros(2, 3), learning_rate=1.0, batch=0)
