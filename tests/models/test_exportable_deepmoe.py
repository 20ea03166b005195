"""The exportable form of a DeepMoE equals the masked network, in torch, as .pt2 and in ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.models import ResNet
from moesaic.models.deepmoe import exportable
from moesaic.models.deepmoe.exportable import ExportableDeepMoE, exportable_deepmoe
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16

CLASSES = 4
BATCH = ({0: torch.export.Dim("batch", min=1)},)


def small(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    first, second, third = widths
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(second, third, 3, padding=1, bias=False),
        nn.BatchNorm2d(third),
        activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, CLASSES),
    )


def smaller(*widths: int) -> nn.Sequential:
    """Enough for the compiler, which takes its time with every layer."""
    first, second = widths
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, CLASSES),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "single channels": (lambda: small(8, 7, 6), {}),
    "blocks": (lambda: small(8, 16, 8), {"mode": "topk", "keep": 0.5, "block": 4}),
    "short blocks": (lambda: small(8, 7, 11), {"block": 3}),
    "two layers": (lambda: smaller(7, 11), {"block": 3}),
    "short best blocks": (lambda: small(8, 7, 11), {"mode": "topk", "keep": 0.4, "block": 3}),
    "blocks of all channels": (lambda: small(8, 7, 11), {"block": 16}),
    "weights per channel": (lambda: small(8, 7, 7, activation=lambda: nn.PReLU(1)), {"block": 2}),
    "PReLU": (lambda: small(7, 7, 7, activation=lambda: nn.PReLU(7)), {"block": 2}),
    "VGG-16": (lambda: VGG16(CLASSES, width=0.1), {"image_size": 32}),
    "shortcuts": (lambda: ResNet(18, CLASSES, width=0.1), {"mode": "topk", "keep": 0.5, "block": 2}),
    "hard gates": (lambda: small(8, 7, 11), {"mode": "hard", "block": 3}),
    "centred embedding": (lambda: small(8, 7, 6), {"center_embedding": True}),
    "constant hard gates": (lambda: small(8, 7, 6), {"mode": "hard", "embedding_share": 0.0}),
    "bottlenecks": (lambda: ResNet(50, CLASSES, width=0.05), {"bottleneck": "b"}),
}


def gated(name: str, shift: float = 0.0) -> DeepMoE:
    """A DeepMoE in float64 whose images open about half of the channels; more with a shift above 0."""
    torch.manual_seed(0)
    make, options = NETWORKS[name]
    model = deepmoe(make(), num_classes=CLASSES, **{"image_size": 16, **options})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
        elif isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    model.double().eval()
    with torch.no_grad():
        embedding, _ = model.embedding(images(16, name))
        for head in model.heads().values():
            nn.init.normal_(head.weight)
            own = 0.0 if embedding.shape[1] == 1 else (embedding @ head.weight.T).mean(0)
            head.bias.copy_(shift - own)  # every image opens other channels, unless the embedding is constant
    return model


def images(batch: int, name: str = "", seed: int = 0) -> Tensor:
    size = NETWORKS[name][1].get("image_size", 16) if name else 16
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, size, size, dtype=torch.float64, generator=generator)
    return x * (0.5 + torch.rand(batch, 3, 1, 1, dtype=torch.float64, generator=generator))


@pytest.fixture
def plain_cond(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cond` without the compiler, which it calls even in eager mode."""

    def cond(decision: Tensor, then: Callable[..., Tensor], otherwise: Callable[..., Tensor], given: Any) -> Tensor:
        return (then if decision else otherwise)(*given)

    monkeypatch.setattr(torch, "cond", cond)


