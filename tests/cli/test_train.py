"""`moesaic train`: what it writes, what it says, and how it fails."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from moesaic.cli import main
from moesaic.models import registry
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.registry import create_model
from moesaic.models.resnet import ResNet
from moesaic.routing import registry as of_routers
from moesaic.training import trainer
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.recipe import OPTIMIZER_DEFAULTS

SMALL = [
    "--model",
    "wrn10_1_pmoe",
    "--img-size",
    "16",
    "--epochs",
    "2",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--cache-dir",
    "c",
]


def train(*given: str) -> int:
    return main(["train", *given])


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures of two kinds, one of them with a name that is markup elsewhere."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for kind, colour in (("cat", 0), ("[bold]dog", 2)):
        folder = tmp_path / "pets" / kind
        folder.mkdir(parents=True)
        for number in range(15):
            pixels = torch.randint(0, 120, (20, 20, 3), generator=generator, dtype=torch.uint8)
            pixels[4:12, 4:12, colour] += 120
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return tmp_path / "pets"


def test_it_trains_and_says_how_well_for_what_price_and_what_to_do_next(pets, capsys):
    assert train("pets", *SMALL, "--augment", "flip") == 0
    said, logged = capsys.readouterr()
    assert "to follow the training in a browser: moesaic view runs/train-pets-wrn10_1_pmoe" in logged
    out = Path("runs/train-pets-wrn10_1_pmoe")
    assert f"Network: {out / 'model.safetensors'}" in said
    assert "wrn10_1_pmoe on pets: 24 training images, 2 epochs in" in said
    result = json.loads((out / "result.json").read_text())
    assert f"Test accuracy: {result['accuracy']:.1f} % of 6 images" in said
    assert "always predicting the most frequent class would reach 50.0 %" in said
    assert re.search(rf"^cat +3 +{result['class_accuracy'][1]:.1f} %$", said, re.MULTILINE)
    assert re.search(rf"^\[bold\]dog +3 +{result['class_accuracy'][0]:.1f} %$", said, re.MULTILINE)
    assert re.search(r"^[\d,]+ parameters, [\d.]+ % of them in routed layers$", said, re.MULTILINE)
    assert re.search(r"^[\d.]+ M multiply-adds per image, [\d.]+ % of them in routed layers: ", said, re.MULTILINE)
    assert f"moesaic explain {out} IMAGE…" in said
    assert f"moesaic export {out} --format onnx" in said
    assert f"\nPage: {out / 'report.html'}\nNext:\n" in said
    advice = "moesaic train pets --model timm/mobilenetv2_100 --pretrained  # few images"
    assert (advice in said) == (result["accuracy"] < 90)
    assert advice not in said or said.index(advice) < said.index("moesaic predict")
    assert ("no better than always predicting one class" in said) == (result["accuracy"] <= 50)
    page = (out / "report.html").read_text("utf-8")
    assert f"{result['accuracy']:.1f}\u00a0% test accuracy" in page
    assert "body.group3.0.moe" in page
    wrong = json.loads((out / "result.json").read_text())["accuracy"] < 100
    assert wrong == ("Worst mistakes" in page and '<li class="card">' in page)
    found = load_checkpoint(out)
    assert found.class_names == ("[bold]dog", "cat")
    assert found.spec.arguments == {"num_classes": 2, "in_channels": 3, "image_size": 16}
    assert found.input_shape == (3, 16, 16)
    assert found.normalize is not None


def test_inside_the_folder_of_images_its_own_output_is_no_class(pets, capsys, monkeypatch):
    monkeypatch.chdir(pets)
    assert train(".", *SMALL) == 0
    first = capsys.readouterr().out
    assert main(["explain", "runs/train-pets-wrn10_1_pmoe", "cat", "--out", "shown", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert train(".", *SMALL) == 0, "the command that is printed to continue"
    said = capsys.readouterr()
    assert first.partition("Test accuracy")[2] == said.out.partition("Test accuracy")[2]
    assert "runs/train-pets-wrn10_1_pmoe is complete, and nothing was trained; to train again, remove it" in said.err
    assert "to follow" not in said.err
    assert "runs/train-pets-wrn10_1_pmoe was written by moesaic; it is ignored" in said.err
    assert "shown was written by moesaic; it is ignored" in said.err
    assert load_checkpoint("runs/train-pets-wrn10_1_pmoe").class_names == ("[bold]dog", "cat")


def test_the_network_predicts_other_images(pets, capsys):
    assert train("pets", *SMALL, "--out", "out") == 0
    assert "  moesaic predict out IMAGE…" in capsys.readouterr().out
    assert main(["predict", "out", "pets/cat", "--csv", "cats.csv"]) == 0
    assert len(Path("cats.csv").read_text().splitlines()) == 16


def test_a_dense_network_has_nothing_to_explain(pets, capsys):
    assert train("pets", *SMALL, "--model", "wrn10_1", "--epochs", "1", "--out", "a place") == 0
    said = capsys.readouterr().out
    assert "mixture" not in said
    assert "explain" not in said
    assert "moesaic export 'a place' --format onnx" in said


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> str:
    """A small network with channel gates, under the name of a large one."""

    def small(num_classes: int, *, image_size: int = 32, in_channels: int = 3) -> nn.Module:
        sizes = {"image_size": image_size, "in_channels": in_channels}
        return deepmoe(ResNet(18, num_classes, width=0.1, **sizes), num_classes=num_classes, **sizes)

    monkeypatch.setitem(registry._NETWORKS, "resnet18_deepmoe", small)
    return "resnet18_deepmoe"


def test_a_cost_that_is_asked_for_is_met_and_told(pets, channels, capsys):
    options = ["--model", channels, "--target-macs", "0.6", "--gate-l1", "0.2", "--joint-fraction", "0.5"]
    assert train("pets", *SMALL, *options, "--out", "out") == 0
    said = capsys.readouterr().out
    cost = json.loads(Path("out/result.json").read_text())["cost"]
    assert cost == pytest.approx(0.6, rel=0.1), "of six images"
    assert re.search(
        rf"[\d,]+ parameters; [\d.]+ . multiply-adds for a test image on average, {100 * cost:.1f} % of", said
    )
    gates = json.loads(Path("out/config.json").read_text())["recipe"]["gates"]
    assert (gates["target_macs"], gates["l1_weight"], gates["joint_fraction"]) == (0.6, 0.2, 0.5)


def test_gates_are_trained_by_default_where_there_are_any(pets, channels):
    assert train("pets", *SMALL, "--model", channels, "--epochs", "1", "--out", "out") == 0
    assert json.loads(Path("out/config.json").read_text())["recipe"]["gates"]["target_macs"] is None


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["--target-macs", "0.001"], r"--target-macs=0.001 is less than .*; use 0\.\d+ or more"),
        (["--target-macs", "2"], "target_macs=2.0; it must be a fraction of the dense network's multiply-adds"),
        (["--joint-fraction", "0"], "joint_fraction=0.0; it must be above 0"),
        (
            ["--model", "wrn10_1", "--gate-l1", "1"],
            "--gate-l1 is for networks with channel gates, and wrn10_1 has none; leave it out, or use --model "
            "vgg16_deepmoe",
        ),
        (["--model", "resnet18", "--target-macs", "0.5"], "or use --model resnet18_deepmoe"),
    ],
)
def test_gates_that_cannot_be_trained_so_are_told_in_one_line(pets, channels, given, fault, capsys):
    assert train("pets", *SMALL, "--model", channels, *given) == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith("moesaic train: ")
    assert re.search(fault, output)


def test_options_reach_the_recipe_the_network_and_the_data(pets):
    options = ["--samples", "10", "--seed", "3", "--optimizer", "adamw", "--lr", "0.01", "--ema-decay", "0.9"]
    network = ["--experts", "8", "--patches-per-expert", "1", "--fidelity", "released"]
    assert train("pets", *SMALL, *options, *network, "--clip-grad", "1", "--stop-at-zero-error", "--out", "out") == 0
    config = json.loads(Path("out/config.json").read_text())
    assert config["seed"] == 3
    assert config["data"]["train"] == 10
    assert {
        name: config["recipe"][name] for name in ("optimizer", "lr", "ema_decay", "clip_grad", "stop_at_zero_error")
    } == {"optimizer": "adamw", "lr": 0.01, "ema_decay": 0.9, "clip_grad": 1.0, "stop_at_zero_error": True}
    assert config["model"]["arguments"] == {
        "num_classes": 2,
        "in_channels": 3,
        "image_size": 16,
        "fidelity": "released",
        "experts": 8,
        "patches_per_expert": 1,
    }


def test_an_optimizer_brings_its_rates(pets):
    for optimizer in ("adamw", "sgd"):
        assert train("pets", *SMALL, "--epochs", "1", "--optimizer", optimizer, "--out", optimizer) == 0
        recipe = json.loads(Path(optimizer, "config.json").read_text())["recipe"]
        usual = OPTIMIZER_DEFAULTS[optimizer]
        assert (recipe["lr"], recipe["weight_decay"]) == (usual.lr, usual.weight_decay)


def test_few_images_to_train_on_are_not_held_up_by_many_to_test_on(pets):
    for parts in pets.iterdir():
        for part, first in (("train", 0), ("test", 3)):
            (pets.parent / "split" / part / parts.name).mkdir(parents=True)
            for number in range(first, 3 if part == "train" else 15):
                (parts / f"{number}.png").rename(pets.parent / "split" / part / parts.name / f"{number}.png")
    assert train("split", *SMALL, "--epochs", "7", "--out", "out") == 0  # 6 images to train on, 24 to test on
    epochs = json.loads(Path("out/result.json").read_text())["epochs"]
    assert [epoch["number"] for epoch in epochs if epoch["test_accuracy"] is not None] == [6, 7]
    assert train("split", *SMALL, "--epochs", "2", "--eval-every", "1", "--out", "often") == 0
    epochs = json.loads(Path("often/result.json").read_text())["epochs"]
    assert all(epoch["test_accuracy"] is not None for epoch in epochs)


def test_a_convolution_of_any_network_becomes_a_mixture(pets, capsys):
    modules = create_model("wrn10_1", num_classes=2).named_modules()
    plain = [name for name, module in modules if isinstance(module, nn.Conv2d) and module.stride == (1, 1)]
    layer = next(name for name in reversed(plain) if "group3" in name)
    convert = ["--model", "wrn10_1", "--convert", layer, "--experts", "4"]
    assert train("pets", *SMALL, "--epochs", "1", *convert, "--out", "out") == 0
    said = capsys.readouterr().out
    assert "% of them in routed layers" in said
    assert ", 1 epoch in " in said
    spelled = ["--model", f"wrn10_1:convert={layer}:experts=4"]
    assert train("pets", *SMALL, "--epochs", "1", *spelled, "--out", "spelled") == 0
    assert Path("out/model.safetensors").read_bytes() == Path("spelled/model.safetensors").read_bytes()
    assert load_checkpoint("out").spec.conversions[0]["layer"] == [layer]


def test_a_router_is_named_for_a_network_and_for_a_conversion(pets):
    assert train("pets", *SMALL, "--epochs", "1", "--router", "soft", "--out", "soft") == 0
    assert load_checkpoint("soft").spec.arguments["router"] == "soft"
    convert = ["--model", "wrn10_1", "--convert", "body.group3.0.conv2", "--experts", "4", "--router", "token-choice"]
    assert train("pets", *SMALL, "--epochs", "1", *convert, "--out", "converted") == 0
    assert load_checkpoint("converted").spec.conversions[0]["router"] == "token-choice"


def test_a_router_of_ones_own_is_imported_where_it_is_named_and_nowhere_else(pets, capsys, monkeypatch):
    monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))
    Path("my_router.py").write_text("from moesaic.routing import TokenChoice\n\nclass Mine(TokenChoice): ...\n")
    name = "my_router:Mine"
    try:
        assert train("pets", *SMALL, "--epochs", "1", "--router", name, "--out", "out") == 0
        monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))
        sys.modules.pop("my_router")
        for command in (["explain", "out", "pets/cat/0.png"], ["export", "out", "--format", "safetensors"]):
            capsys.readouterr()
            assert main(command) == 2
            assert "give a command --router my_router:Mine" in capsys.readouterr().err
            assert "my_router" not in sys.modules
        assert main(["explain", "out", "pets/cat/0.png", "--router", name]) == 0
        assert main(["export", "out", "--format", "safetensors", "--router", name]) == 0
    finally:
        sys.modules.pop("my_router", None)


def test_an_interrupted_run_says_how_to_go_on_and_does(pets, capsys, monkeypatch):
    steps = trainer.Trainer._test
    calls = 0

    def interrupt(self):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return steps(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_test", interrupt)
        assert train("pets", *SMALL, "--out", "a place") == 130
    output = capsys.readouterr().err
    assert "Interrupted. The last checkpoint is in a place" in output
    assert re.search(r"train pets .*--out 'a place'$", output, re.MULTILINE)
    assert "stopped after epoch 1 of 2" in Path("a place/report.html").read_text("utf-8")
    assert train("pets", *SMALL, "--out", "a place") == 0
    assert "continuing after epoch 1 of 2" in capsys.readouterr().err
    assert ">complete<" in Path("a place/report.html").read_text("utf-8")
    assert train("pets", *SMALL, "--out", "whole") == 0
    assert Path("a place/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("ends", "code", "output"),
    [
        (KeyboardInterrupt(), 130, "Interrupted before the first checkpoint. To begin again:"),
        (
            torch.OutOfMemoryError("tried to allocate"),
            2,
            "the memory is too small: tried to allocate; use a smaller --batc",
        ),
    ],
    ids=["interrupted", "no memory"],
)
def test_a_run_that_ends_before_its_first_checkpoint_promises_none(pets, ends, code, output, capsys, monkeypatch):
    def end(self):
        raise ends

    monkeypatch.setattr(trainer.Trainer, "_run_steps", end)
    assert train("pets", *SMALL) == code
    assert output in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["nowhere"], "there is no folder or zip file 'nowhere'; check the path, or name one of the datasets 'mnist'"),
        (
            ["pets", "--model", "wrn10_1_pmo"],
            "moesaic train: --model='wrn10_1_pmo' is unknown; did you mean 'wrn10_1_pmoe'",
        ),
        (["pets", "--samples", "1000"], " --samples=1000, but there are 24 training images in pets"),
        (["pets", "--epochs", "0"], " --epochs=0; it must be at least 1"),
        (["pets", "--img-size", "0"], " --img-size=0; it must be at least 1"),
        (["pets", "--experts", "-2"], "moesaic train: --experts=-2; it must be at least 1"),
        (["pets", "--optimizer", "adam"], "did you mean 'adamw'"),
        (["pets", "--eval-every", "0"], " --eval-every=0; it must be at least 1"),
        (["pets", "--seed", "-1"], "--seed=-1; it must be from 0"),
        (["pets", "--device", "tpu"], "--device='tpu' is unknown"),
        (["pets", "--model", "wrn10_1", "--experts", "4"], "wrn10_1 has no option 'experts'"),
        (["pets", "--model", "wrn10_1", "--capacity", "2"], "--capacity 2.0 is for layers that --convert names"),
        (["pets", "--model", "wrn10_1:convert=stem"], "convert=stem without experts="),
        (["pets", "--augment", "flop"], "augment='flop' is unknown"),
        (["pets", "--router", "sofd"], "router='sofd' is unknown .did you mean 'soft'"),
        (["pets", "--router", "no_module:Mine"], "'no_module' cannot be imported"),
        (["pets", "--model", "wrn10_1", "--router", "soft"], "wrn10_1 has no option 'router'"),
        (["pets", "--track", "mlflow"], "--track: .*'mlflow' is unknown"),
        (["pets", "--out", "pets/cat/0.png"], "0.png is a file"),
    ],
)
def test_bad_input_is_told_in_one_line(pets, given, fault, capsys):
    assert train(given[0], *SMALL, *given[1:]) == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith("moesaic train: ")
    assert re.search(fault, output)


@pytest.mark.parametrize(
    ("given", "package", "extra"),
    [(["pets", "--model", "timm/resnet18"], "timm", "moesaic[timm]"), (["hub:a/b"], "datasets", "moesaic[hub]")],
)
def test_a_package_that_is_missing_is_told_in_one_line(pets, given, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert train(given[0], *SMALL, *given[1:]) == 2
    assert f"pip install '{extra}'" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_of_another_run_is_told_in_one_line(pets, capsys):
    assert train("pets", *SMALL, "--epochs", "1", "--out", "out") == 0
    assert train("pets", *SMALL, "--out", "out") == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith("moesaic train: out holds a run with other settings: recipe.epochs was 1, is 2")


def test_a_tracker_that_is_not_there_is_told_before_images_are_decoded(pets, capsys, monkeypatch):
    for name, fault in (("mlflow", "'mlflow' is unknown"), ("wandb", "needs a package that cannot be imported")):
        monkeypatch.setitem(sys.modules, name, None)
        assert train("pets", *SMALL, "--track", name) == 2
        assert fault in capsys.readouterr().err
    assert not Path("c").exists()
    assert not Path("runs").exists()


def test_a_run_that_diverges_is_told_in_one_line(pets, capsys):
    assert train("pets", *SMALL, "--lr", "1e30", "--schedule", "constant") == 2
    assert "moesaic train: the loss or a weight is not a number" in capsys.readouterr().err.splitlines()[-1]


def test_a_page_that_cannot_be_written_does_not_spoil_the_run(pets, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("moesaic.report.write_training_page", full)
    assert train("pets", *SMALL, "--model", "wrn10_1") == 0
    said = capsys.readouterr()
    assert "the page about the run could not be written: no space" in said.err
    assert "Test accuracy" in said.out
    assert "Page:" not in said.out


def test_many_classes_are_shown_by_the_worst(pets, capsys):
    for kind in range(21):
        (pets / f"kind {kind}").mkdir()
        for number in range(5):
            Image.new("RGB", (16, 16), (10 * kind, 50 * number, 0)).save(pets / f"kind {kind}" / f"{number}.png")
    assert train("pets", *SMALL, "--epochs", "1") == 0
    said = capsys.readouterr().out
    assert "The worst 10 of 23 classes:" in said
    assert len(re.findall(r"^(?:kind \d+|cat|\[bold\]dog) +\d+ +[\d.]+ %$", said, re.MULTILINE)) == 10
