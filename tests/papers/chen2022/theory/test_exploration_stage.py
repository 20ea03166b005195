"""Before routers learn: which expert starts with which cluster, and what the theorem asks for."""

import itertools
import math
from typing import Any

import pytest
import torch

from moesaic.papers.chen2022.theory.exploration_stage import (
    all_groups_probability,
    exploration_steps,
    initial_groups,
    sample_moe_conditions,
)


@pytest.mark.parametrize(
    ("rate", "std", "steps"), [(0.001, 0.04, 200), (0.01, 0.01, 10), (0.1, 0.04, 2), (0.3, 0.04, 0), (0.1, 0.09, 3)]
)
def test_the_stage_has_the_steps_of_the_formula(rate: float, std: float, steps: int):
    assert exploration_steps(rate, std) == steps


def test_an_expert_starts_with_the_cluster_of_its_largest_inner_product_not_of_its_absolute_value():
    generator = torch.Generator().manual_seed(0)
    weights, features = torch.randn(3, 6, 5, 10, generator=generator), torch.randn(4, 10, generator=generator)
    groups = initial_groups(weights, features)
    assert groups.shape == (3, 6)
    for t, m in itertools.product(range(3), range(6)):
        products = {(k, j): (features[k] @ weights[t, m, j]).item() for k in range(4) for j in range(5)}
        assert groups[t, m] == max(products, key=lambda kj: products[kj])[0]


def test_groups_of_random_filters_are_all_there_as_often_as_said():
    weights = torch.randn(20_000, 8, 2, 4, generator=torch.Generator().manual_seed(0))
    groups = initial_groups(weights, torch.eye(4))
    complete = torch.stack([(groups == k).any(-1) for k in range(4)]).all(0).float().mean().item()
    expected = all_groups_probability(8, 4)
    assert complete == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 20_000) ** 0.5)


@pytest.mark.parametrize(("experts", "clusters"), [(1, 1), (3, 2), (4, 4), (6, 3), (2, 3)])
def test_the_probability_of_all_groups_counts_the_ways(experts: int, clusters: int):
    ways = [len(set(way)) == clusters for way in itertools.product(range(clusters), repeat=experts)]
    assert all_groups_probability(experts, clusters) == pytest.approx(sum(ways) / len(ways))


@pytest.mark.parametrize(("experts", "clusters"), [(8, 4), (30, 4), (200, 20), (400, 100)])
def test_the_papers_bound_on_it_holds(experts: int, clusters: int):
    exact = all_groups_probability(experts, clusters)
    assert 1 - clusters * math.exp(-experts / clusters) <= exact <= 1


def test_conditions_tell_by_how_much_they_are_missed_and_in_which_direction():
    found = sample_moe_conditions(
        dim=1000,
        samples=500,
        clusters=10,
        experts=89,
        neurons=3,
        init_std=0.2,
        learning_rate=0.4,
        router_learning_rate=89**2 * 0.4,
    )
    off = {one.quantity: one.off_by for one in found}
    slow = math.log(math.log(1000))
    assert off["n"] == 0.5
    assert off["M"] == pytest.approx(89 / (10 * math.log(10) * slow))
    assert off["J"] == pytest.approx(3 / (math.log(89) * slow))
    assert off["σ_0"] == 1  # from 0.1 to 0.93
    assert off["η"] == 2
    assert off["η_r"] == pytest.approx(1)
    assert off["T_1"] == pytest.approx(math.sqrt(0.2) * 89**2)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="0 < learning_rate < ∞ fails"):
        exploration_steps(0, 0.1)
    with pytest.raises(ValueError, match=r"give \(…, E, J, D\) and \(K, D\)"):
        initial_groups(torch.zeros(2, 3, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="1 ≤ experts fails"):
        all_groups_probability(0, 3)
    good: dict[str, Any] = {"dim": 50, "samples": 9, "clusters": 4, "experts": 8, "neurons": 2}
    good |= {"init_std": 0.1, "learning_rate": 0.1, "router_learning_rate": 0.1}
    for name, value, message in (("dim", 2, "d ≥ 3"), ("clusters", 1, "K ≥ 2"), ("experts", 1, "M ≥ 2")):
        with pytest.raises(ValueError, match=f"{message} fails"):
            sample_moe_conditions(**(good | {name: value}))
