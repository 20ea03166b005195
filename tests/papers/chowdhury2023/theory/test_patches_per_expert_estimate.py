"""How deep the discriminative patch lies: measured, and estimated without knowing its place."""

import pytest
import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.data.mnist_mosaics import digit_mosaics
from moesaic.papers.chowdhury2023.theory.patches_per_expert_estimate import (
    held_out_scores,
    measure_patch_depth,
    suggest_patches_per_expert,
)


def drawn(samples: int, *, seed: int, classes: int = 2, rivals: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of 16 random directions, one of them a noisy class pattern; a share of rivals outrank that of class 1."""
    generator = torch.Generator().manual_seed(seed)
    N, D = 16, 64
    patches = torch.nn.functional.normalize(torch.randn(samples, N, D, generator=generator), dim=-1)
    labels = torch.arange(samples) % classes
    places = torch.randint(0, N, (samples,), generator=generator)
    at = torch.arange(samples)
    rival = torch.rand(samples, N, generator=generator) < rivals
    rival[at, places] = False
    patches[rival] = (torch.eye(D)[1] - torch.eye(D)[0]) / 2**0.5
    noisy = torch.eye(D)[labels] + 0.3 / D**0.5 * torch.randn(samples, D, generator=generator)
    patches[at, places] = torch.nn.functional.normalize(noisy, dim=-1)
    return patches, labels, places


def test_held_out_scores_are_those_of_a_router_trained_without_the_sample():
    patches, labels, _ = drawn(17, seed=0, classes=3)
    scores, mine = held_out_scores(patches, labels, 2, 0)
    kept = labels != 1
    x, y = patches[kept].double(), labels[kept]
    assert torch.equal(mine, y == 2)
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        sums = x.sum(1)
        router = sums[rest & (y == 2)].mean(0) - sums[rest & (y == 0)].mean(0)
        torch.testing.assert_close(scores[i], x[i] @ router, rtol=0, atol=1e-12)


def test_the_measured_depth_is_the_smallest_l_that_reaches_the_coverage():
    patches, labels, places = drawn(200, seed=0, rivals=0.1)
    found = measure_patch_depth(patches, labels, places, coverage=0.9)
    for s in (0, 1):
        scores, mine = held_out_scores(patches, labels, s, 1 - s)
        own = scores[mine].gather(1, places[labels == s][:, None])
        rank = (scores[mine] > own).sum(1)
        within = torch.stack([(rank < top).double().mean() for top in range(1, 17)])
        torch.testing.assert_close(found.within[s], within)
        assert within[found.by_class[s] - 1] >= 0.9
        assert found.by_class[s] == 1 or within[found.by_class[s] - 2] < 0.9
    assert found.l == max(found.by_class)


def test_clear_patterns_need_one_patch():
    patches, labels, places = drawn(100, seed=1)
    assert measure_patch_depth(patches, labels, places).by_class == (1, 1)
    assert suggest_patches_per_expert(patches, labels).by_class == (1, 1)


@pytest.mark.parametrize(("rivals", "truth"), [(0.05, 3), (0.1, 5), (0.2, 7)])
def test_rivals_are_counted_without_knowing_the_places(rivals: float, truth: int):
    patches, labels, places = drawn(400, seed=2, rivals=rivals)
    measured = measure_patch_depth(patches, labels, places)
    suggested = suggest_patches_per_expert(patches, labels)
    assert abs(measured.by_class[1] - truth) <= 1
    assert abs(suggested.by_class[1] - measured.by_class[1]) <= 1
    assert suggested.by_class[0] == measured.by_class[0] == 1
    assert suggested.l == suggested.by_class[1]


@pytest.mark.parametrize("classes", [4, 5])
def test_more_classes_go_in_pairs(classes: int):
    patches, labels, places = drawn(100 * classes, seed=3, classes=classes, rivals=0.1)
    measured = measure_patch_depth(patches, labels, places)
    suggested = suggest_patches_per_expert(patches, labels)
    assert len(suggested.by_class) == classes
    assert suggested.within.shape == (classes, 16)
    for found, true in zip(suggested.by_class, measured.by_class, strict=True):
        assert abs(found - true) <= 2


def test_where_labels_say_nothing_nearly_all_patches_are_suggested():
    patches, labels, _ = drawn(200, seed=4)
    shuffled = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert suggest_patches_per_expert(patches, shuffled).l >= 13


@pytest.mark.parametrize("seed", range(4))
def test_on_digit_mosaics_the_suggestion_is_near_the_truth(seed: int):
    mosaics = digit_mosaics(300, split="train", seed=seed)
    measured = measure_patch_depth(mosaics.patches, mosaics.labels, mosaics.discriminative)
    suggested = suggest_patches_per_expert(mosaics.patches, mosaics.labels)
    assert 2 <= measured.l <= 6
    assert abs(suggested.l - measured.l) <= 3
    assert (suggested.within - measured.within).abs().max() < 0.12


def test_more_coverage_needs_more_patches_and_full_coverage_all_it_takes():
    patches, labels, places = drawn(200, seed=5, rivals=0.1)
    depths = [suggest_patches_per_expert(patches, labels, coverage=share).l for share in (0.3, 0.8, 0.99)]
    assert depths == sorted(depths)
    assert depths[0] < depths[2]
    assert measure_patch_depth(patches, labels, places, coverage=1.0).l <= 16


def test_it_neither_needs_nor_leaves_gradients():
    patches, labels, _ = drawn(40, seed=6)
    with torch.no_grad():
        without = suggest_patches_per_expert(patches, labels)
    within = suggest_patches_per_expert(patches.requires_grad_(), labels)
    assert not within.within.requires_grad
    assert torch.equal(within.within, without.within)
    assert patches.grad is None


def test_patches_that_are_all_alike_have_no_depth_to_find():
    found = suggest_patches_per_expert(torch.ones(8, 4, 3), torch.arange(8) % 2)
    torch.testing.assert_close(found.within[0], torch.tensor([0.25, 0.5, 0.75, 1.0]).double())
    assert found.l == 4


def test_bad_input_is_refused():
    patches, labels, places = drawn(20, seed=7)
    with pytest.raises(ValueError, match="at least 2 of each"):
        suggest_patches_per_expert(patches[:3], labels[:3])
    with pytest.raises(ValueError, match="0 < coverage ≤ 1 fails"):
        suggest_patches_per_expert(patches, labels, coverage=1.5)
    with pytest.raises(ValueError, match="patches 0 to 15"):
        measure_patch_depth(patches, labels, places + 16)
