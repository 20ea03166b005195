"""Two inputs that open the same channels: how often, for subsets of fixed size and for coins."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.papers.wang2019.theory.mask_collisions import (
    all_distinct_probability,
    coin_collision,
    coin_confusion,
    coin_masks,
    measured_collision,
    subset_collision,
    subset_masks,
)


def agreement(gates: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> float:
    same = torch.stack([(gate == other).all(-1) for gate, other in zip(gates, others, strict=True)])
    return same.all(0).double().mean().item()


def near(probability: float, draws: int) -> Any:
    return pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / draws))


@pytest.mark.parametrize(
    ("widths", "opened"), [((4,), (2,)), ((4, 4), (2, 2)), ((5, 3), (1, 2)), ((3, 3, 3), (2, 2, 2))]
)
def test_uniform_subsets_collide_as_often_as_printed(widths: tuple[int, ...], opened: tuple[int, ...]):
    expected = subset_collision(widths, opened)
    assert expected == pytest.approx(math.prod(1 / math.comb(m, n) for m, n in zip(widths, opened, strict=True)))
    found = agreement(*(subset_masks((40_000,), widths, opened, seed=seed) for seed in (0, 1)))
    assert found == near(expected, 40_000)


def test_masks_of_n_subsets_have_n_open_channels_and_every_subset_is_equally_likely():
    (masks,) = subset_masks((12_000,), (4,), (2,), seed=3)
    assert masks.dtype == torch.float64
    patterns, counts = masks.unique(dim=0, return_counts=True)
    assert patterns.sum(1).tolist() == [2.0] * 6
    assert all(count / 12_000 == near(1 / 6, 12_000) for count in counts.tolist())


@pytest.mark.parametrize(("widths", "p"), [((4,), (0.5,)), ((4, 3), (0.25, 0.5)), ((6, 6), (0.9, 0.9)), ((2,), (0.0,))])
def test_coins_collide_as_often_as_derived(widths: tuple[int, ...], p: tuple[float, ...]):
    found = agreement(*(coin_masks((40_000,), widths, p, seed=seed) for seed in (0, 1)))
    assert found == near(coin_collision(widths, p), 40_000)


def test_coins_are_exact_over_all_masks():
    p, m = Fraction(1, 3), 3
    chances = [p ** sum(mask) * (1 - p) ** (m - sum(mask)) for mask in itertools.product((0, 1), repeat=m)]
    assert coin_collision((m, m), (1 / 3, 1 / 3)) == pytest.approx(float(sum(c * c for c in chances) ** 2))
    counts = [math.comb(m, k) * p**k * (1 - p) ** (m - k) for k in range(m + 1)]
    assert sum(c * c for c in chances) == sum(c * c / math.comb(m, k) for k, c in enumerate(counts))


def test_the_printed_probability_is_not_that_of_coins_on_either_side():
    half = coin_collision((16,), (8 / 16,)), subset_collision((16,), (8,))
    assert half[0] < half[1] / 5
    sparse = coin_collision((64,), (8 / 64,)), subset_collision((64,), (8,))
    assert sparse[0] > 600 * sparse[1]


def test_coins_given_that_each_input_opens_n_channels_are_uniform_subsets():
    (first,), (second,) = (coin_masks((60_000,), (5,), (0.3,), seed=seed) for seed in (0, 1))
    both = (first.sum(1) == 2) & (second.sum(1) == 2)
    found = (first[both] == second[both]).all(1).double().mean().item()
    assert found == near(subset_collision((5,), (2,)), int(both.sum()))


def test_no_gates_with_n_open_channels_collide_less_often_than_uniform_ones():
    generator = torch.Generator().manual_seed(0)
    least = subset_collision((4, 4), (2, 2))
    for _ in range(20):
        chances = torch.rand(36, generator=generator, dtype=torch.float64) ** 2
        assert ((chances / chances.sum()) ** 2).sum() > least
    skewed = [(torch.rand(3000, 4, generator=generator) + torch.tensor([0.6, 0.3, 0, 0])) for _ in range(2)]
    masks = [(scores >= scores.topk(2).values[:, 1:]).double() for scores in skewed]
    assert measured_collision(masks) > 1.5 * least
    assert measured_collision([masks[0], masks[0]]) > 1.5 * measured_collision(masks)  # layers that hang together


def test_the_measured_share_of_pairs_estimates_the_probability():
    found = measured_collision(subset_masks((4000,), (4, 3), (2, 1), seed=0))
    assert found == pytest.approx(subset_collision((4, 3), (2, 1)), rel=0.03)


def test_measured_pairs_are_those_of_a_loop_and_the_size_of_a_gate_does_not_count():
    gates = coin_masks((30,), (2, 2), (0.5, 0.7), seed=1)
    pairs = list(itertools.combinations(range(30), 2))
    same = sum(all(torch.equal(gate[i], gate[j]) for gate in gates) for i, j in pairs)
    assert measured_collision(gates) == pytest.approx(same / len(pairs))
    scaled = [gate * torch.arange(1, 31)[:, None] for gate in gates]
    assert measured_collision(scaled) == measured_collision(gates)


@pytest.mark.parametrize("samples", [1, 2, 5, 36, 37])
def test_that_all_inputs_differ_is_the_birthday_problem(samples: int):
    exact = math.perm(36, samples) / 36**samples
    assert all_distinct_probability(samples, (4, 4), (2, 2)) == pytest.approx(exact, rel=1e-9)


def test_one_pair_is_told_apart_as_printed_but_all_inputs_are_not():
    widths, opened = (8, 8), (4, 4)
    assert all_distinct_probability(2, widths, opened) == pytest.approx(1 - subset_collision(widths, opened))
    assert all_distinct_probability(2, widths, opened) > 0.9997
    assert all_distinct_probability(256, widths, opened) < 0.002


def test_probabilities_too_small_for_floats_are_zero():
    assert subset_collision((512,) * 13, (256,) * 13) == 0.0
    assert all_distinct_probability(50_000, (512,) * 13, (256,) * 13) == 1.0


def test_confusion_of_coins_counts_collisions_and_inputs_that_are_closed():
    for widths, p in [((2,), 0.3), ((1, 2), 0.5), ((2, 2), 0.2)]:
        layers = [list(itertools.product((0, 1), repeat=m)) for m in widths]
        total = 0.0
        for one, other in itertools.product(itertools.product(*layers), repeat=2):
            chance = math.prod(p if bit else 1 - p for masks in (one, other) for mask in masks for bit in mask)
            dead = [any(not any(mask) for mask in masks) for masks in (one, other)]
            total += chance * (all(dead) or (not any(dead) and one == other))
        assert coin_confusion(widths, (p,) * len(widths)) == pytest.approx(total)


def test_masks_are_those_of_their_seed():
    for draw, rule in ((subset_masks, (2, 2)), (coin_masks, (0.5, 0.5))):
        first, again, other = (draw((50,), (4, 4), rule, seed=seed) for seed in (5, 5, 6))  # type: ignore[operator]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
        assert not torch.equal(first[0], first[1])


def test_bad_parameters_are_refused_with_the_condition_that_fails():
    with pytest.raises(ValueError, match=r"1 ≤ n_l ≤ m_l fails: n_1=5, m_1=4; a layer cannot open more"):
        subset_collision((4, 4), (2, 5))
    with pytest.raises(ValueError, match=r"1 ≤ n_l ≤ m_l fails: n_0=0, m_0=4; a layer without open channels"):
        subset_masks((3,), (4,), (0,), seed=0)
    with pytest.raises(ValueError, match=r"2 layers, open_channels=\(2,\) are 1"):
        subset_collision((4, 4), (2,))
    with pytest.raises(ValueError, match="1 ≤ L fails"):
        coin_collision((), ())
    with pytest.raises(ValueError, match=r"0 ≤ p_l ≤ 1 fails: p_1=1.5"):
        coin_collision((4, 4), (0.5, 1.5))
    with pytest.raises(ValueError, match=r"0 ≤ p_l ≤ 1 fails: p_0=nan"):
        coin_confusion((4,), (math.nan,))
    with pytest.raises(ValueError, match=r"1 ≤ m_0 fails"):
        coin_masks((3,), (0,), (0.5,), seed=0)
    with pytest.raises(TypeError, match=r"n_0=1.0 is a float"):
        subset_collision((4,), (1.0,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples ≤ 10⁸ fails"):
        all_distinct_probability(10**9, (4,), (2,))
    with pytest.raises(ValueError, match="B ≥ 2 fails: B=1"):
        measured_collision([torch.ones(1, 4)])
    with pytest.raises(ValueError, match=r"give one \(B, m\) for each layer"):
        measured_collision([torch.ones(3, 4), torch.ones(2, 4)])
