"""Checkpoints: a network comes back as it was, and a file that cannot be used says why."""

import errno
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from moesaic import files
from moesaic.data.image_dataset import Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import (
    Metadata,
    load_checkpoint,
    load_weights,
    read_tensors,
    save_network,
    write_tensors,
)

SPEC = ModelSpec("wrn10_1_pmoe", {"num_classes": 3})
CARD = Metadata(
    SPEC,
    ("cat", 'a "dog"', "Vögel"),
    ("cat", "dog", "bird"),
    Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.1)),
    (3, 32, 32),
    "pets",
    {"accuracy": 91.5, "epochs": 3},
)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SPEC.build()


def test_a_network_comes_back_with_everything_needed_to_use_it(tmp_path):
    model = network(1).to(memory_format=torch.channels_last)
    model(torch.randn(4, 3, 32, 32))  # statistics of its own
    save_network(tmp_path / "model.safetensors", model, CARD)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        found = load_checkpoint(path)
        assert found.metadata == CARD
        assert (found.spec, found.class_names, found.cluster_names) == (SPEC, CARD.class_names, CARD.cluster_names)
        assert (found.normalize, found.input_shape, found.task_name) == (CARD.normalize, (3, 32, 32), "pets")
        assert found.metrics["accuracy"] == 91.5
        assert not found.model.training
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(found.model(x), model.eval()(x))


def test_loading_draws_nothing_from_torchs_generator(tmp_path):
    save_network(tmp_path / "model.safetensors", network(), CARD)
    before = torch.get_rng_state()
    load_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_network_is_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        save_network(tmp_path / name, network(), CARD)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_weights_with_two_names_are_kept(tmp_path):
    layer = nn.Linear(3, 3, bias=False)
    save_network(tmp_path / "tied", nn.Sequential(layer, layer), CARD)
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    load_weights(tmp_path / "tied", other)
    assert torch.equal(other[0].weight, layer.weight)
    assert torch.equal(other[1].weight, layer.weight)


def test_a_checkpoint_of_another_network_says_which_tensors_differ(tmp_path):
    save_network(tmp_path / "model.safetensors", network(), CARD)
    other = ModelSpec("wrn16_1", {"num_classes": 5}).build()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"is of another network than the WideResNet given") as error:
        load_weights(tmp_path, other)
    message = str(error.value)
    ours, theirs = set(network().state_dict()), set(other.state_dict())
    assert f"{len(theirs - ours)} missing in the file: " in message
    assert f"{len(ours - theirs)} only in the file: " in message
    assert " more" in message
    assert "of another shape: " in message
    assert "(3, " in message
    assert "(5, " in message
    assert len(message) < 1000
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items()), "all or nothing"


def test_a_network_that_is_made_otherwise_today_is_refused(tmp_path):
    lying = Metadata(ModelSpec("wrn10_1", {"num_classes": 3}), *list(vars(CARD).values())[1:])
    save_network(tmp_path / "model.safetensors", network(), lying)
    with pytest.raises(ValueError, match=r"another network than wrn10_1 as it is made here: .*only in the file: "):
        load_checkpoint(tmp_path)


def test_a_network_without_a_spec_needs_somebody_to_build_it(tmp_path):
    metadata = Metadata(None, *list(vars(CARD).values())[1:])
    save_network(tmp_path / "model.safetensors", network(1), metadata)
    with pytest.raises(ValueError, match=r"does not say how its network was made; .*load_weights\(path, model\)"):
        load_checkpoint(tmp_path)
    model = network(2)
    assert load_weights(tmp_path, model) == metadata
    assert torch.equal(next(model.parameters()), next(network(1).parameters()))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder of a run"):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not there"):
        load_checkpoint(tmp_path / "nowhere")
    for run in ("first", "networks/second"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        save_network(tmp_path / "runs" / run / "model.safetensors", network(), CARD)
    with pytest.raises(FileNotFoundError, match=r"no folder of a run.*; use \S+/first, \S+/networks/second$"):
        load_checkpoint(tmp_path / "runs")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_checkpoint(tmp_path / "text")
    save_network(tmp_path / "whole", network(), CARD)
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_checkpoint(tmp_path / "half")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="not one that moesaic wrote"):
        load_checkpoint(tmp_path / "foreign")
    write_tensors(tmp_path / "newer", {}, {**CARD.to_json(), "format": 99})
    with pytest.raises(ValueError, match="format=99, this version of moesaic reads format=1"):
        load_checkpoint(tmp_path / "newer")


def test_the_header_is_json_and_nothing_in_the_file_is_pickled(tmp_path):
    save_network(tmp_path / "file", network(), CARD)
    with safe_open(tmp_path / "file", framework="np") as file:
        header = file.metadata()
    assert list(header) == ["moesaic"]
    assert json.loads(header["moesaic"])["class_names"] == list(CARD.class_names)


def test_a_full_disk_leaves_the_last_good_file_and_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_network(path, network(1), CARD)
    good = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(
        OSError, match=r"could not be written \(No space left on device\).*still there.*Free space"
    ) as error:
        save_network(path, network(2), CARD)
    assert error.value.errno == errno.ENOSPC
    assert str(path) in str(error.value)
    assert path.read_bytes() == good
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"], "nothing half written takes up room"


def test_tensors_of_any_kind_come_back(tmp_path):
    tensors = {"byte": torch.arange(5, dtype=torch.uint8), "half": torch.randn(2, 3).bfloat16(), "one": torch.tensor(7)}
    write_tensors(tmp_path / "file", tensors, {"a": [1, None, "ä"]})
    found, content = read_tensors(tmp_path / "file")
    assert content == {"a": [1, None, "ä"]}
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
