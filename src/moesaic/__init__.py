"""moesaic: mixtures of experts in vision, routed by patch, by sample and by channel.

>>> import torch, moesaic
>>> layer = moesaic.PatchMoE(64, 64, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
>>> y = layer(torch.randn(2, 64, 16, 16))
"""

from typing import TYPE_CHECKING, Any

from moesaic.layers import PatchMoE, SampleMoE, record_routing
from moesaic.ops import backend
from moesaic.record import Routing
from moesaic.routing import ExpertChoice, SoftRouter, TokenChoice

if TYPE_CHECKING:
    from moesaic.training import NormalizedGD

__version__ = "0.1.0.dev0"

__all__ = [
    "ExpertChoice",
    "NormalizedGD",
    "PatchMoE",
    "Routing",
    "SampleMoE",
    "SoftRouter",
    "TokenChoice",
    "__version__",
    "backend",
    "record_routing",
]


def __getattr__(name: str) -> Any:
    # the room of training brings models and data along, which whoever wants a layer need not wait for
    if name == "NormalizedGD":
        from moesaic.training import NormalizedGD

        return NormalizedGD
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