@pytest.mark.usefixtures("plain_cond")
@pytest.mark.parametrize("factor", [0.0, 1e30], ids=["gathered", "dense"])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_it_equals_the_masked_network(name, factor, monkeypatch):
    monkeypatch.setattr(exportable, "GATHERED", factor)
    monkeypatch.setattr(exportable, "GATHERED_PIECE", 0.0)
    for shift in (0.0, -1e3, 1e3):  # some, none and all channels open
        model = gated(name, shift)
        form = ExportableDeepMoE(model, one_image=True)
        for seed in range(3):
            x = images(1, name, seed)
            torch.testing.assert_close(form(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("plain_cond")
@torch.no_grad()
def test_the_cheaper_execution_is_chosen_for_each_image(monkeypatch):
    model = gated("VGG-16")
    ran: list[str] = []

    def recorded(name: str) -> Callable[..., Tensor]:
        run = getattr(ExportableDeepMoE, f"_run_{name}")
        return lambda *given: ran.append(name) or run(*given)

    for name in ("gathered", "dense"):
        monkeypatch.setattr(ExportableDeepMoE, f"_run_{name}", recorded(name))
    form = ExportableDeepMoE(model, one_image=True)
    x = images(1, "VGG-16")
    for bias in (-1e3, 1e3):
        form.bias.fill_(bias)
        form(x)
    assert ran == ["gathered", "dense"]


@torch.no_grad()
def test_the_estimate_counts_the_multiply_adds_of_open_channels(monkeypatch):
    monkeypatch.setattr(exportable, "GATHERED", 1.0)
    monkeypatch.setattr(exportable, "GATHERED_PIECE", 0.0)
    model = gated("short blocks")
    form = ExportableDeepMoE(model)
    routing = model.forward_with_routing(images(1)).routing
    is_open = torch.cat([each.mask[0, 0] for each in routing.values()])
    channels = form._channels(is_open.float())
    share = float((form.cost * channels[form.ins] * channels[form.outs]).sum())
    gated_macs = model.macs(routing)[0] - model.fixed_macs
    all_macs = model.dense_macs + model.gate_macs - model.fixed_macs
    assert share == pytest.approx(float(gated_macs / all_macs), rel=1e-5)


def test_a_network_that_gains_nothing_is_exported_as_it_is():
    nearly_all = deepmoe(VGG16(CLASSES, width=0.25), num_classes=CLASSES, mode="topk", keep=0.9, block=4).eval()
    assert exportable_deepmoe(nearly_all) is nearly_all
    few = deepmoe(VGG16(CLASSES, width=0.25), num_classes=CLASSES, mode="topk", keep=0.2, block=4).eval()
    assert isinstance(exportable_deepmoe(few), ExportableDeepMoE)
    assert isinstance(exportable_deepmoe(gated("single channels")), ExportableDeepMoE)  # images decide


def gated_by_brightness(name: str) -> DeepMoE:
    """A DeepMoE in float32 where the first of the images opens more channels, the brighter it is made."""
    model = gated(name)
    with torch.no_grad():
        for module in model.embedding.modules():
            if isinstance(module, nn.BatchNorm2d):  # the embedding is then proportional to the image
                nn.init.zeros_(module.bias)
                nn.init.zeros_(module.running_mean)
        embedding, _ = model.embedding(images(1, name))
        for head in model.heads().values():
            head.weight.abs_()
            head.bias.copy_(-(embedding @ head.weight.T)[0] * torch.linspace(0.25, 4, head.blocks))
    return model.float()


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_exported_files_equal_the_masked_network_for_any_batch_and_opening(tmp_path: Path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = gated_by_brightness("two layers")
    program = torch.export.export(ExportableDeepMoE(model), (images(3).float(),), dynamic_shapes=BATCH)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "a.onnx")
    session = runtime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    x = images(1).float() * torch.tensor([0, 0.5, 1, 2, 8.0]).view(-1, 1, 1, 1)
    routing = model.forward_with_routing(x).routing.values()
    shares = torch.cat([each.mask[:, 0] for each in routing], 1).float().mean(1)
    assert 0 == shares[0] < shares[1] < shares[3] < shares[4] == 1
    for batch in (x, x[1:4], x[:1], x[2:3], x[4:]):
        expected = model(batch)
        (logits,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        for found in (program.module()(batch), torch.from_numpy(logits)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
