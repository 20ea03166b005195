"""moesaic: mixtures of experts in vision, routed by patch, by sample and by channel.

>>> import torch, moesaic
>>> layer = moesaic.PatchMoE(64, 64, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
>>> y = layer(torch.randn(2, 64, 16, 16))
>>> model = moesaic.create_model("wrn10_10_pmoe", num_classes=10)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moesaic.layers import ChannelMoE, PatchMoE, RoutedHead, SampleMoE, record_routing
from moesaic.ops import backend
from moesaic.routing import ChannelGate, ExpertChoice, SoftRouter, TokenChoice
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from moesaic.models import convert, create_model, freeze, list_models, register_with_timm
    from moesaic.training import NormalizedGD

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
    "__version__",
    "backend",
    "convert",
    "create_model",
    "freeze",
    "list_models",
    "record_routing",
    "register_with_timm",
]

# imported on first use, so that `import moesaic` stays fast
_OF_MODELS = ("convert", "create_model", "freeze", "list_models", "register_with_timm")
_LATER = {"NormalizedGD": "moesaic.training", **dict.fromkeys(_OF_MODELS, "moesaic.models")}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if sys.modules.get("timm"):
    __getattr__("register_with_timm")()
