"""``moesaic.load``: the network with its preprocessing."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from training.trained import SCALE, save_run

import moesaic
from moesaic.models import WideResNetPMoE
from moesaic.routing import Router
from moesaic.training.checkpoint import load_checkpoint


def test_the_network_comes_with_transform_classes_and_metadata(tmp_path: Path):
    model = moesaic.load(save_run(tmp_path))
    assert type(model) is WideResNetPMoE
    assert not model.training
    assert model.classes == ("cat", "dog", "[bold]=cow")
    assert model.metadata.metrics["accuracy"] == 97.0
    assert (model.transform.shape, model.transform.normalize) == ((3, 16, 16), SCALE)
    x = model.transform(Image.new("RGB", (40, 30), "teal"))
    with torch.no_grad():
        assert torch.equal(model(x), load_checkpoint(tmp_path).model(x))


def test_the_file_itself_is_loaded_too_and_the_weights_are_the_networks_alone(tmp_path: Path):
    model = moesaic.load(save_run(tmp_path) / "model.safetensors")
    assert model.state_dict().keys() == load_checkpoint(tmp_path).model.state_dict().keys()
    assert copy.deepcopy(model).classes == model.classes
    assert pickle.loads(pickle.dumps(model.transform)) == model.transform


def test_a_file_without_normalization_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"does not say how pixels become the network's input; use .*load_checkpoint"):
        moesaic.load(save_run(tmp_path, scale=None))


def test_a_router_of_ones_own_is_given(tmp_path: Path):
    class Mine(moesaic.TokenChoice): ...

    moesaic.routing.register_router("test_load:Mine", Mine)
    save_run(tmp_path, router="test_load:Mine")
    model = moesaic.load(tmp_path, router=Mine)
    assert isinstance(model.moe.router, Router)
