"""`moesaic explain`: what it writes, what it says, and how it fails."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from moesaic.cli import explain
from moesaic.cli.explain import Explain
from moesaic.cli.shared import CommandError
from moesaic.data.image_dataset import Normalize
from moesaic.data.load import load_images
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import Metadata, save_network

CLASSES = ("cat", "dog")


def save(folder: Path, name: str = "wrn10_1_pmoe", scale: Normalize | None = Normalize((0.5,) * 3, (0.2,) * 3)) -> Path:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    spec = ModelSpec(name, {"num_classes": 2} | ({"image_size": 16} if name.endswith("pmoe") else {}))
    save_network(
        folder / "model.safetensors", spec.build(), Metadata(spec, CLASSES, CLASSES, scale, (3, 16, 16), "pets", {})
    )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("runs") / "pets")


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, one folder for each class, and a file that is not an image."""
    folder = tmp_path_factory.mktemp("images")
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for i in range(15):
            Image.new("RGB", (20, 16), (200 * label, 10 * i, 90)).save(folder / name / f"{i:02}.png")
    (folder / "dog" / "notes.txt").write_text("no image")
    return folder


def read(folder: Path) -> dict:
    return json.loads((folder / "explanation.json").read_text("utf-8"))


def test_images_are_explained_beside_their_run(run: Path, pets: Path, capsys: pytest.CaptureFixture[str]):
    given = ["explain", str(run), str(pets), "--max-images", "2"]
    assert Explain(run, (pets,), max_images=2, top_patches=2).run(given) == 0
    printed = capsys.readouterr()
    page = run / "explanation" / "explanation.html"
    assert f"Page: {page}" in printed.out
    assert "notes.txt is not an image" in printed.err
    record = read(run / "explanation")
    assert record["about"]["data"] == "30 of 31 input images"
    assert record["about"]["command"] == f"moesaic explain {run} {pets} --max-images 2"
    assert record["explanation"]["by"] == "label"
    assert record["explanation"]["class_images"] == [15, 15]
    assert {each["label"] for each in record["shown"]} == set(CLASSES), "one of each class"
    assert record["about"]["skipped"][0][1] == "is not an image, or its format is unknown"
    assert page.read_text("utf-8").rstrip().endswith("</html>")


def test_data_gives_the_statistics_and_images_are_shown(run: Path, pets: Path, tmp_path: Path):
    image = pets / "cat" / "03.png"
    command = Explain(run, (image,), data=str(pets), cache_dir=tmp_path / "cache", out=tmp_path / "out", top_patches=2)
    assert command.run([]) == 0
    record = read(tmp_path / "out")
    assert record["about"]["data"] == f"the 6 test images of {pets.name}"  # a fifth of each class
    names = [each["name"] for each in record["shown"]]
    assert names[0] == str(image), "those of the user come first"
    assert len(names) == 7
    assert {name.split("/")[0] for name in names[1:]} == set(CLASSES), "the others by the names of their files"
    note = (tmp_path / "out" / "explanation.html").read_text("utf-8")
    assert "These are all test images of the data." in note
    assert "with --data" not in note


@pytest.mark.parametrize("seed", [0, 1])
def test_images_that_the_network_may_have_been_trained_on_are_not_taken_for_test_images(
    seed: int, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cache = tmp_path / "cache"
    dataset = load_images(str(pets), size=16, cache_dir=cache)
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16})
    save_network(tmp_path / "model.safetensors", spec.build(), Metadata.of(dataset, spec, {}))
    command = Explain(tmp_path, data=str(pets), cache_dir=cache, top_patches=1, max_images=1, seed=seed)
    assert command.run([]) == 0
    about = f"the 6 test images of {pets.name}{' (not those of the training run)' if seed else ''}"
    assert read(tmp_path / "explanation")["about"]["data"] == about
    assert ("some of these images were training images" in capsys.readouterr().err) is bool(seed)


