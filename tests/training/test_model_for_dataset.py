"""Networks made for the images of a dataset: routed heads on small maps."""

import pytest
import torch

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.model_for_dataset import head_note, spec_for_dataset


def dataset(side: int) -> ImageDataset:
    labels, scale = torch.arange(2), Normalize((0.5,) * 3, (0.5,) * 3)
    images = LabelledImages(torch.zeros(2, 3, side, side, dtype=torch.uint8), labels, labels)
    return ImageDataset(images, images, tuple("ab"), tuple("ab"), scale, scale)


@pytest.mark.parametrize(("side", "selected"), [(4, 1), (8, 2), (32, None)])
def test_the_experts_of_a_head_select_no_more_than_there_is(side: int, selected: int | None):
    asked = ModelSpec.parse("wrn10_1:head=routed")  # its last map has a quarter of the image's side
    spec, _ = spec_for_dataset(asked, dataset(side))
    assert spec.arguments.get("patches_per_expert") == selected
    assert spec.build().eval()(torch.zeros(1, 3, side, side)).shape == (1, 2)
    note = head_note(asked, spec)
    if selected is None:
        assert note is None
    else:
        assert note is not None
        assert f"selects {selected}; another number: --patches-per-expert" in note


def test_a_number_that_was_asked_for_is_kept():
    asked = ModelSpec.parse("wrn10_1:head=routed:patches_per_expert=3")
    spec, _ = spec_for_dataset(asked, dataset(8))
    assert spec.arguments["patches_per_expert"] == 3
    assert head_note(asked, spec) is None
    with pytest.raises(ValueError, match="patches_per_expert=3, but a 1×1 grid has only 1 patches"):
        spec_for_dataset(asked, dataset(4))
