"""Pretrained networks in `moesaic train` and `compare`, from a file of weights to explain and export."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from moesaic.cli import main
from moesaic.data.image_dataset import Normalize
from moesaic.models.pretrained import file_sha256
from moesaic.models.registry import create_model
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.comparison_result import read_comparison
from moesaic.training.head_recipe import HEAD_LRS

SHORT = ["--epochs", "2", "--batch-size", "8", "--device", "cpu", "--cache-dir", "cache"]
NETWORK = ["--model", "timm/test_resnet", "--weights", "weights.safetensors"]
SCALE = Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timm) -> None:
    """Pictures of two kinds, and a file of weights in half precision without classifier."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for kind, colour in (("cat", 0), ("dog", 2)):
        Path("pets", kind).mkdir(parents=True)
        for number in range(10):
            pixels = torch.randint(0, 120, (40, 40, 3), generator=generator, dtype=torch.uint8)
            pixels[8:24, 8:24, colour] += 120
            Image.fromarray(pixels.numpy()).save(f"pets/{kind}/{number}.png")
    backbone = timm.create_model("test_resnet", num_classes=0).half().state_dict()
    metadata = {"mean": " ".join(map(str, SCALE.mean)), "std": " ".join(map(str, SCALE.std))}
    save_file({name: tensor.contiguous() for name, tensor in backbone.items()}, "weights.safetensors", metadata)


def test_the_head_learns_from_features_by_default(pets, capsys):
    assert main(["train", "pets", *NETWORK, *SHORT, "--out", "out"]) == 0
    assert "timm/test_resnet on pets: 16 training images, " in capsys.readouterr().out
    config = json.loads(Path("out/config.json").read_text())
    assert config["recipe"]["trainable"] == "head"
    assert config["recipe"]["lr"] == HEAD_LRS["mean"]
    assert config["data"]["shape"] == [3, 160, 160], "the network's size"
    assert len(list(Path("cache").glob("features-*.npy"))) == 2
    digest = file_sha256("weights.safetensors")
    Path("weights.safetensors").unlink()
    found = load_checkpoint("out")  # without the file
    assert found.spec.arguments["weights"] == "weights.safetensors"
    assert found.spec.arguments["weights_sha256"] == digest
    assert found.input_shape == (3, 160, 160)
    assert found.normalize == SCALE
    assert found.model(torch.zeros(1, 3, 160, 160)).shape == (1, 2)


def test_frozen_weights_are_those_of_the_file_and_a_routed_head_is_explained_and_exported(pets, capsys):
    assert main(["train", "pets", *NETWORK, *SHORT, "--head", "routed", "--experts", "4", "--out", "out"]) == 0
    assert "moesaic explain out IMAGE…" in capsys.readouterr().out
    model = load_checkpoint("out").model
    spelled = "timm/test_resnet:weights=weights.safetensors:head=routed:experts=4"
    assert main(["train", "pets", "--model", spelled, *SHORT, "--out", "spelled"]) == 0
    assert Path("out/model.safetensors").read_bytes() == Path("spelled/model.safetensors").read_bytes()
    own = create_model("timm/test_resnet", num_classes=2, head="routed", weights="weights.safetensors").backbone
    for (name, first), second in zip(own.state_dict().items(), model.backbone.state_dict().values(), strict=True):
        assert torch.equal(first, second), name
    assert main(["explain", "out", "pets/cat/0.png", "--data", "pets", "--cache-dir", "cache", "--device", "cpu"]) == 0
    explained = json.loads(Path("out/explanation/explanation.json").read_text())
    assert "head.moe" in json.dumps(explained)
    assert main(["export", "out", "--format", "pt2"]) == 0


def test_all_layers_are_fine_tuned_on_request_with_the_size_that_is_asked_for(pets):
    given = ["--trainable", "all", "--layer-decay", "0.75", "--img-size", "64"]
    assert main(["train", "pets", *NETWORK, *SHORT, *given, "--out", "out"]) == 0
    config = json.loads(Path("out/config.json").read_text())
    assert "trainable" not in config["recipe"], "all, as ever"
    assert config["recipe"]["layer_decay"] == 0.75
    assert config["recipe"]["lr"] == pytest.approx(1e-4), "a tenth"
    assert load_checkpoint("out").input_shape == (3, 64, 64)
    assert not list(Path("cache").glob("features-*"))


def test_a_converted_network_is_trained_as_a_whole(pets):
    layer = "layer4.0.conv2"
    given = ["--convert", layer, "--experts", "4", "--img-size", "64", "--epochs", "1"]
    assert main(["train", "pets", *NETWORK, *SHORT, *given, "--out", "out"]) == 0
    assert "trainable" not in json.loads(Path("out/config.json").read_text())["recipe"]


