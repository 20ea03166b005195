"""Hyperplanes: certificates that can be checked, and the criterion that replaces Lemma K.1's."""

from itertools import product

import pytest
import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.data.mnist_mosaics import digit_mosaics
from moesaic.papers.chowdhury2023.theory.pattern_separation import measure_separation
from moesaic.papers.chowdhury2023.theory.separability import (
    Separability,
    inseparable_samples,
    linearly_separable,
    patterns_separable,
)


def check(found: Separability, samples: Tensor, labels: Tensor) -> None:
    """The certificate proves the verdict, computed from the samples and nothing else."""
    rows = torch.cat([samples.double().flatten(1), torch.ones(len(samples), 1).double()], 1)
    rows = rows / rows.norm(dim=1, keepdim=True) * torch.where(labels == 1, 1.0, -1.0).double()[:, None]
    assert found.weights.min() >= 0
    assert found.weights.sum().item() == pytest.approx(1)
    assert (found.weights @ rows).norm().item() == pytest.approx(found.residual, abs=1e-12)
    if found.separable:
        assert found.hyperplane.norm().item() == pytest.approx(1)
        assert (rows @ found.hyperplane).min().item() == pytest.approx(found.margin, abs=1e-12)
        assert 0 < found.margin <= found.residual + 1e-12
        sides = samples.double().flatten(1) @ found.hyperplane[:-1] + found.hyperplane[-1]
        assert torch.equal(sides > 0, labels == 1)
    else:
        assert found.residual < 1e-9
        assert found.margin == 0


@pytest.mark.parametrize(("samples", "dim"), [(10, 30), (31, 30), (200, 30), (60, 2)])
def test_what_a_hyperplane_made_is_separable(samples: int, dim: int):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, dim, generator=generator)
    labels = (x @ torch.randn(dim, generator=generator) > 0.2).long()
    found = linearly_separable(x, labels)
    assert found.separable
    check(found, x, labels)


@pytest.mark.parametrize(("samples", "dim"), [(120, 10), (400, 30)])
def test_random_labels_on_many_samples_are_not(samples: int, dim: int):
    x = torch.randn(samples, dim, generator=torch.Generator().manual_seed(samples))
    labels = torch.arange(samples) % 2
    found = linearly_separable(x, labels)
    assert not found.separable
    check(found, x, labels)


def test_few_samples_in_general_position_are_always_separable():
    x = torch.randn(21, 20, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(21) % 2
    found = linearly_separable(x, labels)
    assert found.separable
    check(found, x, labels)


def test_a_sample_of_both_classes_is_not_separable():
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 2.0]])
    found = linearly_separable(x, torch.tensor([0, 1, 1]))
    assert not found.separable
    check(found, x, torch.tensor([0, 1, 1]))


def test_a_bias_is_allowed():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    assert linearly_separable(x, torch.tensor([0, 0, 1])).separable
    assert not linearly_separable(x, torch.tensor([0, 1, 0])).separable


@pytest.mark.parametrize("delta_d", [-0.5, 0.0, 0.7])
@pytest.mark.parametrize(("n", "copies"), [(2, 1), (5, 1), (5, 2), (5, 4)])
def test_the_constructed_samples_fit_the_data_model_and_are_inseparable(delta_d: float, n: int, copies: int):
    made = inseparable_samples(n, 6, delta_d=delta_d, copies=copies)
    torch.testing.assert_close(made.patches.norm(dim=-1), torch.ones(2 * n, n).double())
    own = made.patches[torch.arange(2 * n), made.discriminative]
    torch.testing.assert_close(own, made.patterns[made.labels])

    torch.testing.assert_close(made.patches[:n].sum(0), made.patches[n:].sum(0))
    found = linearly_separable(made.patches, made.labels)
    assert not found.separable
    check(found, made.patches, made.labels)

    # closer than δ' by a hair where copies = 2: rounding must not decide
    measured = measure_separation(made.patches, made.labels, made.discriminative, closeness=0.5 + 1e-9)
    assert measured.delta_d == pytest.approx(delta_d)
    assert measured.delta_r == pytest.approx((1 - delta_d) / (2 * copies))
    assert made.delta_r == pytest.approx(measured.delta_r)
    assert measured.l_star == (2 if copies == 1 else 1)


