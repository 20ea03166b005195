"""The examples run, and give what they say they give."""

import math
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_where_patches_go_draws_a_picture_and_tells_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "where_patches_go.py"))
    numbers = example["main"](["--epochs", "1", "--out", str(tmp_path / "new" / "folder")])

    assert all(math.isfinite(value) and 0 <= value <= 1 for value in numbers.values()), numbers
    # two patches of sixteen, and the router: 16 patches of 4·4·32 values times its kernels, padded to 16 columns
    dense = 16 * 16 * 32 * 64 * 3 * 3
    assert numbers["multiply_adds"] == pytest.approx(2 / 16 + 16 * (4 * 4 * 32) * 16 / dense)

    picture = tmp_path / "new" / "folder" / "where_patches_go.png"
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100


def test_your_photos_goes_from_a_folder_to_three_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str], timm):
    example = runpy.run_path(str(EXAMPLES / "your_photos.py"))
    for kind, colour in (("cats", 0), ("dogs", 2)):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = torch.randint(0, 120, (40, 40, 3), dtype=torch.uint8)
            pixels[8:24, 8:24, colour] += 120
            Image.fromarray(pixels.numpy()).save(tmp_path / "pets" / kind / f"{number}.png")
    weights = timm.create_model("test_resnet", num_classes=0).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "weights.safetensors")
    out = tmp_path / "runs"
    seconds = example["main"](
        [str(tmp_path / "pets"), "--model", "timm/test_resnet", "--weights", str(tmp_path / "weights.safetensors")]
        + ["--epochs", "2", "--minutes", "5", "--cache-dir", str(tmp_path / "cache"), "--out", str(out)]
    )
    assert list(seconds) == ["compare", "train", "train routed", "explain"]
    assert (out / "pets-comparison" / "report.html").exists()
    assert (out / "pets-network" / "model.safetensors").exists()
    assert (out / "pets-routed" / "explanation" / "explanation.html").exists()
    assert len(list((tmp_path / "cache").glob("features-*.npy"))) == 2, "features are computed once, for both heads"
    assert "together" in capsys.readouterr().out


def test_photo_mosaics_draws_a_figure_and_reports_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("skimage", reason="its photographs come with scikit-image")
    example = runpy.run_path(str(EXAMPLES / "photo_mosaics.py"))
    numbers = example["main"](["--epochs", "1", "--samples", "12", "--out", str(tmp_path / "new" / "folder")])

    assert all(math.isfinite(value) and 0 <= value <= 1 for value in numbers.values()), numbers
    assert numbers["random"] == pytest.approx(1 - (15 / 16) ** 4)  # four experts select one of sixteen tiles each

    picture = tmp_path / "new" / "folder" / "photo_mosaics.png"
    out = capsys.readouterr().out
    assert str(picture) in out
    with Image.open(picture) as image:
        assert min(image.size) > 500
    assert str(picture.with_name("experts_settle.svg")) in out
    assert "after epoch 1" in picture.with_name("experts_settle.svg").read_text("utf-8")


