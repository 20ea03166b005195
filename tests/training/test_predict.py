"""Predictions: equal to the network, the same in batches of any size, with the cost of each image."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training.trained import save_run

import moesaic
from moesaic.models import count_macs
from moesaic.routing import TokenChoice, register_router
from moesaic.training import predict

PIXELS = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
NETWORKS: dict[str, dict[str, Any]] = {
    "dense": {"name": "wrn10_1"},
    "expert choice": {},
    "token choice": {"router": "token-choice"},
    "soft": {"router": "soft"},
    "gated": {"name": "vgg16_deepmoe", "width": 0.1, "size": 32},
    "converted": {
        "name": "wrn10_1",
        "conversions": ({"layer": "body.group3.0.conv2", "experts": 4, "patch_size": 2, "patches_per_expert": 1},),
    },
}


def images(size: int) -> torch.Tensor:
    return PIXELS if size == 16 else PIXELS.repeat_interleave(2, 2).repeat_interleave(2, 3)


@pytest.mark.parametrize("kind", NETWORKS)
def test_it_equals_the_network_called_by_hand_in_batches_of_any_size(kind: str, tmp_path: Path):
    model = moesaic.load(save_run(tmp_path, **NETWORKS[kind]))
    pixels = images(model.metadata.input_shape[1])
    found = predict(model, pixels)
    for prediction, image in zip(found, pixels, strict=True):
        with torch.no_grad():
            expected = model(model.transform(image)).softmax(-1)[0]
        assert torch.allclose(torch.tensor(prediction.probabilities), expected, atol=1e-6)
        assert sum(prediction.probabilities) == pytest.approx(1)
    for batch_size in (1, 2, 3, 7, 64):
        again = predict(model, list(pixels), batch_size=batch_size)
        for one, other in zip(found, again, strict=True):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)
            assert (one.macs, one.patches) == (other.macs, other.patches)
    assert predict(model, pixels[2])[0].patches == found[2].patches, "a single image"


@pytest.mark.parametrize("kind", ["dense", "expert choice", "token choice", "soft", "converted"])
def test_networks_of_fixed_cost_have_the_counted_one(kind: str, tmp_path: Path):
    model = moesaic.load(save_run(tmp_path, **NETWORKS[kind]))
    assert {each.macs for each in predict(model, PIXELS)} == {count_macs(model, (3, 16, 16)).macs}


def test_the_cost_of_a_gated_network_is_that_of_the_image(tmp_path: Path):
    model = moesaic.load(save_run(tmp_path, **NETWORKS["gated"]))
    pixels = images(32)
    with torch.no_grad():
        expected = model.macs(model.forward_with_routing(model.transform(pixels)).routing).tolist()
    found = predict(model, pixels)
    assert [each.macs for each in found] == expected
    assert len(set(expected)) > 1
    assert all(each.patches == {} for each in found)


def test_the_cost_follows_what_a_router_drops(tmp_path: Path):
    def dropping(in_channels: int, experts: int, patch_size: int) -> TokenChoice:
        return TokenChoice(in_channels, experts, 1, patch_size, capacity_factor=0.5, in_eval=True)

    register_router("test_predict:dropping", dropping)
    model = moesaic.load(save_run(tmp_path, router="test_predict:dropping"))
    found = predict(model, PIXELS, batch_size=1)  # the images of a batch share the capacity
    dense = next(row.dense_macs for row in count_macs(model, (3, 16, 16)).layers if row.routed)
    each = dense // (16 * 4)
    taken = [sum(map(len, one.patches["body.group3.0.moe"].experts)) for one in found]
    assert len({one.macs - each * count for one, count in zip(found, taken, strict=True)}) == 1
    assert max(taken) <= 8


@pytest.mark.parametrize("kind", ["expert choice", "token choice", "converted"])
def test_the_patches_are_those_of_the_routing(kind: str, tmp_path: Path):
    model = moesaic.load(save_run(tmp_path, **NETWORKS[kind]))
    with torch.no_grad(), moesaic.record_routing(model) as routing:
        model(model.transform(PIXELS))
    (name,) = routing
    for b, prediction in enumerate(predict(model, PIXELS)):
        selected = prediction.patches[name]
        assert selected.grid == routing[name].grid
        mask_EN = routing[name].mask[b].T
        assert selected.experts == tuple(tuple(row.nonzero().flatten().tolist()) for row in mask_EN)


def test_under_a_soft_router_no_patch_is_selected(tmp_path: Path):
    model = moesaic.load(save_run(tmp_path, router="soft"))
    assert predict(model, PIXELS)[0].patches == {}


def test_a_batch_has_at_least_one_image(tmp_path: Path):
    model = moesaic.load(save_run(tmp_path))
    with pytest.raises(ValueError, match="batch_size=0; it must be at least 1"):
        predict(model, PIXELS, batch_size=0)
    assert predict(model, []) == ()
