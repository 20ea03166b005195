"""One network that adds up its patches: the bound holds for any, and one attains it."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from moesaic import keyed_random
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.theory.additive_classifiers import AdditiveClassifier, additive_error, orbit

SETTINGS: dict[ClusterSetting, float] = {1: 0.925, 2: 0.925, 3: 0.875, 4: 0.875, 7: 0.875, "figure 1": 11 / 12}


def drawn(source: ClusterPatches, samples: int = 10_000) -> ClusterData:
    return source.draw(keyed_random.keys(0, [0]), samples, "test")


def right(classifier: AdditiveClassifier, data: ClusterData) -> Tensor:
    return (2 * data.labels - 1) * classifier(data.patches) > 0


def best(source: ClusterPatches) -> AdditiveClassifier:
    return AdditiveClassifier(source.features, source.centres, source.alpha, source.gamma)


def accuracy_is(found: Tensor, expected: float) -> None:
    slack = 5 * (expected * (1 - expected) / found.numel()) ** 0.5
    assert found.float().mean().item() == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize(("which", "expected"), SETTINGS.items())
def test_the_classifier_attains_the_bound_in_every_setting(which: ClusterSetting, expected: float):
    source = ClusterPatches.setting(which)
    assert 1 - additive_error(source.alpha, source.gamma) == pytest.approx(expected)
    accuracy_is(right(best(source), drawn(source)), expected)


@pytest.mark.parametrize("which", SETTINGS)
def test_without_strengths_it_is_right_on_seven_of_eight_everywhere(which: ClusterSetting):
    source = ClusterPatches.setting(which)
    accuracy_is(right(AdditiveClassifier(source.features, source.centres), drawn(source)), 7 / 8)


intervals = st.tuples(st.floats(0.1, 3), st.floats(0, 3)).map(lambda ends: (ends[0], ends[0] + ends[1]))


@given(alpha=intervals, gamma=intervals, clusters=st.integers(2, 6), seed=st.integers(0, 9))
def test_it_errs_only_where_it_must(alpha: tuple[float, float], gamma: tuple[float, float], clusters: int, seed: int):
    source = ClusterPatches(clusters=clusters, dim=2 * clusters + 6, alpha=alpha, gamma=gamma, sigma_p=2.0, seed=seed)
    data = drawn(source, 400)
    wrong = ~right(best(source), data)
    signal, noise = data.strengths[..., 0], data.strengths[..., 2]
    low, high = max(alpha[0], gamma[0]) * (1 - 1e-4), min(alpha[1], gamma[1]) * (1 + 1e-4)
    both = (signal >= low) & (signal <= high) & (noise >= low) & (noise <= high)
    opposed = data.signs != 2 * data.labels - 1
    higher = data.clusters > data.noise_clusters  # of an orbit, the pair whose centre must speak, with one label
    assert not (wrong & ~(both & opposed & higher & (data.labels == 0))).any()


@pytest.mark.parametrize("clusters", [2, 4, 9])
def test_exactly_one_of_each_orbit_is_wrong(clusters: int):
    source = ClusterPatches(clusters=clusters, dim=2 * clusters)
    for k, other in itertools.permutations(range(clusters), 2):
        samples, y = orbit(source.features, source.centres, clusters=(k, other), strengths=(0.7, 1.2, 1.9))
        margins = y * best(source)(samples)
        assert (margins <= 0).sum() == 1
        assert margins.abs().min() >= 0.5


def cube(z: Tensor) -> Tensor:
    return z**3


def step(z: Tensor) -> Tensor:
    return (z > 0.3).double()


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, cube, step])
@pytest.mark.parametrize("seed", range(5))
def test_an_orbit_sums_to_zero_for_any_function_of_a_patch(activation: Callable[[Tensor], Tensor], seed: int):
    generator = torch.Generator().manual_seed(seed)
    source = ClusterPatches(dim=9, seed=seed)
    first, bias, second = (torch.randn(*shape, generator=generator) for shape in ((9, 30), (30,), (30,)))
    noise = torch.randn(2, 9, generator=generator)
    v, c = source.features.double(), source.centres.double()
    samples, y = orbit(v, c, clusters=(3, 1), strengths=(0.7, 1.2, 1.9), noise=noise)
    assert samples.shape == (4, 5, 9)
    margins = y * (activation(samples @ first.double() + bias) @ second.double()).sum(-1)
    assert margins.sum().abs() < 1e-10
    assert margins.abs().max() > 1e-3
    assert margins.min() <= 0


def test_an_orbit_holds_samples_of_the_distribution_with_opposed_noise():
    v, c = torch.eye(6)[:3], torch.eye(6)[3:]
    samples, y = orbit(v, c, clusters=(2, 0), strengths=(0.5, 1.5, 2.5))
    assert y.tolist() == [1, -1, 1, -1]
    along = samples.sum(1)
    assert along[0].tolist() == [-2.5, 0, 0.5, 0, 0, 1.5]
    assert along[1].tolist() == [2.5, 0, -0.5, 0, 0, 1.5]
    assert along[2].tolist() == [2.5, 0, -0.5, 1.5, 0, 0]
    assert along[3].tolist() == [-2.5, 0, 0.5, 1.5, 0, 0]


@pytest.mark.parametrize("sigma_p", [0.0, 1.0, 2.0, 100.0])
def test_noise_patches_add_nothing(sigma_p: float):
    source = ClusterPatches(patches=9, sigma_p=sigma_p)
    data = drawn(source, 2_000)
    taken = (torch.arange(9) == data.places[..., None]).any(-2)
    scores = best(source).patch_scores(data.patches)
    assert (scores[~taken] == 0).all()
    assert (scores != 0).sum() <= taken.sum()


def test_the_limit_on_mistaken_noise_holds_in_few_dimensions():
    source = ClusterPatches(clusters=2, dim=4)
    classifier = AdditiveClassifier(source.features, source.centres, tolerance=0.3)
    noise = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0))
    mistaken = (classifier.patch_scores(noise) != 0).float().mean().item()
    assert 0.2 * classifier.noise_limit < mistaken < classifier.noise_limit
    assert classifier.noise_limit == pytest.approx(4 * 0.3**3)  # two lines for each of two clusters
    assert best(ClusterPatches()).noise_limit < 1e-90
    wide = AdditiveClassifier(source.features, source.centres, tolerance=0.69)
    assert wide.noise_limit == 1  # 4 · 0.69³ is more than all


def numeric_bound(alpha: tuple[float, float], gamma: tuple[float, float]) -> float:
    """The double integral of the smaller density, over eight, on a grid of midpoints."""
    x = (torch.arange(1_000, dtype=torch.float64) + 0.5) / 1_000 * max(alpha[1], gamma[1])
    of_alpha, of_gamma = (((x > low) & (x < high)) / (high - low) for low, high in (alpha, gamma))
    here = of_alpha[:, None] * of_gamma
    return (torch.minimum(here, here.T).mean() * max(alpha[1], gamma[1]) ** 2 / 8).item()


@pytest.mark.parametrize(
    ("alpha", "gamma"),
    [((1.0, 2.0), (1.0, 2.0)), ((0.5, 2.0), (0.5, 3.0)), ((0.5, 2.0), (1.0, 3.0)), ((1.0, 2.0), (2.5, 3.0))],
)
def test_the_least_error_is_the_integral_of_the_proof(alpha: tuple[float, float], gamma: tuple[float, float]):
    assert additive_error(alpha, gamma) == pytest.approx(numeric_bound(alpha, gamma), abs=2e-3)


@given(alpha=intervals, gamma=intervals)
def test_the_least_error_is_at_most_an_eighth_and_the_same_with_alpha_and_gamma_exchanged(
    alpha: tuple[float, float], gamma: tuple[float, float]
):
    error = additive_error(alpha, gamma)
    assert 0 <= error <= 1 / 8
    assert error == additive_error(gamma, alpha)


def test_a_strength_that_does_not_vary_is_known_unless_both_are_the_same():
    assert additive_error((1.0, 1.0), (1.0, 1.0)) == 1 / 8
    assert additive_error((1.0, 1.0), (0.5, 2.0)) == 0
    assert additive_error((1.0, 1.0), (2.0, 2.0)) == 0


def test_bad_input_is_refused():
    v, c = torch.eye(6)[:3], torch.eye(6)[3:]
    with pytest.raises(ValueError, match=r"give \(K, D\) each"):
        AdditiveClassifier(v, c[:2])
    with pytest.raises(ValueError, match="they must be orthonormal"):
        AdditiveClassifier(v, v)
    with pytest.raises(ValueError, match="low ≤ high fails"):
        AdditiveClassifier(v, c, alpha=(2.0, 1.0))
    with pytest.raises(ValueError, match=r"0 < tolerance < 0.7 fails: tolerance=0"):
        AdditiveClassifier(v, c, tolerance=0)
    with pytest.raises(ValueError, match="K ≤ 50 fails: K=60"):
        AdditiveClassifier(torch.eye(120)[:60], torch.eye(120)[60:])
    with pytest.raises(ValueError, match=r"0 ≤ low fails: gamma=\(-1.0, 1.0\)"):
        additive_error((1.0, 2.0), (-1.0, 1.0))
    with pytest.raises(ValueError, match="high < ∞ fails"):
        additive_error((1.0, 2.0), (1.0, math.inf))
    for clusters in ((0, 0), (0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="0 ≤ k ≠ k' < K = 3 fails"):
            orbit(v, c, clusters=clusters, strengths=(1, 1, 1))
    strengths: Any = (1, 0, 1)
    with pytest.raises(ValueError, match="0 < s, β, t fails"):
        orbit(v, c, clusters=(0, 1), strengths=strengths)
