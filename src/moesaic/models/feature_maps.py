"""``FeatureMaps``: the maps of a network at several resolutions, as timm's ``features_only=True`` gives them.

A network describes its maps in ``feature_info``, in timm's words: a dictionary per map with its channels ``num_chs``,
its ``reduction`` (side of the image over side of the map) and the ``module`` that it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

from torch import Tensor, nn

__all__ = ["FeatureDict", "FeatureInfo", "FeatureMaps", "OutIndices", "take_indices"]

OutIndices = int | Sequence[int] | None
"""Maps to return: their numbers, negative ones from the end; the last N; None: all."""


class FeatureDict(TypedDict):
    """Description of a map."""

    num_chs: int
    reduction: int
    module: str


class FeatureInfo:
    """Channels, reductions and modules of the returned maps.

    >>> info = FeatureInfo([{"num_chs": 16, "reduction": 1, "module": "stem"},
    ...                     {"num_chs": 64, "reduction": 4, "module": "stage"}], out_indices=(1,))
    >>> info.channels(), info.reduction(), info.module_name(), len(info)
    ([64], [4], ['stage'], 2)
    """

    def __init__(self, info: Sequence[FeatureDict], out_indices: OutIndices = None) -> None:
        self.info = list(info)
        self.out_indices = take_indices(len(self.info), out_indices)

    def channels(self, idx: int | Sequence[int] | None = None) -> Any:
        """Channels of the returned maps; with ``idx`` of one map of the network or of several."""
        return self.get("num_chs", idx)

    def reduction(self, idx: int | Sequence[int] | None = None) -> Any:
        """Reductions: side of the image over side of the map."""
        return self.get("reduction", idx)

    def module_name(self, idx: int | Sequence[int] | None = None) -> Any:
        """Names of the modules that the maps come from."""
        return self.get("module", idx)

    def get(self, key: str, idx: int | Sequence[int] | None = None) -> Any:
        """A field of the returned maps, of one map, or of several."""
        if isinstance(idx, int):
            return cast("dict[str, Any]", self.info[idx])[key]
        return [cast("dict[str, Any]", self.info[number])[key] for number in (self.out_indices if idx is None else idx)]

    def get_dicts(self, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The descriptions of the returned maps, or some of their fields."""
        found = [cast("dict[str, Any]", self.info[number]) for number in self.out_indices]
        return [{key: each[key] for key in (each if keys is None else keys)} for each in found]

    def __getitem__(self, number: int) -> FeatureDict:
        return self.info[number]

    def __len__(self) -> int:
        return len(self.info)


class FeatureMaps(nn.Module):
    """Returns the maps of a network, smallest reduction first: ``[(B, C, H, W), …]``.

    ``create_model(…, features_only=True)`` makes one. Layers behind the last map are dropped.

    Args:
        model: a network with ``feature_info`` and ``forward_intermediates``, such as those of `create_model`.
        out_indices: numbers of the maps to return, negative ones from the end; N: the last N; None: all.

    >>> import torch, moesaic
    >>> backbone = moesaic.create_model("wrn10_1", num_classes=0, features_only=True, out_indices=(1, 2, 3))
    >>> [tuple(maps.shape) for maps in backbone(torch.zeros(2, 3, 32, 32))]
    [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8)]
    >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
    ([16, 32, 64], [1, 2, 4])
    """

    def __init__(self, model: nn.Module, out_indices: OutIndices = None) -> None:
        super().__init__()
        about = cast("Sequence[FeatureDict]", getattr(model, "feature_info", ()))
        if not about or not hasattr(model, "forward_intermediates"):
            raise TypeError(
                f"FeatureMaps: {type(model).__name__} does not describe its maps in feature_info; use a network of "
                "create_model, or timm's own features_only for networks of timm"
            )
        self.feature_info = FeatureInfo(about, out_indices)
        cast("Any", model).prune_intermediate_layers(self.feature_info.out_indices)
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns the maps of images (B, C, H, W)."""
        model = cast("Any", self.model)
        return model.forward_intermediates(x, self.feature_info.out_indices, intermediates_only=True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes intermediate results again in the backward pass instead of storing them."""
        cast("Any", self.model).set_grad_checkpointing(enable)


def take_indices(maps: int, indices: OutIndices) -> tuple[int, ...]:
    """Returns the numbers of the chosen maps, counted from the start.

    >>> take_indices(5, None), take_indices(5, 2), take_indices(5, (0, -1))
    ((0, 1, 2, 3, 4), (3, 4), (0, 4))
    """
    if indices is None:
        return tuple(range(maps))
    if isinstance(indices, int):
        if not 0 < indices <= maps:
            raise ValueError(f"out_indices={indices}; the network has {maps} maps: use the last 1 to {maps}")
        return tuple(range(maps - indices, maps))
    found = [maps + number if number < 0 else number for number in indices]
    if not found or not all(0 <= number < maps for number in found):
        raise ValueError(f"out_indices={tuple(indices)}; the network has {maps} maps: use numbers from 0 to {maps - 1}")
    return tuple(found)
