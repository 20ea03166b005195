"""The comparison of WRN-pMoE's variants: pairs differ in what they are to differ in, and the rule is kept."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from benchmark_scripts import loaded_script

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize


@pytest.fixture(scope="module")
def variants() -> Iterator[ModuleType]:
    with loaded_script("wide_variants") as module:
        yield module


def task_of(images: int) -> ImageDataset:
    labels, scale = torch.arange(images) % 2, Normalize((0.5,) * 3, (0.3,) * 3)
    pixels = torch.arange(images, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 64, 64).contiguous()
    part = LabelledImages(pixels, labels, labels)
    return ImageDataset(part, part, ("even", "odd"), ("even", "odd"), scale, scale)


def test_the_pair_starts_equal_but_for_one_bias_of_zeros(variants: ModuleType) -> None:
    with_bias, without = (
        variants.VARIANTS[name].made(task_of(4), width=1, seed=3).state_dict()
        for name in ("best, one bias", "best, ours")
    )
    (bias,) = with_bias.keys() - without.keys()
    assert bias == "body.group3.0.conv1.bias"
    assert not with_bias[bias].any()
    assert without.keys() < with_bias.keys()
    assert all(torch.equal(weight, with_bias[name]) for name, weight in without.items())


def test_no_image_is_both_trained_and_validated_on(variants: ModuleType) -> None:
    dataset = variants.parted(task_of(60), samples=20, validation=30, seed=1)
    shown, asked = ({int(pixels[0, 0, 0]) for pixels in part.pixels} for part in (dataset.train, dataset.test))
    assert (len(shown), len(asked), len(shown & asked)) == (20, 30, 0)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.1] * 4, "yes"),
        ([-0.35, -0.55] * 4, "no"),  # the mean alone is within the margin
        ([2.0, -2.0] * 4, "no"),  # equal in the mean, but known too badly
        ([0.1, -0.1] * 3, "too few trials"),
    ],
)
def test_the_lower_end_of_the_interval_decides(variants: ModuleType, differences: list[float], verdict: str) -> None:
    base = [80.0 + trial for trial in range(len(differences))]
    found = {"base": base, "other": [a + b for a, b in zip(base, differences, strict=True)]}
    (row,) = variants.summary({"dataset": found}, "base")["against"]
    assert row["as well"] == verdict
    assert row["difference"] == pytest.approx(sum(differences) / len(differences))


def test_a_trial_that_only_one_has_does_not_count(variants: ModuleType) -> None:
    found = {"base": [80.0, 81.0, 20.0], "other": [80.0, 81.0]}
    (row,) = variants.summary({"dataset": found}, "base")["against"]
    assert (row["trials"], row["difference"]) == (2, 0.0)