def test_data_alone_shows_some_of_its_images(run: Path, pets: Path, tmp_path: Path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    command = Explain(run, data=str(pets), cache_dir=cache, out=out, samples=4, max_images=2, top_patches=1)
    assert command.run([]) == 0
    record = read(out)
    assert record["about"]["data"] == f"4 of the 6 test images of {pets.name}"
    assert [each["label"] for each in record["shown"]] in (["cat", "dog"], ["dog", "cat"])


def test_of_a_network_with_gated_channels_the_gates_are_shown(
    pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    spec = ModelSpec("vgg16_deepmoe", {"num_classes": 2, "image_size": 32, "width": 0.05})
    torch.manual_seed(0)
    model = spec.build()
    for gate in model.gates.values():
        torch.nn.init.normal_(gate.bias, std=0.3)
    scale = Normalize((0.5,) * 3, (0.2,) * 3)
    save_network(
        tmp_path / "model.safetensors", model, Metadata(spec, CLASSES, CLASSES, scale, (3, 32, 32), "pets", {})
    )
    assert Explain(tmp_path, (pets,), max_images=2).run([]) == 0
    printed = capsys.readouterr().out
    record = read(tmp_path / "explanation")
    channels = record["explanation"]["channels"]
    usage = [layer["usage"] for layer in channels["layers"]]
    opened = 100 * sum(each["gates"] * each["open_share"] for each in usage) / sum(each["gates"] for each in usage)
    shown = re.search(r"gates in 13 layers: \d+ dynamic, \d+ always on, \d+ dead; ([\d.]+) % open per image", printed)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(opened, abs=0.06)
    over = channels["costs"]["all"]
    span = "" if over["least"] == over["most"] else f", from {over['least']:.1f} to {over['most']:.1f} %"
    assert f"an image costs {over['mean']:.1f} % of the dense network's multiply-adds{span}\n" in printed
    assert len(record["explanation"]["channels"]["costs"]["cost"]) == 30
    assert len(record["gates"]["shown"]) == 2
    assert record["explanation"]["layers"] == []


def block(page: Path) -> dict:
    (found,) = re.findall(r'id="explorer-data">(.*?)</script>', page.read_text("utf-8"))
    return json.loads(found)


def test_snapshots_of_a_run_make_a_slider(pets: Path, tmp_path: Path):
    run = save(tmp_path / "run")
    for epoch in (10, 2):
        (run / "snapshots").mkdir(exist_ok=True)
        torch.manual_seed(epoch)
        spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16})
        metadata = Metadata(
            spec, CLASSES, CLASSES, Normalize((0.5,) * 3, (0.2,) * 3), (3, 16, 16), "", {"epochs": epoch}
        )
        save_network(run / "snapshots" / f"epoch-{epoch:04}.safetensors", spec.build(), metadata)
    assert Explain(run, (pets / "cat",), top_patches=1, max_images=3).run([]) == 0
    data = block(run / "explanation" / "explanation.html")
    names = [each["name"] for each in data["checkpoints"]]
    assert [name.split("/")[-1] for name in names] == ["epoch-0002", "epoch-0010", "model"]
    assert len(data["images"]["name"]) == 3
    probabilities = [[top[0][1] for top in each["top"]] for each in data["checkpoints"]]
    assert probabilities[0] != probabilities[1] != probabilities[2]
    other = save(tmp_path / "other", "wrn10_2_pmoe")
    refused("has another spec than", Explain(run, (pets / "cat",), checkpoints=(other / "model.safetensors",)))
    refused("has no checkpoint; name a safetensors file", Explain(run, (pets / "cat",), checkpoints=(pets,)))


