"""Noise makes routing smooth: probabilities that are exact, and a bound that is as small as it can be."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from moesaic.papers.chen2022.theory.smoothing import (
    expected_load,
    noise_density,
    printed_smoothing_bound,
    routing_probabilities,
    smoothing_bound,
    steepest_scores,
    unreachable,
)


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


score_lists = st.lists(st.floats(-2, 2), min_size=1, max_size=9)


@pytest.mark.parametrize(
    "h",
    [scores(0.1, 0.3, -0.4, 0.25), scores(0, 0, 0), scores(0.9, 0, 0.2, 0.2, -0.2, 0.6), scores(0.3, -0.8)],
)
def test_probabilities_are_the_frequencies_of_drawn_noise(h: Tensor):
    noise = torch.rand(400_000, len(h), generator=torch.Generator().manual_seed(0))
    found = torch.bincount((h + noise).argmax(-1), minlength=len(h)) / len(noise)
    expected = routing_probabilities(h)
    assert ((found - expected).abs() < 5 * (expected * (1 - expected) / len(noise)).sqrt() + 1e-12).all()


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.5, 0.9, 1.0, 3.0])
def test_two_experts_have_the_formula_of_the_triangle(gap: float):
    loses = (1 - min(gap, 1)) ** 2 / 2
    torch.testing.assert_close(routing_probabilities(scores(gap, 0)), scores(1 - loses, loses))


@given(h=score_lists)
def test_probabilities_sum_to_one_and_follow_the_order_of_the_scores(h: list[float]):
    p = routing_probabilities(scores(*h))
    assert p.sum().item() == pytest.approx(1, abs=1e-13)
    assert p.min() >= 0
    assert (p[scores(*h).argsort()].diff() >= -1e-13).all()


@given(h=score_lists, shift=st.floats(-50, 50))
def test_only_differences_of_scores_count(h: list[float], shift: float):
    p, moved = routing_probabilities(scores(*h)), routing_probabilities(scores(*h) + shift)
    torch.testing.assert_close(p, moved, atol=1e-12, rtol=0)


@pytest.mark.parametrize("experts", [1, 2, 7, 33, 64])
def test_equal_scores_give_equal_probabilities(experts: int):
    p = routing_probabilities(torch.full((experts,), 0.7))
    torch.testing.assert_close(p, torch.full((experts,), 1 / experts, dtype=torch.float64), atol=1e-14, rtol=0)


@pytest.mark.parametrize("experts", [3, 8, 17])
def test_one_score_above_the_others_gives_the_integral_in_closed_form(experts: int):
    lead = 0.3
    h = torch.zeros(experts, dtype=torch.float64)
    h[-1] = lead
    expected = lead + (1 - lead**experts) / experts  # 1 from 1 − lead on, u^(M−1) from lead to 1
    assert routing_probabilities(h)[-1].item() == pytest.approx(expected, abs=1e-14)


def test_a_batch_gets_what_each_sample_gets_alone_in_any_block(monkeypatch: pytest.MonkeyPatch):
    h = torch.randn(3, 10, 5, generator=torch.Generator().manual_seed(0))
    together = routing_probabilities(h)
    assert together.shape == h.shape
    assert together.dtype == torch.float64
    monkeypatch.setattr("moesaic.papers.chen2022.theory.smoothing._BLOCK", 7 * 5 * 5 * 3)
    torch.testing.assert_close(routing_probabilities(h), together, atol=1e-15, rtol=0)
    torch.testing.assert_close(routing_probabilities(h[1, 4]), together[1, 4], atol=1e-15, rtol=0)
    assert routing_probabilities(h[:0]).shape == (0, 10, 5)


def test_wider_noise_is_smaller_scores():
    h = scores(0.1, 0.3, -0.4)
    torch.testing.assert_close(routing_probabilities(h * 5, width=5.0), routing_probabilities(h))


@given(data=st.data(), h=st.lists(st.floats(-1, 1), min_size=2, max_size=8), size=st.floats(1e-4, 1))
def test_no_probability_moves_by_more_than_twice_what_scores_move(data: st.DataObject, h: list[float], size: float):
    steps = st.sampled_from([-1.0, 1.0]) | st.floats(-1, 1)
    step = scores(*data.draw(st.lists(steps, min_size=len(h), max_size=len(h)))) * size
    moved = (routing_probabilities(scores(*h) + step) - routing_probabilities(scores(*h))).abs().max().item()
    distance = step.abs().max().item()
    assert moved <= smoothing_bound(distance) + 1e-13
    assert smoothing_bound(distance) <= printed_smoothing_bound(distance, len(h))


@given(h=st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_two_experts_differ_by_at_most_twice_their_scores(h: list[float]):
    p = routing_probabilities(scores(*h))
    apart = (scores(*h)[:, None] - scores(*h)).abs()
    assert ((p[:, None] - p).abs() <= 2 * apart + 1e-13).all()


@pytest.mark.parametrize("experts", [2, 3, 8, 30])
@pytest.mark.parametrize("distance", [1e-4, 0.01, 0.2, 0.5])
def test_the_steepest_scores_move_as_the_formula_says(experts: int, distance: float):
    h, moved = steepest_scores(experts, distance)
    assert (h - moved).abs().max().item() == distance
    change = (routing_probabilities(moved) - routing_probabilities(h))[0].item()
    assert change == pytest.approx(2 * distance - (2 * distance) ** experts / experts, abs=1e-13)


@pytest.mark.parametrize("experts", [2, 3, 8])
def test_the_constant_two_is_attained(experts: int):
    h, moved = steepest_scores(experts, 1e-4)
    change = (routing_probabilities(moved) - routing_probabilities(h))[0].item()
    assert change / 1e-4 == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("constant", [1.0, 1.9, 1.99, 1.9999])
def test_no_smaller_constant_would_do(constant: float):
    distance = (2 - constant) / 4
    h, moved = steepest_scores(2, distance)
    assert (routing_probabilities(moved) - routing_probabilities(h))[0].item() > constant * distance


@given(h=score_lists)
def test_experts_one_below_the_best_are_never_chosen_and_all_others_are(h: list[float]):
    p, out = routing_probabilities(scores(*h)), unreachable(scores(*h))
    assert (p[out] == 0).all()
    inside = scores(*h) > max(h) - 1 + 1e-3
    assert (p[inside] > 0).all()
    assert not out[inside].any()


def test_the_load_is_the_sum_of_probabilities_and_even_at_the_start():
    assert expected_load(torch.zeros(16, 4)).tolist() == pytest.approx([4] * 4)
    h = torch.randn(2, 100, 5, generator=torch.Generator().manual_seed(0))
    load = expected_load(h)
    assert load.shape == (2, 5)
    torch.testing.assert_close(load, routing_probabilities(h).sum(1))
    assert load.sum(-1).tolist() == pytest.approx([100, 100])


def test_densities_are_the_largest_of_their_distributions():
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    gaussian = torch.distributions.Normal(0, 0.7).log_prob(x).exp().max().item()
    assert noise_density("gaussian", 0.7) == pytest.approx(gaussian)
    assert noise_density("uniform", 0.5) == 2
    assert smoothing_bound(0.01, density=noise_density("uniform", 0.5)) == pytest.approx(0.04)


def test_the_bound_holds_for_gaussian_noise_of_two_experts():
    std, distance = 0.3, 0.05  # r_1 − r_2 is Gaussian with √2 times the deviation
    change = 0.5 * math.erf(2 * distance / (std * math.sqrt(2)) / math.sqrt(2))
    bound = smoothing_bound(distance, density=noise_density("gaussian", std))
    assert 0.6 * bound < change <= bound


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"give floating-point \(…, M\)"):
        routing_probabilities(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="NaN or ∞"):
        routing_probabilities(scores(1, math.nan))
    with pytest.raises(ValueError, match="0 < width < ∞ fails: width=0"):
        routing_probabilities(scores(1, 2), width=0)
    with pytest.raises(ValueError, match=r"give \(…, B, M\)"):
        expected_load(scores(1, 2))
    with pytest.raises(ValueError, match="0 < scale < ∞ fails"):
        noise_density("uniform", 0)
    noise: Any = "laplace"
    with pytest.raises(ValueError, match="noise='laplace' is unknown"):
        noise_density(noise)
    with pytest.raises(ValueError, match="M ≥ 2 fails: experts=1"):
        steepest_scores(1, 0.1)
    with pytest.raises(ValueError, match=r"0 < δ ≤ 1/2 fails: distance=0.6"):
        steepest_scores(2, 0.6)
    with pytest.raises(ValueError, match="1 ≤ experts fails"):
        printed_smoothing_bound(0.1, 0)
