"""Pretrained weights from files: what is loaded, what is refused, and what a file says about images."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moesaic.data.image_dataset import Normalize
from moesaic.models.pretrained import PretrainedConfig, file_sha256, load_pretrained, read_config
from moesaic.models.registry import ModelSpec, create_model
from moesaic.training.checkpoint import Metadata, save_network


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Weights of a network for five classes."""
    return dict(create_model("wrn10_1", num_classes=5).state_dict())


def saved(path: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, path, metadata)
    return path


def test_all_weights_are_loaded_where_all_shapes_agree(tmp_path, weights):
    path = saved(tmp_path / "w.safetensors", weights)
    found = create_model("wrn10_1", num_classes=5, weights=path).state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("absent", [False, True], ids=["of other classes", "absent"])
def test_a_classifier_that_does_not_fit_is_left_out(tmp_path, weights, absent):
    kept = {name: tensor for name, tensor in weights.items() if not (absent and name.startswith("head."))}
    path = saved(tmp_path / "w.safetensors", kept)
    found = create_model("wrn10_1", num_classes=3, weights=path).state_dict()
    assert found["head.weight"].shape[0] == 3
    assert all(torch.equal(found[name], weights[name]) for name in weights if not name.startswith("head."))


def test_half_precision_is_cast(tmp_path, weights):
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    found = create_model("wrn10_1", num_classes=5, weights=saved(tmp_path / "w.safetensors", half)).state_dict()
    assert all(found[name].dtype == weights[name].dtype for name in weights)
    assert torch.equal(found["body.stem.weight"], half["body.stem.weight"].float())


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_files_of_torch_are_read_and_a_missing_counter_is_no_fault(tmp_path, weights, wrapper):
    kept = {f"module.{name}": each for name, each in weights.items() if not name.endswith("num_batches_tracked")}
    torch.save(kept if wrapper is None else {wrapper: kept, "epoch": 3}, tmp_path / "w.pth")
    found = create_model("wrn10_1", num_classes=5, weights=tmp_path / "w.pth").state_dict()
    assert torch.equal(found["body.stem.weight"], weights["body.stem.weight"])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_of_compiled_networks_are_read(tmp_path, weights, prefix):
    path = saved(tmp_path / "w.safetensors", {f"{prefix}{name}": tensor for name, tensor in weights.items()})
    found = create_model("wrn10_1", num_classes=5, weights=path).state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_file_of_another_network_is_refused_with_the_first_names(tmp_path, weights):
    model = create_model("wrn10_1", num_classes=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stem = weights.pop("body.stem.weight")
    weights["body.norm.extra"] = stem
    reshaped = next(name for name in weights if name.endswith("conv1.weight"))
    weights[reshaped] = weights[reshaped][:1]
    path = saved(tmp_path / "w.safetensors", weights)
    message = (
        r"weights='.*w.safetensors' is of another network than this WideResNet: 1 missing in the file: "
        rf"body.stem.weight; 1 only in the file: body.norm.extra; 1 of another shape: {reshaped} \(1, .*in the network"
    )
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "nothing is loaded"
    with pytest.raises(ValueError, match=r"missing in the file: body.stem.weight, .* and \d+ more"):
        load_pretrained(model, saved(tmp_path / "other.safetensors", {"x": stem}))


class Bomb:
    def __reduce__(self):
        return (print, ("boom",))


def test_files_that_cannot_be_read_are_told_and_nothing_in_them_runs(tmp_path, capsys):
    model = create_model("wrn10_1", num_classes=5)
    (tmp_path / "code.pth").write_bytes(pickle.dumps({"x": Bomb()}, protocol=2))
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "cut.safetensors").write_bytes((1000).to_bytes(8, "little") + b'{"x":')
    for name in ("code.pth", "text.pth", "cut.safetensors"):
        with pytest.raises(ValueError, match=rf"weights='.*{name}' is neither whole safetensors nor a file that torch"):
            load_pretrained(model, tmp_path / name)
    with pytest.raises(ValueError, match="is neither whole safetensors"):
        read_config(tmp_path / "cut.safetensors")
    assert "boom" not in capsys.readouterr().out
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="has no dictionary of tensors"):
        load_pretrained(model, tmp_path / "list.pth")
    with pytest.raises(FileNotFoundError, match=r"weights='.*nowhere' is not there; name a file of weights"):
        load_pretrained(model, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_pretrained(model, tmp_path)


def test_a_file_that_changed_after_its_digest_was_recorded_is_refused(tmp_path, weights):
    path = saved(tmp_path / "w.safetensors", weights)
    spec = ModelSpec("wrn10_1", {"num_classes": 5, "weights": str(path)}).with_digest()
    assert spec.arguments["weights_sha256"] == file_sha256(path)
    assert ModelSpec.from_json(spec.to_json()).build().state_dict().keys() == weights.keys()
    weights["body.stem.weight"] = weights["body.stem.weight"] + 1
    saved(path, weights)
    with pytest.raises(ValueError, match="was recorded; the file has changed"):
        spec.build()
    path.unlink()
    assert spec.without_weights() == ModelSpec("wrn10_1", {"num_classes": 5})
    spec.without_weights().build()


def test_image_size_and_normalization_come_from_the_file(tmp_path, weights):
    path = saved(tmp_path / "w.safetensors", weights, {"mean": "0.4 0.5 0.6", "std": "[0.1, 0.2, 3e-1]"})
    assert read_config(path) == PretrainedConfig(None, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    saved(path, weights, {"input_size": "3 160 160"})
    assert read_config(path) == PretrainedConfig(160)
    torch.save(weights, tmp_path / "w.pth")
    assert read_config(tmp_path / "w.pth") == PretrainedConfig()
    assert ModelSpec("wrn10_1", {"weights": str(path)}).pretrained_config() == PretrainedConfig(160)
    assert ModelSpec("wrn10_1").pretrained_config() == PretrainedConfig()


def test_a_checkpoint_of_ours_is_a_file_of_weights(tmp_path):
    model, scale = create_model("wrn10_1", num_classes=2), Normalize((0.4,) * 3, (0.2,) * 3)
    metadata = Metadata(None, ("a", "b"), ("a", "b"), scale, (3, 48, 48), "pets", {})
    save_network(tmp_path / "model.safetensors", model, metadata)
    assert read_config(tmp_path / "model.safetensors") == PretrainedConfig(48, (0.4,) * 3, (0.2,) * 3)
    save_network(tmp_path / "model.safetensors", model, replace(metadata, normalize=None))
    assert read_config(tmp_path / "model.safetensors") == PretrainedConfig(48)
    found = create_model("wrn10_1", num_classes=7, weights=tmp_path / "model.safetensors")
    assert torch.equal(found.state_dict()["body.stem.weight"], model.state_dict()["body.stem.weight"])


def test_a_head_of_ours_is_put_on_a_pretrained_backbone_of_timm(timm, tmp_path):
    backbone = timm.create_model("test_resnet", num_classes=0)
    path = saved(tmp_path / "w.safetensors", dict(backbone.state_dict()), {"mean": "0.1 0.2 0.3", "std": "1 1 1"})
    spec = ModelSpec.parse(f"timm/test_resnet:weights={path}:head=routed:experts=4:patches_per_expert=3")
    assert spec.pretrained_config() == PretrainedConfig(160, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    model = replace(spec, arguments={"num_classes": 3, **spec.arguments}).build()
    assert len(model.head.moe.experts) == 4
    assert model.head.moe.patches_per_expert == 3
    own = model.backbone.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in backbone.state_dict().items())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = backbone.eval().forward_features(x)
        torch.testing.assert_close(model.eval()(x), model.head(features))
    assert model.get_classifier() is model.head


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_mambaout", "test_convnext"])
def test_maps_and_tokens_of_timm_reach_the_head(timm, name):
    model = create_model(f"timm/{name}", num_classes=3, head="routed", experts=2, image_size=160).eval()
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        features = model.forward_features(x)
        torch.testing.assert_close(model(x), model.forward_head(features))
    if name == "test_vit":
        assert features.shape == (2, 100, 64), "without the class token"
    else:
        assert features.shape[1] == model.backbone.num_features
    with pytest.raises(TypeError, match="head='mean' has no option 'experts'"):
        create_model(f"timm/{name}", num_classes=3, head="mean", experts=2)


def test_weights_that_cannot_be_downloaded_are_told_in_one_line(timm, monkeypatch):
    def offline(*given, pretrained=False, **options):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    message = (
        r"weights of timm's test_resnet cannot be downloaded \(no route to host\); .*weights=FILE \(--weights FILE\)"
    )
    with pytest.raises(OSError, match=message):
        create_model("timm/test_resnet", num_classes=2, pretrained=True)
    with pytest.raises(OSError, match=r"^no route"):
        create_model("timm/test_resnet", num_classes=2)


def test_a_new_classifier_on_pretrained_features_is_small(timm, tmp_path):
    backbone = timm.create_model("test_efficientnet", num_classes=0)
    path = saved(tmp_path / "w.safetensors", dict(backbone.state_dict()))
    model = create_model("timm/test_efficientnet", num_classes=2, weights=path)
    assert model.classifier.weight.abs().max() <= 256**-0.5
    assert create_model("timm/test_efficientnet", num_classes=2).classifier.weight.abs().max() > 0.5
