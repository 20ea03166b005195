"""Small pages of the routing explorer: of patches, of tokens, of whole images and of channel gates."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from tiny_vit import TinyViT
from torch import Tensor, nn

import moesaic
from moesaic.insight.channel_explanation import GatedOutputs
from moesaic.insight.explain import ForwardPass, collect_outputs, explain
from moesaic.report.embedded_images import picture_of
from moesaic.report.explanation_page import About, write_explanation
from moesaic.report.explorer_data import CheckpointPass, ShownImage
from moesaic.routing import TokenChoice
from moesaic.routing.channel_gate import ChannelGate

CLASSES = ("<script>alert(1)</script>", "dog & co", 'frog\'s "leg"')
OWN = 2
"""The first images are the user's own; of the second no class is known."""


_REPORT = "moesaic.report"


def _unsaved(figure: object, path: Path) -> str:
    return path.name


@dataclass(frozen=True)
class ExamplePage:
    path: Path
    passes: list[ForwardPass]
    """Of each checkpoint."""
    labels: Tensor
    names: list[str]


def _write(folder: Path, passes: list[ForwardPass], labels: Tensor, pixels: Tensor) -> ExamplePage:
    B = len(labels)
    names = ["<img src=x onerror=alert(1)>.png", *(f"photo {b}.jpg" for b in range(1, B))]
    images = [
        ShownImage(names[b], None if b == 1 else int(labels[b]), picture_of(pixels[b]), b < OWN) for b in range(B)
    ]
    explanation = explain(passes[-1], CLASSES, labels=labels, top_patches=4)
    # PNG files beside the page are tested elsewhere, and take seconds
    with (
        patch(f"{_REPORT}.explanation_page.save_png", _unsaved),
        patch(f"{_REPORT}.channel_section.save_png", _unsaved),
    ):
        page = write_explanation(
            folder,
            explanation,
            About("a model", "runs/a", f"{B} images", command="moesaic explain"),
            pixels=pixels,
            classes=labels,
            images=images,
            top_patches=4,
            checkpoints=[CheckpointPass(f"epoch {i + 1}", each, each) for i, each in enumerate(passes)],
        )
    return ExamplePage(page, passes, labels, names)


def _images(B: int, height: int = 24, width: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(B) % len(CLASSES)
    pixels = torch.randint(0, 90, (B, 3, height, width), dtype=torch.uint8, generator=generator)
    for k in range(len(CLASSES)):
        pixels[labels == k, k, 8 * k : 8 * k + 8, 8:16] = 250
    return pixels, labels


def patch_page(folder: Path) -> ExamplePage:
    """Three experts choose patches, and in a second layer patches choose two of nine experts; two checkpoints."""
    pixels, labels = _images(18)
    passes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        first = moesaic.PatchMoE(3, 6, experts=3, patches_per_expert=2, patch_size=8)
        router = TokenChoice(6, experts=9, top_k=2, patch_size=4)
        second = moesaic.PatchMoE(6, 9, experts=9, router=router)
        model = nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, len(CLASSES)))
        passes.append(collect_outputs(model, pixels, lambda x: x / 255))
    return _write(folder, passes, labels, pixels)


def long_page(folder: Path) -> ExamplePage:
    """More images than the list shows at first."""
    pixels, labels = _images(160)
    torch.manual_seed(0)
    moe = moesaic.PatchMoE(3, 6, experts=2, patches_per_expert=1, patch_size=8)
    model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, len(CLASSES)))
    return _write(folder, [collect_outputs(model, pixels, lambda x: x / 255)], labels, pixels)


def token_page(folder: Path) -> ExamplePage:
    """Experts choose tokens of a transformer, among them its class token; two checkpoints."""
    pixels, labels = _images(12)
    passes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        moe = moesaic.TokenMoE(8, experts=4, hidden_dim=8, tokens_per_expert=4, prefix_tokens=1)
        passes.append(collect_outputs(TinyViT(len(CLASSES), moe), pixels, lambda x: x / 255))
    return _write(folder, passes, labels, pixels)


def loose_token_page(folder: Path) -> ExamplePage:
    """Ten tokens that are no square, so that they have no grid."""
    pixels, labels = _images(9)
    torch.manual_seed(0)
    moe = moesaic.TokenMoE(8, experts=4, hidden_dim=8, router=TokenChoice(8, experts=4, top_k=2))
    return _write(folder, [collect_outputs(TinyViT(len(CLASSES), moe), pixels, lambda x: x / 255)], labels, pixels)


def sample_page(folder: Path) -> ExamplePage:
    """A router sends each image to one of two networks; three checkpoints."""
    pixels, labels = _images(12)
    passes = []
    for seed in range(3):
        torch.manual_seed(seed)
        experts = [nn.Sequential(nn.Flatten(), nn.Linear(1728, len(CLASSES))) for _ in range(2)]
        model = moesaic.SampleMoE(nn.Sequential(nn.Flatten(), nn.Linear(1728, 2)), experts)
        passes.append(collect_outputs(model, pixels, lambda x: x / 255))
    return _write(folder, passes, labels, pixels)


def gate_page(folder: Path) -> ExamplePage:
    """Of three layers one is static, one random, and one follows the class; class 2 is expensive."""
    pixels, labels = _images(15, 24, 36)
    generator = torch.Generator().manual_seed(0)
    gates = {
        "conv1": torch.tensor([True, False]).expand(15, 2),
        "conv2": torch.rand(15, 11, generator=generator) < 0.5,
        "<i>conv3</i>": nn.functional.one_hot(labels, 3).bool(),
    }
    routing = {name: ChannelGate(1, each.shape[1]).choose(torch.where(each, 0.5, -0.5)) for name, each in gates.items()}
    probabilities = torch.softmax(torch.randn(15, 3, generator=generator) + torch.eye(3)[labels], 1)
    macs = 300 + 100 * labels + torch.randint(0, 20, (15,), generator=generator)
    gated = GatedOutputs(torch.ones(15, 6), macs, 1000, 50)
    found = ForwardPass(probabilities, routing, dict.fromkeys(routing), dict.fromkeys(routing, 1), gated)
    return _write(folder, [replace(found)], labels, pixels)
