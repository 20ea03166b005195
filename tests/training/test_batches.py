"""Batches are prepared several at a time, within a limit, and are the same however many that are."""

import pytest
import torch
from training.squares import TASK

from moesaic.training import batches
from moesaic.training.batches import generator_seed, train_batches

SIZES = (5, 4, 4, 3)
CPU = torch.device("cpu")


def prepared_together(monkeypatch: pytest.MonkeyPatch, **limits: int) -> list[int]:
    """The numbers of images that are transformed at once."""
    counts: list[int] = []
    for name, value in limits.items():
        monkeypatch.setattr(batches, name, value)

    class Counted:
        train, test, eval_transform = TASK.train, TASK.test, TASK.eval_transform

        @staticmethod
        def train_transform(pixels: torch.Tensor, rand: torch.Tensor) -> torch.Tensor:
            counts.append(len(pixels))
            return TASK.train_transform(pixels, rand)

    made = list(train_batches(Counted, SIZES, 0, 0, CPU))  # type: ignore[arg-type]
    alone = list(train_batches(TASK, SIZES, 0, 0, CPU))
    assert [len(labels) for _, labels in made] == list(SIZES)
    assert all(
        torch.equal(*pair) for one, other in zip(made, alone, strict=True) for pair in zip(one, other, strict=True)
    )
    return counts


def test_neighbouring_batches_are_prepared_together_up_to_a_number_of_images(monkeypatch):
    assert prepared_together(monkeypatch, _MAX_PREPARED_IMAGES=16) == [16]
    assert prepared_together(monkeypatch, _MAX_PREPARED_IMAGES=9) == [9, 7]
    assert prepared_together(monkeypatch, _MAX_PREPARED_IMAGES=8) == [5, 8, 3]
    assert prepared_together(monkeypatch, _MAX_PREPARED_IMAGES=1) == list(SIZES)


def test_large_images_are_prepared_in_smaller_numbers(monkeypatch):
    values = TASK.train.pixels[0].numel()
    assert prepared_together(monkeypatch, _MAX_PREPARED_VALUES=9 * values) == [9, 7]
    assert prepared_together(monkeypatch, _MAX_PREPARED_VALUES=9 * values - 1) == [5, 8, 3]
    assert prepared_together(monkeypatch, _MAX_PREPARED_VALUES=1) == list(SIZES)


def test_skipped_batches_are_those_at_the_start():
    whole, rest = (list(train_batches(TASK, SIZES, 0, 1, CPU, skip=skip)) for skip in (0, 2))
    assert len(rest) == 2
    assert all(torch.equal(one[0], other[0]) for one, other in zip(whole[2:], rest, strict=True))


def test_seeds_of_generators_have_63_bits():
    seeds = [generator_seed(seed, "x") for seed in range(50)]
    assert len(set(seeds)) == 50
    assert 2**62 < max(seeds) < 2**63
    assert min(seeds) >= 0