def test_the_figure_of_settling_experts_has_a_frame_for_each_and_both_themes():
    example = runpy.run_path(str(EXAMPLES / "photo_mosaics.py"))
    deciding = torch.zeros(2, 16, dtype=torch.bool)
    deciding[0, 5] = deciding[1, 9] = True
    mosaics = example["Mosaics"](torch.zeros(2, 3, 256, 256, dtype=torch.uint8), torch.tensor([0, 1]), deciding)
    before = example["Snapshot"](0, ((0, 1, 2, 3), (4, 4, 4, 4)), 0.3, 0.25)
    after = example["Snapshot"](7, ((5, 5, 2, 3), (9, 8, 7, 6)), 0.9, 0.5)
    text = example["draw_settling"](mosaics, [before, after])
    root = ElementTree.fromstring(text)
    drawn = [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert sum("stroke" in each for each in drawn) == 2 * 2 * 4 + 4  # columns, mosaics and experts; the legend
    assert sum(each.get("class") == "veil" for each in drawn) == 12 + 15 + 13 + 12
    assert sum(each.get("class") == "deciding" for each in drawn) == 4 + 1
    assert "prefers-color-scheme: dark" in text
    assert "after epoch 7" in text
    assert "finds it in 50%" in text


def test_the_committed_figure_of_settling_experts_is_small_and_of_this_kind():
    figure = EXAMPLES.parent / "docs" / "images" / "experts-settle.svg"
    assert figure.stat().st_size < 300_000
    assert "prefers-color-scheme: dark" in figure.read_text("utf-8")
    assert "before training" in figure.read_text("utf-8")


def test_photo_mosaics_have_one_deciding_tile_unless_the_class_is_neither():
    example = runpy.run_path(str(EXAMPLES / "photo_mosaics.py"))
    names = (*example["DECIDING"], *example["OTHERS"])
    # photographs of one colour each, the left half dark and the right half bright
    ramp = (torch.arange(200) >= 100).to(torch.uint8)
    photographs = {name: (10 * i + ramp).expand(3, 140, 200) for i, name in enumerate(names)}
    mosaics = example["make_mosaics"](photographs, 9, "test", seed=3)

    tiles = mosaics.pixels[:, 0, 32::64, 32::64].flatten(1)
    assert (tiles % 10 == 1).all(), "a test tile comes from the left half"
    assert torch.equal(tiles // 10 < len(example["DECIDING"]), mosaics.deciding)
    assert mosaics.deciding.sum(1).tolist() == [int(label < 2) for label in mosaics.labels]
    assert torch.equal((tiles // 10)[mosaics.deciding].long(), mosaics.labels[mosaics.labels < 2])


def test_expert_parallel_trains_without_torchrun_and_saves_all_experts(tmp_path: Path, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    example = runpy.run_path(str(EXAMPLES / "expert_parallel.py"))
    accuracy = example["main"](["--steps", "60", "--out", str(tmp_path / "weights.safetensors")])
    assert accuracy > 0.8
    assert "1 rank, 8 of 8 experts on each" in capsys.readouterr().out
    model = example["build"]()
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"))


def test_route_your_cnn_compares_a_dense_and_a_routed_network(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "route_your_cnn.py"))
    numbers = example["main"](["--samples", "60", "--epochs", "1"])
    assert set(numbers) == {"dense", "routed", "reached", "random"}
    assert all(0 <= value <= 1 for value in numbers.values()), numbers
    assert numbers["random"] == pytest.approx(1 - (14 / 16) ** 4)  # four experts select two of sixteen digits each
    out = capsys.readouterr().out
    assert "753,792 multiply-adds" in out
    assert "4,849,792 multiply-adds" in out


def test_mosaics_of_digits_have_one_deciding_digit_where_they_say_it_is():
    example = runpy.run_path(str(EXAMPLES / "route_your_cnn.py"))
    rows = torch.arange(400, 900)
    images, labels, deciding = example["make_mosaics"](20, rows, seed=5)
    tiles = images.reshape(20, 4, 8, 4, 8).transpose(2, 3).flatten(1, 2)  # (20, 16, 8, 8)
    assert deciding.sum(1).tolist() == [1] * 20
    for tile, label in zip(tiles[deciding], labels.tolist(), strict=True):
        same = (example["PIXELS"][rows] == tile).all((1, 2)).nonzero()[0]
        assert example["KINDS"][rows][same].tolist() == [label]


def test_convert_timm_checks_the_conversion_and_tells_its_cost(capsys: pytest.CaptureFixture[str], timm):
    example = runpy.run_path(str(EXAMPLES / "convert_timm.py"))
    numbers = example["main"](["--model", "test_resnet", "--experts", "4", "--img-size", "64"])
    assert numbers["check"] < 1e-5
    assert numbers["routed"] > 100 * numbers["check"]
    assert 0 < numbers["layer"] < numbers["network"] < 1
    assert "layers can be converted" in capsys.readouterr().out


def test_custom_router_takes_patches_near_its_best_alone():
    example = runpy.run_path(str(EXAMPLES / "custom_router.py"))
    router = example["NearBest"](2, experts=1, patches_per_expert=3, margin=1.0)
    scores = torch.tensor([[5.0, 1.0, 4.5, 4.2], [2.0, 0.0, 0.5, 0.9]])[..., None]  # two images, four patches
    routing = router.choose(scores)
    assert routing.index[:, 0].tolist() == [[0, 2, 3], [0, -1, -1]]
    assert routing.gate[1, 0].tolist() == [1, 0, 0]
    assert torch.allclose(routing.gate.sum(-1), torch.ones(2, 1))


def test_custom_router_is_compared_with_the_built_in_ones(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "custom_router.py"))
    numbers = example["main"](["--samples", "60", "--epochs", "1"])
    assert numbers["ExpertChoice"]["patches"] == 9
    assert numbers["TokenChoice"]["patches"] == 16  # 64 patches, each with one of four experts
    assert 1 <= numbers["NearBest"]["patches"] <= 9
    assert all(0 <= each["accuracy"] <= 1 for each in numbers.values())
    assert capsys.readouterr().out.count("\n") == 4


def test_sample_mixture_divides_clusters_among_nonlinear_experts(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "sample_mixture.py"))
    numbers = example["main"](["--samples", "500", "--steps", "120"])
    assert numbers["one network"]["accuracy"] < 0.875 < numbers["four nonlinear experts"]["accuracy"]
    assert numbers["four nonlinear experts"]["entropy"] < numbers["four linear experts"]["entropy"]
    assert numbers["one network"]["entropy"] == pytest.approx(math.log(4), abs=0.01)
    assert "expert 3" in capsys.readouterr().out


def test_channel_gates_meet_their_budget_and_run_frozen(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "channel_gates_budget.py"))
    numbers = example["main"](["--samples", "64", "--epochs", "4", "--width", "0.1"])
    assert numbers["cost"] == pytest.approx(0.5, abs=0.15)
    assert numbers["difference"] < 1e-3
    assert "target 50%" in capsys.readouterr().out


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_begins_with_what_it_shows_and_is_on_the_page_of_tutorials(script: Path):
    page = (EXAMPLES.parent / "docs" / "tutorials" / "index.md").read_text("utf-8")
    assert script.read_text("utf-8").startswith('"""')
    assert f"| `{script.name}` |" in page, "add a row to docs/tutorials/index.md"
