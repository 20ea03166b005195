"""Small networks as a run leaves them, for the tests of what is done with them."""

from pathlib import Path
from typing import Any

import torch

from moesaic.data.image_dataset import Normalize
from moesaic.models.registry import ModelSpec
from moesaic.routing import ChannelGate
from moesaic.training.checkpoint import Metadata, save_network

SCALE = Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.25))


def save_run(
    folder: Path,
    name: str = "wrn10_1_pmoe",
    classes: tuple[str, ...] = ("cat", "dog", "[bold]=cow"),
    size: int = 16,
    scale: Normalize | None = SCALE,
    conversions: tuple[dict[str, Any], ...] = (),
    **arguments: Any,
) -> Path:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith("pmoe"):
        arguments["image_size"] = size
    spec = ModelSpec(name, {"num_classes": len(classes), **arguments}, conversions)
    model = spec.build()
    with torch.no_grad():  # logits that differ between images and classes
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean += 0.1 * torch.randn_like(module.running_mean)
            if isinstance(module, ChannelGate):  # gates that depend on the image
                module.weight.normal_()
                module.bias.zero_()
        for weight in list(model.parameters())[-2:]:
            weight *= 5
    metadata = Metadata(spec, classes, classes, scale, (3, size, size), "pets", {"accuracy": 97.0})
    save_network(folder / "model.safetensors", model, metadata)
    return folder
