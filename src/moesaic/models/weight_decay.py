"""Parameters of transformers that have no weight decay: biases, norms, class tokens and position embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from moesaic.models.image_classifier import stacked_biases

__all__ = ["undecayed_parameters"]

_TOKEN_NAMES = ("cls_token", "dist_token", "reg_token", "pos_embed")
"""timm's names; they have several axes, and scale nothing."""


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Returns the names of the parameters of a network with LayerNorm that have no weight decay, as in timm's recipes.

    They are all parameters of one axis, biases that are stacked by expert, tokens and position embeddings, and what
    the network's ``no_weight_decay()`` names. A network without LayerNorm has none: convolutional networks were
    trained here with weight decay on everything, and their recorded results depend on it.

    >>> import moesaic
    >>> sorted(undecayed_parameters(moesaic.create_model("vit_tiny_patch4_32", num_classes=2, depth=1)))[-4:]
    ['norm.bias', 'norm.weight', 'patch_embed.proj.bias', 'pos_embed']
    """
    if not any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in model.modules()):
        return set()
    own: Any = getattr(model, "no_weight_decay", set[str])
    parameters = dict(cast("Iterable[tuple[str, Tensor]]", model.named_parameters()))
    plain = {name for name, each in parameters.items() if each.ndim <= 1 or name.rpartition(".")[2] in _TOKEN_NAMES}
    named = {name for name in own() if name in parameters}  # timm's ViT names a register token that it may not have
    return plain | stacked_biases(model) | named