def test_images_are_embedded_whole_and_at_their_own_resolution(run: Path, pets: Path, tmp_path: Path):
    folder = tmp_path / "large" / "cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (1500, 300), (9, 9, 9)).save(folder / "wide.png")
    Image.new("RGB", (30, 70), (9, 9, 9)).save(folder / "tall.png")
    assert Explain(run, (folder,), data=str(pets), cache_dir=tmp_path / "cache", out=tmp_path / "out").run([]) == 0
    data = block(tmp_path / "out" / "explanation.html")
    assert data["images"]["own"] == 2
    assert dict(zip([Path(name).name for name in data["images"]["name"]], data["images"]["size"], strict=False)) == {
        "wide.png": [1024, 205], "tall.png": [30, 70],
    } | {Path(name).name: [20, 16] for name in data["images"]["name"][2:]}  # fmt: skip


def test_a_folder_with_other_files_is_left_alone_and_an_explanation_is_replaced(run: Path, pets: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("keep me")
    command = Explain(run, (pets / "cat",), out=tmp_path, max_images=1, top_patches=1)
    refused("has other files in it; name another directory", command)
    (tmp_path / "explanation.json").write_text("{}")
    assert command.run([]) == 0
    assert read(tmp_path)["explanation"]["class_images"] == [15, 0]
    assert (tmp_path / "mine.txt").exists()


def refused(message: str, command: Explain) -> None:
    with pytest.raises(CommandError, match=f"^moesaic explain: .*{re.escape(message)}"):
        command.run([])


def test_an_interrupted_explanation_runs_again_in_its_folder(
    run: Path, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "page"

    def interrupted(*_: object) -> None:
        (out / "layer-7-share.png").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moesaic.report.explanation_page.draw_gates", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Explain(run, (pets,), max_images=1, top_patches=2, out=out).run(["explain"])
    assert not (out / "explanation.json").exists()
    assert Explain(run, (pets,), max_images=1, top_patches=2, out=out).run(["explain"]) == 0
    assert read(out)["about"]["data"] == "30 of 31 input images"
    assert not (out / "layer-7-share.png").exists()
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_explained_is_refused(run: Path, pets: Path, tmp_path: Path):
    image = pets / "cat" / "03.png"
    refused("there are no images", Explain(run))
    refused("is not there; name the folder of a run", Explain(tmp_path / "nothing", (image,)))
    refused("there is no file or folder", Explain(run, (tmp_path / "missing.png",)))
    refused("none of the 1 files is an image", Explain(run, (pets / "dog" / "notes.txt",)))
    refused("samples=0; it must be at least 1", Explain(run, (image,), samples=0))
    refused("--layer='moe' is unknown; use 'body.group3.0.moe'", Explain(run, (image,), layer=("moe",)))
    refused("--device='tpu' is unknown", Explain(run, (image,), device="tpu"))
    plain = save(tmp_path / "plain", "wrn10_1")
    refused("has no routed layer, so there is no routing to explain", Explain(plain, (image,)))
    refused("or a pretrained one with --head routed", Explain(plain, (image,)))
    unscaled = save(tmp_path / "unscaled", scale=None)
    refused("does not contain the normalization", Explain(unscaled, (image,)))
    (tmp_path / "text.safetensors").write_text("hello")
    refused("is not a whole safetensors file", Explain(tmp_path / "text.safetensors", (image,)))


def test_data_of_other_classes_are_refused(run: Path, tmp_path: Path):
    for name in ("cat", "fish"):
        (tmp_path / "other" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / "other" / name / f"{i}.png")
    command = Explain(run, data=str(tmp_path / "other"), cache_dir=tmp_path / "cache", out=tmp_path / "out")
    refused("has the classes 'cat', 'fish', but the network was trained on 'cat', 'dog'", command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cifar-vehicles", "cifar10-noise"])
def test_datasets_of_the_papers_are_known_by_name(run: Path, name: str):
    refused("it is made from files; name the folder that has them (--data-dir)", Explain(run, data=name))


def test_what_the_routing_says_of_the_class_stands_beside_a_guess():
    text = explain._probe(0.216, 0.104)
    assert "with 22 % accuracy (10 % by always predicting the most frequent one)" in text
    assert explain._probe(None, 0.104) == ""
