"""What is exported computes what the network computes, and says what is needed to use it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from training.trained import save_run

import moesaic
from moesaic.data.image_dataset import Normalize
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import Checkpoint, Metadata, load_checkpoint
from moesaic.training.export import Batch, Format, ServingModel, export, load_exported
from moesaic.training.predict import predict
from moesaic.training.trained_network import load

SCALE = Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
NAMES = ("Äpfel", 'b "quoted"')


def checkpoint(scale: Normalize | None = SCALE, moe: nn.Module | None = None) -> Checkpoint:
    torch.manual_seed(0)
    moe = moe or moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2, patch_size=2)
    model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    return Checkpoint(Path("run/model.safetensors"), model, Metadata(None, NAMES, NAMES, scale, (3, 6, 6), "fruit", {}))


def test_what_is_served_takes_pixels_over_255_and_scales_them():
    given = checkpoint()
    pixels = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    torch.testing.assert_close(ServingModel(given.model, SCALE)(pixels / 255), given.model(SCALE(pixels)))


def test_a_pt2_file_computes_what_the_network_computes(tmp_path: Path):
    done = export(checkpoint(), tmp_path / "a.pt2", "pt2")
    network, metadata = load_exported(done.path)
    assert [len(images) for images in done.examples] == [1, 2, 5]
    assert done.difference(tuple(network(images) for images in done.examples)) < 1e-6
    assert metadata["class_names"] == list(NAMES)
    assert metadata["input_shape"] == [3, 6, 6]
    assert "pixels / 255" in metadata["input"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]


def test_a_file_for_one_image_at_a_time_takes_no_more(tmp_path: Path):
    done = export(checkpoint(moe=nn.Conv2d(3, 4, 1)), tmp_path / "a.pt2", "pt2", batch="1")
    network, _ = load_exported(done.path)
    assert [len(images) for images in done.examples] == [1]
    assert done.difference(tuple(network(images) for images in done.examples)) < 1e-6
    with pytest.raises(Exception, match=r"size\(\)\[0\] == 1"):
        network(torch.rand(2, 3, 6, 6))


def test_an_onnx_file_computes_what_the_network_computes(tmp_path: Path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    # tests/contract/test_export.py has routed layers
    done = export(checkpoint(moe=nn.Conv2d(3, 4, 1)), tmp_path / "a.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(done.path))
    assert [each.name for each in session.get_inputs()] == ["images"]
    assert [each.name for each in session.get_outputs()] == ["logits"]
    found = [torch.from_numpy(session.run(None, {"images": images.numpy()})[0]) for images in done.examples]
    assert done.difference(tuple(found)) < 1e-5
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == list(NAMES)
    assert json.loads(metadata["moesaic"])["scale"]["mean"] == [0.5, 0.4, 0.3]
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_an_onnx_file_equals_predict_from_the_jpeg_on(tmp_path: Path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run = save_run(tmp_path / "run")
    image = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8)
    Image.fromarray(image.numpy()).resize((400, 300)).save(tmp_path / "a.jpg")
    done = export(load_checkpoint(run), tmp_path / "a.onnx", "onnx")
    session = runtime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["moesaic"])
    assert about["preprocessing"]["resize"] == [16, 16]
    model = load(run)
    pixels = model.transform.pixels(tmp_path / "a.jpg").float() * about["preprocessing"]["scale"]
    (logits,) = session.run(None, {"images": pixels.numpy()})
    (prediction,) = predict(model, tmp_path / "a.jpg")
    assert torch.tensor(logits).softmax(-1)[0].tolist() == pytest.approx(prediction.probabilities, abs=1e-5)


def test_a_difference_is_the_largest_one():
    done = export_of_nothing()
    assert done.difference((torch.tensor([[0.0, 0.0]]), torch.tensor([[0.5, -1.0]]))) == 1.0


def export_of_nothing():
    from moesaic.training.export import Exported

    zeros = torch.zeros(1, 2)
    return Exported(Path("a"), "pt2", 0, {}, (zeros, zeros), (zeros, zeros))


def test_safetensors_are_a_checkpoint_again(tmp_path: Path):
    spec = ModelSpec("wrn10_1", {"num_classes": 2})
    model = spec.build().eval()
    metadata = Metadata(spec, NAMES, NAMES, SCALE, (3, 8, 8), "fruit", {"accuracy": 90.0})
    done = export(Checkpoint(tmp_path, model, metadata), tmp_path / "a.safetensors", "safetensors")
    again = load_checkpoint(done.path)
    weights = again.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert (again.class_names, again.normalize, again.metrics) == (NAMES, SCALE, {"accuracy": 90.0})


def test_without_a_scale_only_weights_can_be_exported(tmp_path: Path):
    with pytest.raises(ValueError, match="does not say how pixels become the network's input"):
        export(checkpoint(scale=None), tmp_path / "a.pt2", "pt2")
    export(checkpoint(scale=None), tmp_path / "a.safetensors", "safetensors")


def mixture(top_k: int) -> nn.Module:
    """Three networks of which images choose by their router's scores."""
    torch.manual_seed(0)
    router = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 3))
    experts = [nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return moesaic.SampleMoE(router, experts, top_k)


def test_a_mixture_of_networks_runs_only_the_chosen_ones(tmp_path: Path):
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    given = checkpoint(moe=mixture(top_k=1))
    done = export(given, tmp_path / "a.onnx", "onnx")
    graph = onnx.load(done.path).graph
    branches = [node for node in graph.node if node.op_type == "If"]
    assert len(branches) == 3
    assert "Conv" not in {node.op_type for node in graph.node}, "experts run in branches only"
    assert all(len(attribute.g.initializer) for node in branches for attribute in node.attribute[:1])
    session = runtime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    x = torch.rand(9, 3, 6, 6)
    for images in (x, x[:2], x[:1]):
        with torch.no_grad():
            expected = ServingModel(given.model, SCALE)(images)
        (logits,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["onnx", "pt2", "aoti"])
def test_a_mixture_whose_experts_route_patches_is_refused(tmp_path: Path, format: Format):
    experts = [moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2, patch_size=2) for _ in range(2)]
    given = checkpoint(moe=moesaic.SampleMoE(nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 2)), experts, 1))
    with pytest.raises(ValueError, match=f"cannot be written as {format}; use format='safetensors'"):
        export(given, tmp_path / "a", format)
    assert not list(tmp_path.iterdir())


