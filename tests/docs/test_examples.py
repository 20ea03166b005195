"""The examples run, and give what they say they give."""

import math
import runpy
from pathlib import Path

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
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        assert min(image.size) > 500


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