def test_mlps_of_a_transformer_are_converted_trained_loaded_and_exported(pets, capsys):
    small = [*SHORT, "--img-size", "32", "--epochs", "1"]
    token_choice = ["--convert", "blocks.[45].mlp", "--router", "token-choice", "--top-k", "2", "--init", "upcycle"]
    assert main(["train", "pets", "--model", "timm/test_vit", *token_choice, *small, "--out", "flags"]) == 0
    receipt = [line.split() for line in capsys.readouterr().err.splitlines() if line.startswith(("blocks", "all "))]
    assert [row[0] for row in receipt] == ["blocks.4.mlp", "blocks.5.mlp", "all"]
    assert all(float(row[-1]) < 1e-5 for row in receipt)
    network = load_checkpoint("flags")
    assert len(network.model.blocks[5].mlp.experts) == 8
    assert network.model.patch_embed.img_size == (32, 32)
    spelled = "timm/test_vit:convert=last-1:experts=4:capacity=1:init=split"
    assert main(["train", "pets", "--model", spelled, *small, "--out", "spelled"]) == 0
    layer = load_checkpoint("spelled").model.blocks[5].mlp
    assert (len(layer.experts), layer.capacity, layer.experts.hidden_channels) == (4, 1, 48)
    assert main(["predict", "spelled", "pets/cat/0.png", "--device", "cpu"]) == 0
    assert main(["export", "spelled", "--format", "pt2"]) == 0


def test_a_learning_rate_that_is_given_is_that_of_any_head(pets):
    head = ["--head", "routed", "--lr", "0.02"]
    assert main(["train", "pets", *NETWORK, *SHORT, *head, "--out", "out"]) == 0
    assert json.loads(Path("out/config.json").read_text())["recipe"]["lr"] == 0.02


def test_augmented_images_run_through_the_frozen_backbone(pets, capsys):
    given = ["--augment", "flip", "--img-size", "32"]
    assert main(["train", "pets", *NETWORK, *SHORT, *given, "--out", "out"]) == 0
    assert "the frozen backbone runs in every step: the images are augmented" in capsys.readouterr().err
    assert load_checkpoint("out").normalize == SCALE


