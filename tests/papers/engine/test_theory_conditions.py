"""Samples that the theory's functions take."""

import pytest
import torch

from moesaic.papers.engine.theory_conditions import check_patch_indices, check_samples


def test_classes_are_counted():
    assert check_samples("f", torch.randn(4, 3, 2), torch.tensor([0, 1, 2, 1])) == 3


@pytest.mark.parametrize(
    ("labels", "least"),
    [([0, 0, 0], 1), ([1, 2, 1], 1), ([0, 2, 2], 1), ([0, 1, 1], 2)],
    ids=["one class", "not from 0", "a class without samples", "too few of a class"],
)
def test_classes_that_cannot_be_compared_are_refused(labels: list[int], least: int):
    with pytest.raises(ValueError, match="give two classes or more, counted from 0"):
        check_samples("f", torch.randn(3, 3, 2), torch.tensor(labels), least=least)


@pytest.mark.parametrize("index", [-1, 3])
def test_patches_that_a_sample_does_not_have_are_refused(index: int):
    check_patch_indices("f", torch.tensor([0, 2]), samples=2, patches=3)
    with pytest.raises(ValueError, match="a sample has the patches 0 to 2"):
        check_patch_indices("f", torch.tensor([0, index]), samples=2, patches=3)
