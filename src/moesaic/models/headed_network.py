"""``HeadedNetwork``: a backbone without its pooling and classifier, and a head of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from moesaic.layers.heads import resize_head
from moesaic.models.feature_maps import FeatureDict

__all__ = ["HeadedNetwork"]


class HeadedNetwork(nn.Module):
    """Maps images (B, C, H, W) to logits: ``head(features)``, with the last map or tokens of the backbone as features.

    Args:
        backbone: a network of timm or of `create_model`; its ``forward_features`` is used.
        head: maps a map (B, C, H, W) or tokens (B, N, C) to logits, such as `RoutedHead`.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        config: Any = getattr(backbone, "pretrained_cfg", None)
        if isinstance(config, dict):
            self.pretrained_cfg = {**cast("dict[str, Any]", config), "classifier": "head"}

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the last map (B, C, H, W), or the last tokens (B, N, C) without class and register tokens."""
        features: Tensor = self._backbone.forward_features(x)
        if features.ndim == 3:
            return features[:, self._prefix_tokens :]
        return features.permute(0, 3, 1, 2) if self._nhwc else features

    @property
    def reshapes_features(self) -> bool:
        """Whether `forward_features` returns other features than the backbone's: fewer tokens, or other axes."""
        return self._prefix_tokens > 0 or self._nhwc

    @property
    def _prefix_tokens(self) -> int:
        return getattr(self.backbone, "num_prefix_tokens", 0)

    @property
    def _nhwc(self) -> bool:
        return getattr(self.backbone, "output_fmt", "NCHW") == "NHWC"  # Swin and its like

    def forward_head(self, features: Tensor) -> Tensor:
        """Returns the logits of features."""
        return self.head(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """Returns the head."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the head by a new one of its kind, initialised from torch's default generator."""
        self.head = resize_head(self.head, num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes intermediate results of the backbone again in the backward pass instead of storing them."""
        self._backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the backbone's parameters that should have no weight decay."""
        names = self._backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else set[str]()
        return {f"backbone.{name}" for name in names}

    @property
    def num_features(self) -> int:
        """Channels of the features."""
        return self._backbone.num_features

    @property
    def feature_info(self) -> Sequence[FeatureDict]:
        """The maps of the backbone."""
        maps = cast("Sequence[FeatureDict]", self._backbone.feature_info)
        return [{**each, "module": f"backbone.{each['module']}"} for each in maps]

    @property
    def _backbone(self) -> Any:
        return self.backbone