def test_a_moved_file_resumes_and_a_changed_one_does_not(pets, capsys):
    assert main(["train", "pets", *NETWORK, *SHORT, "--img-size", "32", "--out", "out"]) == 0
    Path("weights.safetensors").rename("moved.safetensors")
    moved = ["--model", "timm/test_resnet", "--weights", "moved.safetensors"]
    assert main(["train", "pets", *moved, *SHORT, "--img-size", "32", "--out", "out"]) == 0
    save_file({"x": torch.zeros(1)}, "moved.safetensors")
    capsys.readouterr()
    assert main(["train", "pets", *moved, *SHORT, "--img-size", "32", "--out", "out"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search("weights='moved.safetensors' is of another network than this ResNet: .*missing in the file", last)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["--weights", "nowhere"], "--weights='nowhere' is not there; name a file of weights"),
        (["--model", "wrn10_1", "--pretrained"], "wrn10_1 is not timm's; use --weights FILE"),
        (["--trainable", "none"], "--trainable='none' is unknown; use 'all', 'head' or 'last-N'"),
        (["--trainable", "last-99"], "--trainable='last-99', but ResNet has 7 layers before its classifier"),
        (["--head", "routd"], "--head='routd' is unknown; .*did you mean 'routed'"),
        (["--layer-decay", "2"], "--layer-decay=2.0; it must be above 0 and at most 1"),
    ],
)
def test_bad_input_is_told_in_one_line(pets, given, fault, capsys):
    assert main(["train", "pets", *NETWORK, *SHORT, "--img-size", "32", *given]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("moesaic train: ")
    assert re.search(fault, last)


def test_weights_that_cannot_be_downloaded_are_told_in_one_line(pets, timm, capsys, monkeypatch):
    def offline(*given, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", offline)
    assert main(["train", "pets", "--model", "timm/test_resnet", "--pretrained", *SHORT]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"cannot be downloaded \(no route to host\); give a file that you have with .*--weights FILE", last
    )


def test_heads_on_one_backbone_are_compared_by_their_features(pets, monkeypatch):
    recipes: list[tuple[str, float]] = []
    comparing = import_module("moesaic.training.comparison_runs")
    fit = comparing.fit

    def noted(model, dataset, recipe, **more):
        assert dataset.train.features is not None
        recipes.append((recipe.trainable, recipe.lr))
        return fit(model, dataset, recipe, **more)

    monkeypatch.setattr(comparing, "fit", noted)
    stem = "timm/test_resnet:weights=weights.safetensors:head="
    models = ["--models", f"{stem}mean,{stem}routed:experts=2"]
    grid = ["--samples", "4,8", "--trials", "2", "--out", "out"]
    assert main(["compare", "pets", *models, *grid, *SHORT]) == 0
    assert len(recipes) == 8
    assert set(recipes) == {("head", HEAD_LRS["mean"]), ("head", HEAD_LRS["routed"])}
    assert len(list(Path("cache").glob("features-*.npy"))) == 2, "one backbone, two splits"
    assert len(read_comparison(Path("out/result.json")).runs) == 8
    networks = [load_checkpoint(folder) for folder in Path("out/networks").iterdir()]
    assert {each.normalize for each in networks} == {SCALE}
    assert {each.input_shape for each in networks} == {(3, 160, 160)}
    Path("weights.safetensors").rename("moved.safetensors")
    moved = [each.replace("weights.safetensors", str(Path.cwd() / "moved.safetensors")) for each in models]
    assert main(["compare", "pets", *moved, *grid, *SHORT]) == 0
    assert len(recipes) == 8, "the file is known by its digest"
    names = [model.name for model in read_comparison(Path("out/result.json")).models]
    assert names == ["head=mean", "head=routed:experts=2"], "without what they have in common"


def test_a_network_is_compared_with_itself_converted(pets, monkeypatch):
    stem = "timm/test_resnet:weights=weights.safetensors"
    models = ["--models", f"{stem},{stem}:convert=layer4.0.conv2:experts=4:init=upcycle"]
    grid = ["--samples", "4", "--trials", "2", "--img-size", "64", "--out", "out", "--epochs", "1"]
    assert main(["compare", "pets", *models, *SHORT, *grid]) == 0
    recipe = read_comparison(Path("out/result.json")).recipe
    assert "trainable" not in recipe, "all, for both"
    assert recipe["lr"] == pytest.approx(1e-4)


def test_networks_of_two_sizes_need_one_that_is_asked_for(pets, capsys):
    models = "timm/test_resnet:weights=weights.safetensors,timm/resnet18:pretrained"
    assert main(["compare", "pets", "--models", models, *SHORT]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"pretrained on images of 160 pixels \(.*\) and 224 pixels \(.*choose one size with --img-size", last
    )


def test_layers_that_a_compared_network_does_not_have_are_told(pets, capsys):
    models = "wrn10_1,timm/test_resnet:weights=weights.safetensors"
    given = ["--models", models, "--samples", "4", "--img-size", "32", "--trainable", "last-99"]
    assert main(["compare", "pets", *given, *SHORT]) == 2
    assert "--trainable='last-99', but ResNet has 7 layers" in capsys.readouterr().err.splitlines()[-1]


def test_one_pretrained_network_is_compared_with_other_heads(pets, capsys):
    assert main(["train", "pets", *NETWORK, *SHORT, "--out", "trained"]) == 0
    features = {path.name: path.stat().st_mtime_ns for path in Path("cache").glob("features-*")}
    capsys.readouterr()
    given = ["--models", "timm/test_resnet:weights=weights.safetensors", "--samples", "4,8", "--trials", "2"]
    assert main(["compare", "pets", *given, *SHORT, "--out", "out", "--dry-run"]) == 0
    assert "features" not in capsys.readouterr().out, "cached by train"
    assert main(["compare", "pets", *given, *SHORT, "--out", "out"]) == 0
    found = read_comparison(Path("out/result.json"))
    assert [model.name for model in found.models] == ["head=mean", "head=routed"]
    assert found.models[1].spelling == "timm/test_resnet:weights=weights.safetensors:head=routed"
    now = {path.name: path.stat().st_mtime_ns for path in Path("cache").glob("features-*")}
    assert now == features, "used as they are"
    assert len(list(Path("out/networks").iterdir())) == 2, "of the first trial with the most samples"


def test_features_that_are_not_cached_are_part_of_the_plan(pets, capsys):
    given = ["--models", "timm/test_resnet:weights=weights.safetensors", "--samples", "4,8", "--trials", "2"]
    assert main(["compare", "pets", *given, *SHORT, "--out", "out", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("features of the images: ") == 1
    assert not list(Path("cache").glob("features-*")), "nothing is computed for all images"
