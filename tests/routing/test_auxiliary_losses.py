import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesaic
from moesaic.routing import entropy_loss, importance_loss, load_balance_loss, z_loss

LOSSES = (entropy_loss, importance_loss, load_balance_loss, z_loss)


def by_unit(scores: torch.Tensor, k: int = 1) -> moesaic.Routing:
    return moesaic.TokenChoice(1, scores.shape[-1], k).choose(scores)


def test_load_balance_loss_is_1_when_balanced_and_E_when_collapsed():
    even = torch.eye(4).expand(2, 4, 4) * 100
    assert load_balance_loss(by_unit(even)).item() == pytest.approx(1)
    collapsed = torch.tensor([100.0, 0, 0, 0]).expand(2, 4, 4)
    assert load_balance_loss(by_unit(collapsed)).item() == pytest.approx(4)


def test_the_proxy_can_be_the_mean_score():
    scores = torch.tensor([[[9.0, 0.0], [7.0, 0.0], [0.0, 4.0], [5.0, 0.0]]], requires_grad=True)
    loss = load_balance_loss(by_unit(scores), proxy="scores")
    assert loss.item() == pytest.approx(2 * (0.75 * 21 / 4 + 0.25 * 1))
    loss.backward()
    torch.testing.assert_close(scores.grad, 2 / 4 * torch.tensor([0.75, 0.25]).expand(1, 4, 2))
    with pytest.raises(ValueError, match="proxy='raw' is unknown; use 'softmax' or 'scores'"):
        load_balance_loss(by_unit(scores), proxy="raw")


def test_the_load_counts_units_and_not_gates():
    scores = torch.tensor([[[9.0, 0.0], [9.0, 0.0], [0.0, 0.1], [0.0, 0.1]]])
    probability = scores.softmax(-1).mean((0, 1))
    assert load_balance_loss(by_unit(scores)).item() == pytest.approx(2 * (0.5 * probability).sum().item())


def test_a_soft_routing_sums_over_the_slots_of_an_expert():
    scores = torch.randn(1, 3, 4)
    routing = moesaic.SoftRouter(1, 2, 2).choose(scores)
    probability = scores.softmax(-1).view(1, 3, 2, 2).sum(-1).mean((0, 1))
    share = routing.load / routing.load.sum()
    torch.testing.assert_close(load_balance_loss(routing), 2 * (share * probability).sum())


def test_importance_loss_is_the_squared_coefficient_of_variation_of_the_gates():
    routing = by_unit(torch.randn(3, 5, 4))
    total = routing.weights.sum((0, 1))
    expected = total.var(correction=0) / total.mean() ** 2
    torch.testing.assert_close(importance_loss(routing), expected)


def test_z_loss_and_entropy_reduce_over_the_axis_of_the_choice():
    scores = torch.zeros(2, 5, 3)
    experts_choose = moesaic.ExpertChoice(1, 3, 1).choose(scores)
    assert entropy_loss(by_unit(scores)).item() == pytest.approx(math.log(3))
    assert entropy_loss(experts_choose).item() == pytest.approx(math.log(5))
    assert z_loss(by_unit(scores)).item() == pytest.approx(math.log(3) ** 2)
    assert z_loss(experts_choose).item() == pytest.approx(math.log(5) ** 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_step_lowers_the_loss(loss):
    scores = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = loss(by_unit(scores))
    (gradient,) = torch.autograd.grad(before, scores)
    assert gradient.abs().sum() > 0
    assert loss(by_unit(scores.detach() - 0.01 * gradient / gradient.norm())) < before


@pytest.mark.parametrize("loss", LOSSES)
@given(B=st.integers(0, 2), N=st.integers(1, 4), E=st.integers(1, 4))
def test_losses_are_finite_for_every_router_and_an_empty_batch(loss, B, N, E):
    scores = torch.randn(B, N, E)
    for routing in (
        by_unit(scores),
        moesaic.ExpertChoice(1, E, 1).choose(scores),
        moesaic.SoftRouter(1, E, 1).choose(scores),
    ):
        value = loss(routing)
        assert value.shape == ()
        assert torch.isfinite(value)


def test_a_score_of_minus_infinity_adds_no_entropy():
    scores = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    loss = entropy_loss(by_unit(scores))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_scores_give_nan_losses(loss):
    scores = torch.randn(1, 4, 3)
    scores[0, 1, 2] = torch.nan
    assert loss(by_unit(scores)).isnan()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "router",
    [
        moesaic.TokenChoice(1, 3, 2),
        moesaic.TokenChoice(1, 3, capacity_factor=0.5),
        moesaic.ExpertChoice(1, 3, 2),
        moesaic.SoftRouter(1, 3),
    ],
)
def test_padding_does_not_count(loss, router):
    units, padding = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    mask = (torch.arange(9) < 5).expand(2, 9)
    expected = torch.autograd.grad(alone := loss(router.choose(units)), units)
    padded = loss(router.choose(torch.cat([units, padding], 1), mask=mask))
    torch.testing.assert_close(padded, alone)
    found, of_padding = torch.autograd.grad(padded, (units, padding))
    torch.testing.assert_close(found, *expected)
    assert not of_padding.any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("router", [moesaic.TokenChoice(1, 3), moesaic.ExpertChoice(1, 3, 2), moesaic.SoftRouter(1, 3)])
def test_images_of_padding_alone_do_not_count(loss, router):
    scores = torch.randn(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[True] * 4, [False] * 4])
    value = loss(router.choose(scores, mask=mask))
    torch.testing.assert_close(value, loss(router.choose(scores[:1])))
    (grad,) = torch.autograd.grad(value, scores)
    assert grad.isfinite().all()
    assert not grad[1].any()
    assert loss(router.choose(scores, mask=torch.zeros(2, 4, dtype=torch.bool))).isfinite()
