"""`moesaic export`: where it writes, what it says, and what it refuses."""

import builtins
import errno
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic.cli.export as cli
from moesaic.cli.export import Export
from moesaic.cli.shared import CommandError
from moesaic.data.image_dataset import Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import Checkpoint, Metadata, save_network
from moesaic.training.export import Exported


def nothing() -> Checkpoint:
    """A network that is quickly traced."""
    metadata = Metadata(None, ("cat", "dog"), ("cat", "dog"), Normalize((0.5,) * 3, (0.2,) * 3), (3, 8, 8), "pets", {})
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2))
    return Checkpoint(Path("runs/pets/model.safetensors"), model.eval(), metadata)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a small network."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "pets"
    folder.mkdir()
    spec = ModelSpec("wrn10_1", {"num_classes": 2})
    metadata = Metadata(
        spec, ("cat", "dog"), ("cat", "dog"), Normalize((0.5,) * 3, (0.2,) * 3), (3, 16, 16), "pets", {}
    )
    save_network(folder / "model.safetensors", spec.build(), metadata)
    return folder


def test_a_file_is_written_run_and_verified(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("moesaic.training.checkpoint.load_checkpoint", lambda path, device, router: nothing())
    assert Export(run, "pt2", out=tmp_path / "pets.pt2").run([]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"verified on batches of 1, 2 and 5: logits differ by at most (\S+)", printed)
    assert found, printed
    assert float(found[1]) < 1e-5
    assert (tmp_path / "pets.pt2").is_file()


def test_the_file_is_next_to_the_checkpoint_with_the_name_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]):
    assert Export(run / "model.safetensors", "safetensors").run([]) == 0
    written = run / "pets.safetensors"
    assert str(written) in capsys.readouterr().out
    with pytest.raises(CommandError, match=r"pets\.safetensors' exists; choose another file, or use --overwrite"):
        Export(run, "safetensors").run([])
    assert Export(run, "safetensors", overwrite=True).run([]) == 0
    written.unlink()


def test_what_differs_by_more_than_rounding_is_a_failure(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "_run", lambda done: (torch.ones(1, 2),))
    monkeypatch.setattr("moesaic.training.checkpoint.load_checkpoint", lambda path, device, router: nothing())
    assert Export(run, "pt2", out=tmp_path / "pets.pt2", batch_size="1").run([]) == 1
    assert "larger than rounding errors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("format", "out", "message"),
    [
        ("tflite", None, "--format='tflite' is unknown; use 'onnx', 'pt2', 'aoti' or 'safetensors'"),
        ("pt2", "pets.onnx", "the suffix must be .pt2"),
        ("aoti", "pets.pt2", "the suffix must be .aoti.pt2"),
        ("pt2", ".", "is a directory; give a file name"),
        ("pt2", "nowhere/pets.pt2", "there is no directory"),
    ],
)
def test_what_cannot_be_written_is_refused(run: Path, tmp_path: Path, format: str, out: str | None, message: str):
    with pytest.raises(CommandError, match=f"moesaic export: .*{re.escape(message)}"):
        Export(run, format, out=None if out is None else tmp_path / out).run([])


def test_a_full_disk_is_not_blamed_on_shapes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "net.pt2")

    monkeypatch.setattr(sys.modules["moesaic.training.export"], "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        Export(run, "pt2", tmp_path / "net.pt2").run([])


def test_the_checkpoint_itself_is_not_overwritten(run: Path):
    with pytest.raises(CommandError, match="is the checkpoint itself"):
        Export(run, "safetensors", out=run / "model.safetensors", overwrite=True).run([])


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CommandError, match="is not there; name the folder of a run"):
        Export(tmp_path / "nothing", "pt2").run([])
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(CommandError, match="is not a whole safetensors file"):
        Export(tmp_path / "text.safetensors", "pt2").run([])


def test_without_the_packages_for_onnx_the_extra_is_named(run: Path, monkeypatch: pytest.MonkeyPatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else there(name))
    with pytest.raises(
        CommandError, match=r"needs onnxscript, which is not installed; .* pip install 'moesaic\[onnx\]'"
    ):
        Export(run, "onnx").run([])


def test_without_a_runtime_an_onnx_file_is_not_verified(monkeypatch: pytest.MonkeyPatch):
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> object:
        if name == "onnxruntime":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    done = Exported(Path("pets.onnx"), "onnx", 10, {}, (torch.zeros(1, 3, 8, 8),), (torch.zeros(1, 2),))
    assert cli._comparison(done, cli._run(done)) == "not verified: onnxruntime is not installed"