def test_a_mixture_of_several_networks_for_each_image_is_exported(tmp_path: Path):
    done = export(checkpoint(moe=mixture(top_k=2)), tmp_path / "a.pt2", "pt2")
    network, _ = load_exported(done.path)
    assert done.difference(tuple(network(images) for images in done.examples)) < 1e-6


@pytest.mark.parametrize(("batch", "scans"), [("dynamic", 1), ("1", 0)])
def test_gated_networks_are_exported_with_their_open_channels(tmp_path: Path, batch: Batch, scans: int):
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    layers = [layer for ins, outs in ((3, 8), (8, 8)) for layer in (nn.Conv2d(ins, outs, 3, padding=1), nn.ReLU())]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    model = deepmoe(network, num_classes=2, image_size=16, mode="topk", keep=0.25, block=2).eval()
    for head in model.heads().values():
        nn.init.normal_(head.weight, std=5)
    given = Checkpoint(Path("run"), model, Metadata(None, NAMES, NAMES, SCALE, (3, 16, 16), "fruit", {}))
    done = export(given, tmp_path / "a.onnx", "onnx", batch=batch)
    graph = onnx.load(done.path).graph
    assert [node.op_type for node in graph.node].count("Scan") == scans
    session = runtime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    found = [torch.from_numpy(session.run(None, {"images": images.numpy()})[0]) for images in done.examples]
    assert done.difference(tuple(found)) < 1e-5


def test_a_compiled_file_computes_what_the_network_computes(tmp_path: Path):
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    # compiled headers and a fast wrapper take longer to compile than they save here
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch._inductor.config.patch(quick):
        done = export(checkpoint(), tmp_path / "a.aoti.pt2", "aoti")
    network, metadata = load_exported(done.path)
    assert done.difference(tuple(network(images) for images in done.examples)) < 1e-5
    assert metadata["class_names"] == list(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["a.aoti.pt2"]


def test_a_file_that_is_compiled_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def compile(program: object, *, package_path: str, **_: object) -> None:
        Path(package_path).write_bytes(b"wrong")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda images: torch.ones(len(images), 2))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    with pytest.raises(ValueError, match=r"gives other logits, by up to \d.*; use format='pt2' or 'onnx'"):
        export(checkpoint(moe=nn.Conv2d(3, 4, 1)), tmp_path / "a.aoti.pt2", "aoti")
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ValueError, match=r"there is no C\+\+ compiler; install g\+\+, or use format='pt2'"):
        export(checkpoint(), tmp_path / "a.aoti.pt2", "aoti")
    assert list(tmp_path.iterdir()) == []


class _ReadsItsImages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2].repeat(1, 2, 1, 1) if float(x.sum()) > 0 else x


def test_a_network_that_torch_cannot_export_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(
        ValueError, match=r"torch cannot export Sequential as pt2 .* use format='safetensors'"
    ) as refusal:
        export(checkpoint(moe=_ReadsItsImages()), tmp_path / "a.pt2", "pt2")
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_leaves_nothing_and_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    # torch would abort the process if it wrote to the disk itself
    monkeypatch.setattr(sys.modules["moesaic.training.export"], "write_atomic", full)
    (tmp_path / "a.pt2").write_bytes(b"of before")
    with pytest.raises(OSError, match="No space left"):
        export(checkpoint(moe=nn.Conv2d(3, 4, 1)), tmp_path / "a.pt2", "pt2")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of before"]


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".a.unfinished.pt2", ".a.pt2.unfinished", ".a.onnx.unfinished", "a.pt2"):
        (folder / name).symlink_to(secret)
    export(checkpoint(moe=nn.Conv2d(3, 4, 1)), folder / "a.pt2", "pt2")
    assert secret.read_text() == "mine"
    assert (folder / "a.pt2").is_file()
    assert not (folder / "a.pt2").is_symlink()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")

    monkeypatch.setattr(torch.onnx, "export", missing)
    with pytest.raises(ValueError, match=r"\(onnxscript\); install the extra: pip install 'moesaic\[onnx\]'"):
        export(checkpoint(), tmp_path / "a.onnx", "onnx")


@pytest.mark.parametrize(("format", "batch"), [("tflite", "dynamic"), ("pt2", "7")])
def test_unknown_formats_and_batches_are_refused(tmp_path: Path, format: str, batch: str):
    with pytest.raises(ValueError, match="is unknown; use"):
        export(checkpoint(), tmp_path / "a", format, batch=batch)
