"""moesaic: mixtures of experts in vision, routed by patch, by token, by sample and by channel.

>>> import torch, moesaic
>>> layer = moesaic.PatchMoE(64, 64, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
>>> y = layer(torch.randn(2, 64, 16, 16))
>>> model = moesaic.create_model("wrn10_10_pmoe", num_classes=10)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.experts import shard_experts
    from moesaic.layers import ChannelMoE, PatchMoE, RoutedHead, SampleMoE, TokenMoE, record_routing
    from moesaic.models import convert, create_model, freeze, list_models, register_with_timm, skip
    from moesaic.ops import backend
    from moesaic.routing import ChannelGate, ExpertChoice, SoftRouter, TokenChoice
    from moesaic.routing_record import Routing
    from moesaic.training import NormalizedGD, load

__version__ = "0.1.0.dev0"

__all__ = [
    "ChannelGate",
    "ChannelMoE",
    "ExpertChoice",
    "NormalizedGD",
    "PatchMoE",
    "RoutedHead",
    "Routing",
    "SampleMoE",
    "SoftRouter",
    "TokenChoice",
    "TokenMoE",
    "__version__",
    "backend",
    "convert",
    "create_model",
    "freeze",
    "list_models",
    "load",
    "record_routing",
    "register_with_timm",
    "shard_experts",
    "skip",
]

# imported on first use, so that `import moesaic` and `moesaic --version` need not wait for torch
_NAMES = {
    "experts": ("shard_experts",),
    "layers": ("ChannelMoE", "PatchMoE", "RoutedHead", "SampleMoE", "TokenMoE", "record_routing"),
    "models": ("convert", "create_model", "freeze", "list_models", "register_with_timm", "skip"),
    "ops": ("backend",),
    "routing": ("ChannelGate", "ExpertChoice", "SoftRouter", "TokenChoice"),
    "routing_record": ("Routing",),
    "training": ("NormalizedGD", "load"),
}
_PACKAGE_OF = {name: package for package, names in _NAMES.items() for name in names}
_PACKAGES = (*_NAMES, "bench", "data", "insight", "intervals", "keyed_random", "report")


def __getattr__(name: str) -> Any:
    if name in _PACKAGE_OF:
        return getattr(import_module(f"{__name__}.{_PACKAGE_OF[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_PACKAGES})


if sys.modules.get("timm"):
    __getattr__("register_with_timm")()