def all_samples(patterns: Tensor, irrelevant: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Every sample with one class pattern at one place and irrelevant patterns at all others."""
    made: list[Tensor] = []
    labels: list[int] = []
    for label, place in product((0, 1), range(places)):
        for others in product(range(len(irrelevant)), repeat=places - 1):
            patches = list(irrelevant[list(others)])
            patches.insert(place, patterns[label])
            made.append(torch.stack(patches))
            labels.append(label)
    return torch.stack(made), torch.tensor(labels)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("places", "count", "dim"), [(2, 5, 3), (3, 4, 3), (3, 4, 2), (4, 3, 2)])
def test_the_criterion_on_patterns_decides_for_all_samples_at_once(places: int, count: int, dim: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.nn.functional.normalize(torch.randn(2 + count, dim, generator=generator).double(), dim=1)
    samples, labels = all_samples(drawn[:2], drawn[2:], places)
    found = linearly_separable(samples, labels)
    check(found, samples, labels)
    assert patterns_separable(drawn[:2], drawn[2:], places).separable == found.separable


def test_the_criterion_is_met_and_missed_by_random_patterns():
    verdicts: set[bool] = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.nn.functional.normalize(torch.randn(6, 3, generator=generator).double(), dim=1)
        verdicts.add(patterns_separable(drawn[:2], drawn[2:], 2).separable)
    assert verdicts == {True, False}


def test_l_star_does_not_decide_a_single_close_pattern_is_separable():
    patterns = torch.eye(3).double()[:2]
    close = torch.tensor([[0.2, 0.9, 0.0]]).double()
    close = close / close.norm()
    samples, labels = all_samples(patterns, close, 4)
    measured = measure_separation(samples, labels, torch.arange(4).repeat(2))
    assert measured.l_star == 4  # every irrelevant patch is δ'-closer to o_1
    assert linearly_separable(samples, labels).separable
    assert patterns_separable(patterns, close, 4).separable


def test_more_places_make_the_same_patterns_inseparable():
    made = inseparable_samples(5, 3, copies=3)
    assert [patterns_separable(made.patterns, made.irrelevant, n).separable for n in (2, 3, 4, 5)] == [
        True,
        True,
        False,
        False,
    ]


def test_digits_are_inseparable_as_a_distribution_though_every_small_training_set_is_separable():
    mosaics = digit_mosaics(200, split="train", seed=0)
    cells = torch.nn.functional.avg_pool2d(mosaics.patches.view(-1, 1, 28, 28), 7).view(200, 16, 16)
    assert linearly_separable(cells, mosaics.labels).separable  # 256 dimensions
    own = cells[torch.arange(200), mosaics.discriminative]
    patterns = torch.stack([own[mosaics.labels == s].mean(0) for s in (0, 1)])
    irrelevant = cells[torch.arange(16) != mosaics.discriminative[:, None]]
    assert not patterns_separable(patterns, irrelevant[:300], 16).separable


def test_bad_input_is_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="both classes"):
        linearly_separable(x, torch.tensor([1, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"give \(B, …\) and \(B,\)"):
        linearly_separable(x, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="NaN"):
        linearly_separable(x / 0, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ArithmeticError, match="undecided"):
        linearly_separable(torch.randn(50, 20), torch.arange(50) % 2, max_steps=1)
    with pytest.raises(ValueError, match="n ≥ 2 fails"):
        patterns_separable(x[:2], x, 1)
    with pytest.raises(ValueError, match=r"give \(2, D\)"):
        patterns_separable(x, x, 2)
    with pytest.raises(ValueError, match="copies ≤ n − 1 fails"):
        inseparable_samples(3, 3, copies=3)
    with pytest.raises(ValueError, match="d ≥ 3 fails"):
        inseparable_samples(3, 2)
    with pytest.raises(ValueError, match="−1 < δ_d < 1 fails"):
        inseparable_samples(3, 3, delta_d=-1.0)
