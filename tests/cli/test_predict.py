"""`moesaic predict`: what it prints, what it writes, and how it fails."""

import csv
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.trained import save_run

import moesaic
from moesaic.cli import main

ODD = ["a,b.png", 'quo"te.png', "two\nlines.png", "=cmd.png", "@x.png"]


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "run")
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    for number, name in enumerate([f"pets/cat/{number}.jpg" for number in range(5)] + ODD):
        pixels = torch.randint(0, 256, (20 + number, 24, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / name)
    (tmp_path / "pets" / "notes.txt").write_text("no image")
    return tmp_path / "pets"


def rows(file: str) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def test_every_row_is_what_the_network_says(pets: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", "run", "pets", *ODD, "--csv", "out.csv"]) == 0
    printed = capsys.readouterr()
    found = rows("out.csv")
    assert [row["path"] for row in found] == [
        *(f"pets/cat/{number}.jpg" for number in range(5)),
        *ODD[:3],
        "./=cmd.png",
        "./@x.png",
    ]
    model = moesaic.load("run")
    for row in found:
        with torch.no_grad(), moesaic.record_routing(model) as routing:
            expected = model(model.transform(row["path"])).softmax(-1)[0]
        shares = torch.tensor([float(row[f"probability {name}"]) for name in model.classes])
        assert torch.allclose(shares, expected, atol=1e-6)
        assert row["class"] == model.classes[int(expected.argmax())]
        assert float(row["probability"]) == pytest.approx(float(expected.max()), abs=1e-6)
        mask_EN = routing["body.group3.0.moe"].mask[0].T
        assert json.loads(row["patches body.group3.0.moe 4x4"]) == [
            each.nonzero().flatten().tolist() for each in mask_EN
        ]
        assert int(row["macs"]) > 0
    assert len(printed.out.splitlines()) == 10, "one line an image, whatever its name"
    assert "two\N{REPLACEMENT CHARACTER}lines.png: " in printed.out
    assert "skipped: pets/notes.txt is not an image, or its format is unknown" in printed.err
    assert "10 of 11 files: out.csv" in printed.err


def test_an_exported_file_gives_the_same_rows_without_moesaic(pets: Path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert main(["predict", "run", "pets", "--csv", "out.csv"]) == 0
    assert main(["export", "run", "--format", "onnx"]) == 0
    session = runtime.InferenceSession("run/run.onnx", providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    how, classes = json.loads(metadata["moesaic"])["preprocessing"], json.loads(metadata["class_names"])
    assert (how["crop"], how["resample"], how["antialias"]) == ("the largest centred square", "bicubic", True)
    found = rows("out.csv")
    assert len(found) == 5
    images: list[np.ndarray] = []
    for row in found:
        image = Image.open(row["path"]).convert("RGB")
        side, (height, width) = min(image.size), how["resize"]
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize((width, height), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        images.append(np.asarray(image, np.float32).transpose(2, 0, 1) * np.float32(how["scale"]))
    (logits,) = session.run(None, {"images": np.stack(images)})
    for row, probabilities in zip(found, torch.from_numpy(logits).softmax(-1), strict=True):
        expected = [float(row[f"probability {name}"]) for name in classes]
        assert probabilities.tolist() == pytest.approx(expected, abs=1e-4)
        assert row["class"] == classes[int(probabilities.argmax())]


def test_names_that_begin_with_a_dash_are_files_if_they_are_there(pets: Path, capsys: pytest.CaptureFixture[str]):
    Path("a,b.png").rename("-a.png")
    Path("@x.png").rename("--top.png")
    assert main(["predict", "run", "-a.png", "--top.png", "--top", "1", "--csv", "out.csv"]) == 0
    assert [row["path"] for row in rows("out.csv")] == ["./-a.png", "./--top.png"]
    for missing in ("-b.png", "--topp"):
        with pytest.raises(SystemExit):
            main(["predict", "run", missing])
        assert missing in capsys.readouterr().err


def test_batches_and_zip_files_give_the_same_rows(pets: Path):
    assert main(["predict", "run", "pets", "--csv", "all.csv"]) == 0
    with zipfile.ZipFile("pets.zip", "w") as archive:
        for file in sorted(pets.rglob("*.*")):
            archive.write(file, file.relative_to(pets))
    for given in (["pets", "--batch-size", "1"], ["pets", "--batch-size", "2"], ["pets.zip"]):
        assert main(["predict", "run", *given, "--csv", "other.csv"]) == 0
        for one, other in zip(rows("all.csv"), rows("other.csv"), strict=True):
            assert one.pop("path").removeprefix("pets/") == other.pop("path").replace("pets.zip", "pets")[5:]
            for column, value in one.items():
                if column.startswith("probability"):
                    assert float(other[column]) == pytest.approx(float(value), abs=1e-6)
                else:
                    assert other[column] == value


def test_the_most_probable_classes_are_printed(pets: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", "run/model.safetensors", "pets/cat/0.jpg", "--top", "2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    model = moesaic.load("run")
    with torch.no_grad():
        best = model(model.transform("pets/cat/0.jpg")).softmax(-1)[0].topk(2)
    shares = [f"{model.classes[int(k)]} {100 * share:.1f} %" for share, k in zip(*best, strict=True)]
    assert line.startswith(f"pets/cat/0.jpg: {', '.join(shares)}; ")
    assert line.endswith(" multiply-adds")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["nowhere", "pets"], "nowhere is not there"),
        (["run", "nowhere"], "there is no file or folder nowhere"),
        (["run", "pets/notes.txt"], "pets/notes.txt is not an image that can be read"),
        (["run", "pets", "--top", "0"], "top=0; it must be at least 1"),
        (["run", "pets", "--batch-size", "0"], "--batch-size=0; it must be at least 1"),
        (["run", "pets", "--csv", "a.png"], "'a.png' is not the name of a CSV file; give one that ends in .csv"),
        (["run", "pets", "--csv", "no/a.csv"], "there is no directory no; create it"),
        (["run", "pets", "--device", "tpu"], "--device='tpu' is unknown"),
        (["run", "pets", "--router", "soft"], "has no router that is not moesaic's; leave router out"),
        (["run"], "there are no images"),
    ],
)
def test_bad_input_is_told_in_one_line(pets: Path, given: list[str], fault: str, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", *given]) == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith("moesaic predict: ")
    assert fault in output
