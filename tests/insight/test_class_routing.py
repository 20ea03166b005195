"""Routing by class, against sums written out: information, its level by chance, naive Bayes, receptive fields."""

import math

import pytest
import torch
from torch import nn

import moesaic
from moesaic.insight.channel_metrics import GateDistances
from moesaic.insight.class_routing import FOLDS, SHUFFLES, Information, check_labels, information, probe_accuracy
from moesaic.insight.receptive_field import receptive_field
from moesaic.keyed_random import keys, permutations


def bits(pairs: list[tuple[int, int]]) -> float:
    """The mutual information of two columns, by counting."""
    n = len(pairs)
    one, two = ([pair[i] for pair in pairs] for i in (0, 1))
    return sum(
        (share := pairs.count(pair) / n) * math.log2(share / (one.count(pair[0]) / n * two.count(pair[1]) / n))
        for pair in set(pairs)
    )


def test_information_and_its_level_by_chance_are_those_of_the_counts():
    choice = [0, 0, 0, 1, 1, 2, 2, 2, 2, 0]
    labels = torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 2, 2])
    found = information(torch.eye(3)[choice], labels, 3, seed=4)
    assert found.bits == pytest.approx(bits(list(zip(labels.tolist(), choice, strict=True))))
    assert found.most == pytest.approx(bits([(label, label) for label in labels.tolist()]))
    orders = permutations(keys(4, range(SHUFFLES)), "labels", 10)
    shuffled = sorted(bits(list(zip(labels[order].tolist(), choice, strict=True))) for order in orders)
    assert SHUFFLES == 200
    assert found.by_chance == pytest.approx(shuffled[190])


def test_rows_are_shares_and_an_image_without_any_does_not_count():
    work = torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    found = information(work, torch.tensor([0, 1, 1]), 2)
    assert (found.bits, found.most) == (1.0, 1.0)


def test_information_is_significant_above_chance_alone():
    assert [Information(value, 0.5, 1.0).significant for value in (0.5, 0.51)] == [False, True]


@pytest.mark.parametrize(
    ("within", "between", "by_chance", "expected"),
    [(0.25, 0.5, 0.25, False), (0.25, 0.5, 0.24, True), (None, 0.5, 0.1, False), (0.1, None, 0.1, False),
     (0.1, 0.5, None, False)],
)  # fmt: skip
def test_gates_depend_on_the_class_where_the_difference_is_above_chance(within, between, by_chance, expected):
    assert GateDistances((), within, between, by_chance, None, 0.5).significant == expected


def test_the_probe_is_naive_bayes_on_the_images_that_it_has_not_seen():
    generator = torch.Generator().manual_seed(2)
    labels = (torch.arange(23) % 4).clamp(max=2)
    selected = (torch.rand(23, 4, generator=generator) < 0.3 + 0.2 * labels[:, None]).double()
    fold = permutations(keys(7, [0]), "folds", 23)[0] % FOLDS
    correct = 0
    for b in range(23):
        seen = fold != fold[b]
        scores = []
        for k in range(3):
            own = selected[seen & (labels == k)]
            rate = (own.sum(0) + 0.5) / (len(own) + 1)
            likelihood = torch.where(selected[b] > 0, rate, 1 - rate).prod()
            scores.append(float(likelihood * (len(own) + 0.5)))
        correct += max(range(3), key=scores.__getitem__) == int(labels[b])
    assert 0 < correct < 23
    assert probe_accuracy(selected, labels, 3, seed=7) == correct / 23


@pytest.mark.parametrize(("images", "known"), [(19, False), (20, True)])
def test_the_probe_needs_twenty_images(images: int, known: bool):
    labels = torch.arange(images) % 2
    assert (probe_accuracy(nn.functional.one_hot(labels), labels, 2) is not None) == known


def test_labels_at_the_limits_are_taken_and_those_beyond_are_refused():
    assert check_labels("x", torch.tensor([0, 2]), 2, 3).tolist() == [0, 2]
    assert check_labels("x", torch.tensor([], dtype=torch.int64), 0, 3).tolist() == []
    for labels in (torch.tensor([0, 3]), torch.tensor([-1, 2])):
        with pytest.raises(ValueError, match="they must be from 0 to 2"):
            check_labels("x", labels, 2, 3)
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ValueError, match="one whole number for each of the 2 images"):
            check_labels("x", labels, 2, 3)


def test_the_receptive_field_of_a_rectangular_patch_has_its_own_height_and_width():
    layer = moesaic.PatchMoE(2, 4, experts=2, patches_per_expert=1, patch_size=2)
    model = nn.Sequential(nn.AvgPool2d((1, 2)), nn.Conv2d(3, 2, (3, 1), padding=(1, 0)), layer)
    field = receptive_field(model, "2", torch.rand(1, 3, 10, 24))
    assert field is not None
    assert field.patch_size == (2.0, 4.0)
    assert field.margin == 1  # up and down, by the convolution
    assert not field.covers_image
    assert 0 < field.own_share < 1
    wide = nn.Sequential(nn.AvgPool2d((1, 2)), nn.Conv2d(3, 2, (1, 5), padding=(0, 2)), layer)
    found = receptive_field(wide, "2", torch.rand(1, 3, 10, 24))
    assert found is not None
    assert found.margin == 4  # two columns of two pixels
    alone = receptive_field(nn.Sequential(nn.Conv2d(3, 2, 1), layer), "1", torch.rand(1, 3, 10, 24))
    assert alone is not None
    assert (alone.margin, alone.own_share) == (0, pytest.approx(1))
