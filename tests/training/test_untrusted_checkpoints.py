"""Checkpoints of strangers: nothing in them runs, and whatever is wrong is one line before memory is taken."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm_fixture import timm  # noqa: F401  a fixture
from training.squares import TASK
from training.trained import save_run

from moesaic.models.registry import ModelSpec
from moesaic.models.spec_validation import check_spec
from moesaic.training.checkpoint import load_checkpoint, load_weights
from moesaic.training.model_for_dataset import spec_for_dataset
from moesaic.training.trained_network import load
from moesaic.validated_json import InvalidFile

SPEC = ModelSpec("wrn10_1", {"num_classes": 3})
HEADER: dict[str, Any] = {
    "format": 1,
    "spec": SPEC.to_json(),
    "class_names": ["a", "b", "c"],
    "cluster_names": ["a", "b", "c"],
    "scale": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    "input_shape": [3, 32, 32],
    "task_name": "pets",
    "metrics": {},
}


def write(path: Path, header: Any, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A file as a stranger may write it: any JSON in the header, and no checksum."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(SPEC.build().state_dict() if tensors is None else tensors, path, metadata={"moesaic": text})
    return path


def with_arguments(**arguments: Any) -> dict[str, Any]:
    return {**HEADER, "spec": {**HEADER["spec"], "arguments": {"num_classes": 3, **arguments}}}


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=str(path)) as error:
        load_checkpoint(path)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def test_a_file_of_an_earlier_version_without_a_checksum_is_read(tmp_path):
    found = load_checkpoint(write(tmp_path / "old.safetensors", HEADER))
    assert found.class_names == ("a", "b", "c")
    assert found.metadata.tested == ""


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_path": "bomb.pth"},
        {"pretrained_cfg": {"file": "bomb.pth"}},
        {"pretrained_cfg_overlay": {"file": "bomb.pth"}},
        {"scriptable": True},
        {"features_only": True},
        {"cache_dir": "/tmp"},
        {"norm_layer": "layernorm"},
    ],
)
def test_arguments_in_a_file_reach_timm_only_if_they_are_on_the_list(timm, tmp_path, monkeypatch, arguments):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    called: list[Any] = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: called.append(options))
    Path("bomb.pth").write_bytes(pickle.dumps(Bomb()))
    spec = {"name": "timm/resnet18", "arguments": {"num_classes": 3, **arguments}, "conversions": []}
    message = refusal(write(tmp_path / "model.safetensors", {**HEADER, "spec": spec}, {"x": torch.zeros(1)}))
    assert f"{next(iter(arguments))!r} is no argument of timm/resnet18 that a file may give" in message
    assert not called
    assert not Path("exploded").exists()


def test_a_timm_network_still_comes_back(timm, tmp_path):  # noqa: F811
    save_run(tmp_path / "run", "timm/resnet18", in_channels=3, drop_rate=0.1)
    assert load_checkpoint(tmp_path / "run").spec.arguments["drop_rate"] == 0.1
    save_run(tmp_path / "head", "timm/resnet18", head="routed", experts=2, patches_per_expert=1)
    assert type(load_checkpoint(tmp_path / "head").model).__name__ == "HeadedNetwork"


def test_a_network_whose_checkpoint_could_not_be_loaded_is_refused_before_it_is_trained(timm):  # noqa: F811
    spelling = "timm/resnet18:zero_init_last=false"
    with pytest.raises(ValueError, match="checkpoint could not be loaded again: 'zero_init_last' is no argument"):
        spec_for_dataset(spelling, TASK)


def test_a_spelling_that_nests_too_deep_is_text():
    assert ModelSpec.parse("timm/resnet18:drop_rate=" + "[" * 100_000).arguments["drop_rate"] == "[" * 100_000


@pytest.mark.parametrize("name", ["timm/hf-hub:someone/net", "timm/local-dir:/tmp", "timm/../x", "os", "wrn10_1;x"])
def test_names_that_are_no_networks_are_refused(tmp_path, name):
    spec = {**HEADER["spec"], "name": name}
    refusal(write(tmp_path / "model.safetensors", {**HEADER, "spec": spec}))


VALID = [("spec", None), ("scale", None), ("task_name", "x"), ("metrics", {"a": {}})]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in HEADER
        for value in ("missing", None, 7, "x", [[]], {"a": {}})
        if key != "format" and (key, value) not in VALID
    ],
)
def test_a_header_with_a_wrong_value_names_the_key(tmp_path, key, value):
    header = {name: each for name, each in HEADER.items() if name != key}
    message = refusal(write(tmp_path / "model.safetensors", header if value == "missing" else {**header, key: value}))
    assert key in message


def some_metrics(metrics: str) -> str:
    return json.dumps(HEADER).replace('"metrics": {}', f'"metrics": {metrics}')


@pytest.mark.parametrize(
    "header", ["null", "[]", "{", "1" * 5000, "[" * 100_000, some_metrics("[" * 500 + "]" * 500), '"\\ud83d"']
)
def test_headers_that_are_no_json_object_are_refused(tmp_path, header):
    refusal(write(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_classes": 10**9}, "num_classes=1000000000 of wrn10_1 is not from 1 to 1000000"),
        ({"num_classes": 999_999}, "of another shape"),
        ({"num_classes": True}, "is not a whole number"),
        ({"num_classes": None}, "without num_classes"),
        ({"num_classes": 0}, "is not from 1 to"),
        ({"in_channels": 10**10}, "is not from 1 to 4096"),
        ({"fidelity": "x" * 10_000}, "has 10000 characters"),
        ({"fidelity": ["best"]}, "is a list"),
        ({"surprise": 1}, "'surprise' is no argument of wrn10_1"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(tmp_path, arguments, complaint):
    assert complaint in refusal(write(tmp_path / "model.safetensors", with_arguments(**arguments)))


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("wrn10_1_pmoe", {"image_size": 10**10}, "image_size=10000000000 of wrn10_1_pmoe is not from 1 to 4096"),
        ("wrn10_1_pmoe", {"experts": 65_536}, "cannot be made"),
        ("wrn6000004_1", {}, "is deeper than 1000 layers"),
        ("wrn10_100000", {}, "wider than 100"),
        ("wrn" + "9" * 150 + "_1", {}, "is deeper than 1000 layers"),
        ("resnet18_deepmoe", {"width": 1e300}, "is beyond 65536"),
        ("vgg16", {"width": 60_000.0}, "in the network|cannot be made"),
    ],
)
def test_networks_that_no_machine_holds_are_refused(tmp_path, name, arguments, complaint):
    spec = {"name": name, "arguments": {"num_classes": 3, **arguments}, "conversions": []}
    message = refusal(write(tmp_path / "model.safetensors", {**HEADER, "spec": spec}))
    assert any(each in message for each in complaint.split("|")), message


@pytest.mark.parametrize(
    "conversion",
    [
        {"layer": "x", "experts": 10**12},
        {"layer": ["x"] * 20_000, "experts": 2},
        {"layer": [["x"]], "experts": 2},
        {"layer": "x", "experts": 2, "input_size": [3, 10**10, 10**10]},
        {"layer": "x", "experts": 2, "model": "y"},
        {"layer": "no such layer", "experts": 2},
        {"layer": None},
    ],
)
def test_conversions_pass_the_same_gate(tmp_path, conversion):
    spec = {**HEADER["spec"], "conversions": [conversion]}
    refusal(write(tmp_path / "model.safetensors", {**HEADER, "spec": spec}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_shape", [3, 10**10, 10**10]),
        ("input_shape", [3, 0, 32]),
        ("scale", {"mean": [0.5], "std": [0.2]}),
        ("scale", {"mean": [0.5] * 3, "std": [0.2, 0.2, 0]}),
        ("scale", {"mean": [0.5] * 3, "std": [0.2, 0.2, 1e999]}),
        ("class_names", ["a"] * 4),
    ],
)
def test_values_that_no_training_writes_are_refused(tmp_path, key, value):
    assert key in refusal(write(tmp_path / "model.safetensors", {**HEADER, key: value}))


def test_names_cannot_send_escapes_to_a_terminal(tmp_path):
    escape = "\x1b[2J"
    header = {**HEADER, "class_names": [f"a{escape}", "b", "c"]}
    assert load(write(tmp_path / "names.safetensors", header)).classes[0] == "a\ufffd[2J"
    path = write(tmp_path / "tensors.safetensors", HEADER, {f"x{escape}": torch.zeros(1)})
    assert escape not in refusal(path)
    with pytest.raises(ValueError, match="only in the file: x\ufffd") as error:
        load_weights(path, SPEC.build())
    assert escape not in str(error.value)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "arguments", "conversion"),
    [
        ("wrn10_1", {"head": "routed", "experts": 2, "patches_per_expert": 2}, None),
        ("wrn10_1", {}, {"layer": ["body.group2.0.conv2"], "experts": 2, "patch_size": "nearest-4", "pad": True}),
        ("wrn10_1", {}, {"layer": ["body.group2.0.conv2"], "experts": 2, "patch_size": "auto"}),
    ],
)
def test_what_the_command_line_can_spell_passes(name, arguments, conversion):
    conversions = () if conversion is None else (conversion,)
    check_spec(ModelSpec(name, {"num_classes": 2, **arguments}, conversions), "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "conversion"),
    [({"experts": 2}, None), ({}, {"layer": ["a"], "experts": 2, "patch_size": "nearest-x"})],
    ids=["head options without a head", "no such patch size"],
)
def test_what_no_command_spells_is_refused(arguments, conversion):
    conversions = () if conversion is None else (conversion,)
    with pytest.raises(InvalidFile):
        check_spec(ModelSpec("wrn10_1", {"num_classes": 2, **arguments}, conversions), "model.safetensors")
