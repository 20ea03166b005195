"""Mean costs of images, all of them, right and wrong ones, and how they differ."""

import math

import pytest
import torch

from moesaic.insight.image_cost import image_costs
from moesaic.intervals import mean

RIGHT = torch.tensor([True] * 20 + [False] * 12 + [True] * 12 + [False] * 16)
CLASSES = torch.tensor([0] * 32 + [1] * 28)
MACS = torch.arange(60) * 3.0 + 100 * (~RIGHT) + 40


def costs(**changes):
    probabilities = torch.stack([MACS / 400, 1 - MACS / 400], 1)
    options = {"dense_macs": 1000, "fixed_macs": 40, "classes": CLASSES, "class_names": ["cat", "dog"]}
    return image_costs(MACS, **{**options, "probabilities": probabilities, "correct": RIGHT, **changes})


def test_mean_costs_are_percentages_of_the_dense_network():
    found, percent = costs(), MACS.double() / 10
    for of, images in ((found.all, percent), (found.right, percent[RIGHT]), (found.wrong, percent[~RIGHT])):
        assert of is not None
        assert of.images == len(images)
        assert of.mean == pytest.approx(images.mean().item())
        assert (of.least, of.most) == (images.min().item(), images.max().item())
        assert of.interval == pytest.approx(mean(images.numpy()).interval)
    assert found.cost == tuple(round(value, 4) for value in percent.tolist())
    assert [each.name for each in found.classes] == ["cat", "dog"]
    assert found.classes[1].mean == pytest.approx(percent[CLASSES == 1].mean().item())


def test_the_difference_of_wrong_and_right_images_has_the_errors_of_both():
    found = costs()
    assert found.right is not None
    assert found.wrong is not None
    difference = found.extra_cost_when_wrong
    value = found.wrong.mean - found.right.mean
    assert difference.value == pytest.approx(value)
    halves = [of.interval[1] - of.mean for of in (found.wrong, found.right)]
    assert difference.high - difference.value == pytest.approx(math.hypot(*halves))
    assert difference.value - difference.low == pytest.approx(math.hypot(*halves))


def test_within_classes_the_weights_are_those_of_their_numbers_of_images():
    percent = MACS.double() / 10
    differences, halves, weights = [], [], []
    for k in (0, 1):
        wrong, right = (percent[(k == CLASSES) & of] for of in (~RIGHT, RIGHT))
        differences.append((wrong.mean() - right.mean()).item())
        ends = [mean(of.numpy()).interval[1] - of.mean().item() for of in (wrong, right)]
        halves.append(math.hypot(*ends))
        weights.append(len(wrong) * len(right) / (len(wrong) + len(right)))
    found = costs().extra_cost_within_classes
    expected = sum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
    half = math.hypot(*(w * h for w, h in zip(weights, halves, strict=True))) / sum(weights)
    assert (found.value, found.low, found.high) == pytest.approx((expected, expected - half, expected + half))


@pytest.mark.parametrize(("wrong", "compared"), [(9, False), (10, True)])
def test_a_class_needs_ten_right_and_ten_wrong_images(wrong: int, compared: bool):
    right = torch.ones(60, dtype=torch.bool)
    right[:wrong] = False
    assert (costs(correct=right).extra_cost_within_classes is not None) is compared


def test_certainty_is_a_correlation_with_fishers_interval():
    found = costs(probabilities=torch.stack([MACS / 400, torch.rand(60) / 10], 1)).certainty
    assert found.value == pytest.approx(1, abs=0.01)
    noisy = MACS / 400 + 0.1 * torch.randn(60)
    found = costs(probabilities=noisy[:, None]).certainty
    r = torch.corrcoef(torch.stack([MACS, noisy]).double())[0, 1].item()
    half = 1.959964 / math.sqrt(57)
    expected = (r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-5)
    assert costs(probabilities=torch.full((60, 2), 0.5)).certainty is None


@pytest.mark.parametrize(("show", "least", "most"), [(2, (0, 1), (59, 58)), (50, tuple(range(20)), None)])
def test_the_least_and_the_most_expensive_images_are_disjoint(
    show: int, least: tuple[int, ...], most: tuple[int, ...] | None
):
    found = costs(show=show)
    assert found.least_expensive[:20] == least
    assert most is None or found.most_expensive == most
    assert not set(found.least_expensive) & set(found.most_expensive)
    assert len(found.least_expensive) == len(found.most_expensive) == min(show, 30)


def test_without_right_and_wrong_nothing_is_compared():
    found = costs(correct=None)
    assert (found.is_correct, found.right, found.wrong) == (None, None, None)
    assert (found.extra_cost_when_wrong, found.extra_cost_within_classes) == (None, None)
    assert costs(correct=torch.ones(60)).wrong is None
