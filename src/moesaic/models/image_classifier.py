"""Base class of image classifiers: a body that maps images to feature vectors, and a linear head.

It has the interface of timm's networks, so that what works with those works with ours: ``forward_features`` and
``forward_head``, ``get_classifier`` and ``reset_classifier``, ``feature_info`` and ``forward_intermediates``,
``set_grad_checkpointing`` and ``no_weight_decay``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_numbers
from moesaic.experts import Experts
from moesaic.experts.stacked_experts import ExpertNorm
from moesaic.models.feature_maps import FeatureDict, OutIndices, take_indices
from moesaic.models.grad_checkpointing import checkpoint_segment
from moesaic.ops.eager_conditions import check_vmap, in_transform, in_vmap

__all__ = [
    "GlobalAvgPool",
    "GlobalMaxPool",
    "ImageClassifier",
    "ImageNetwork",
    "check_classes",
    "new_classifier",
    "new_pooling",
    "stacked_biases",
]


class ImageNetwork(nn.Module):
    """The interface of timm's networks, as all networks of `create_model` have it."""

    num_features: int
    """Channels of the map that ``forward_features`` returns."""
    head_hidden_size: int
    """Length of the vectors that the classifier reads."""
    num_classes: int
    """Number of logits; 0: there is no classifier, and ``forward`` returns what it would read."""
    head: nn.Module
    """The classifier."""
    feature_info: list[FeatureDict]
    """The maps of `forward_intermediates`: channels, reduction and module of each."""
    grad_checkpointing: bool = False

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the last map (B, num_features, H, W) of images."""

    @abstractmethod
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns the logits of the last map; with ``pre_logits`` the vectors (B, head_hidden_size) in front of them.

        ``forward_head(forward_features(x))`` is ``forward(x)``.
        """

    @abstractmethod
    def forward_intermediates(
        self, x: Tensor, indices: OutIndices = None, *, intermediates_only: bool = False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the last map and the maps that ``feature_info`` describes, or with ``intermediates_only`` these.

        Args:
            x: images (B, C, H, W).
            indices: numbers of the maps, negative ones from the end; N: the last N; None: all.
            intermediates_only: leave the last map out, and the layers behind those that are asked for.
        """

    @abstractmethod
    def prune_intermediate_layers(self, indices: OutIndices = None) -> tuple[int, ...]:
        """Drops the classifier, and what the maps with these numbers do not need; returns the numbers."""

    def get_classifier(self) -> nn.Module:
        """Returns the layer that makes logits: a linear layer, or an identity where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a new one, initialised from torch's default generator.

        Args:
            num_classes: number of logits; 0: no classifier.
            global_pool: ``"avg"`` or ``"max"`` over the last map in front of it; ``""`` without a classifier: no
                pooling; None: as it is.
        """
        check_classes(type(self).__name__, num_classes)
        if global_pool is not None:
            self._reset_pooling(global_pool, num_classes)
        like = next(self.parameters())
        self.head = new_classifier(self.head_hidden_size, num_classes, like).train(self.training)
        self.num_classes = num_classes

    @abstractmethod
    def _reset_pooling(self, global_pool: str, num_classes: int) -> None:
        """Replaces the pooling in front of a classifier for so many classes."""

    @abstractmethod
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes intermediate results again in the backward pass instead of storing them.

        Unlike with ``torch.utils.checkpoint`` alone, running statistics of BatchNorm move once a step, and routing
        hooks are called once: see `moesaic.models.grad_checkpointing`.
        """

    def no_weight_decay(self) -> set[str]:
        """Returns the names of biases and norms that are stacked by expert.

        Optimizers that spare parameters of one axis from weight decay, as timm's do, would not spare these.

        >>> import moesaic
        >>> sorted(moesaic.create_model("wrn10_1_pmoe", num_classes=2).no_weight_decay())
        ['body.group3.0.moe.experts.norm.bias', 'body.group3.0.moe.experts.norm.weight']
        """
        return stacked_biases(self)

    def _checkpoints(self) -> bool:
        # torch.func knows no checkpoints
        return self.grad_checkpointing and torch.is_grad_enabled() and not in_transform()

    def _check_vmap(self) -> None:
        """Refuses per-sample gradients in training mode with a clearer error than that of torch."""
        if not self.training or not in_vmap():
            return
        for module in cast("Iterable[nn.Module]", self.modules()):
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                check_vmap(type(self).__name__, module)


class ImageClassifier(ImageNetwork):
    """Maps images (B, C, H, W) to logits (B, num_classes): ``head(body(x))``.

    Args:
        body: maps images to feature vectors (B, num_features).
        num_features: length of a feature vector.
        num_classes: number of logits; 0: no classifier.
        feature_info: maps inside of the body, from the image on; each ``module`` is a child of the body, such as
            ``"body.group1"``. What follows the last one counts as pooling. Empty: the body is not divided, and
            ``forward_features`` returns feature vectors.
    """

    def __init__(
        self, body: nn.Module, num_features: int, num_classes: int, *, feature_info: Sequence[FeatureDict] = ()
    ) -> None:
        super().__init__()
        check_classes(type(self).__name__, num_classes)
        self.body = body
        self.head = new_classifier(num_features, num_classes)
        self.head_hidden_size = num_features
        self.feature_info = list(feature_info)
        self.num_features = self.feature_info[-1]["num_chs"] if self.feature_info else num_features
        self.num_classes = num_classes

    def features(self, x: Tensor) -> Tensor:
        """Returns the feature vectors (B, head_hidden_size) that the head reads."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        self._check_vmap()
        if self._checkpoints():
            return self.forward_head(self.forward_features(x))
        return self.head(self.features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        self._check_vmap()
        for stage in self._stages():
            x = self._run_stage(stage, x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        for part in self._pooling():
            x = part(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self, x: Tensor, indices: OutIndices = None, *, intermediates_only: bool = False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        wanted = take_indices(len(self.feature_info), indices)
        maps: dict[int, Tensor] = {}
        for number, stage in enumerate(self._stages()):
            if intermediates_only and number > max(wanted):
                break
            x = self._run_stage(stage, x)
            maps[number] = x
        found = [maps[number] for number in wanted]
        return found if intermediates_only else (x, found)

    def prune_intermediate_layers(self, indices: OutIndices = None) -> tuple[int, ...]:
        wanted = take_indices(len(self.feature_info), indices)
        last = max(wanted)
        self.feature_info = self.feature_info[: last + 1]
        self.num_features = self.feature_info[-1]["num_chs"]
        children = list(self._sequence().named_children())
        self.body = nn.Sequential(OrderedDict(children[: self._ends()[-1]])).train(self.body.training)
        self.head, self.num_classes = nn.Identity(), 0
        return wanted

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self._sequence()
        self.grad_checkpointing = enable

    def _run_part(self, part: nn.Module, x: Tensor) -> Tensor:
        """Runs a child of the body; networks may run some children by kernels."""
        return part(x)

    def _run_stage(self, stage: Sequence[nn.Module], x: Tensor) -> Tensor:
        if not self._checkpoints():
            for part in stage:
                x = self._run_part(part, x)
            return x
        for segment in _segments(stage):

            def run(x: Tensor, segment: Sequence[nn.Module] = segment) -> Tensor:
                for part in segment:
                    x = self._run_part(part, x)
                return x

            x = checkpoint_segment(segment, run, x)
        return x

    def _stages(self) -> list[list[nn.Module]]:
        """The children of the body up to each map."""
        if not self.feature_info:
            return [[self.body]]
        children = list(self._sequence())
        return [children[first:end] for first, end in pairwise((0, *self._ends()))]

    def _pooling(self) -> list[nn.Module]:
        """The children of the body behind the last map."""
        return list(self._sequence())[self._ends()[-1] :] if self.feature_info else []

    def _ends(self) -> list[int]:
        """Number of children of the body up to each map."""
        place = {f"body.{name}": number for number, (name, _) in enumerate(self._sequence().named_children())}
        return [place[each["module"]] + 1 for each in self.feature_info]

    def _sequence(self) -> nn.Sequential:
        if not self.feature_info or not isinstance(self.body, nn.Sequential):
            what = "no feature_info" if not self.feature_info else f"a {type(self.body).__name__} for its body"
            raise TypeError(
                f"{type(self).__name__}: has {what}, so its maps are unknown; give an nn.Sequential and feature_info"
            )
        return self.body

    def _reset_pooling(self, global_pool: str, num_classes: int) -> None:
        new = new_pooling(type(self).__name__, global_pool, num_classes)
        pooling = self._pooling()
        if len(pooling) != 1 or not isinstance(pooling[0], (GlobalAvgPool, GlobalMaxPool, nn.Identity)):
            raise ValueError(
                f"{type(self).__name__}: global_pool={global_pool!r}, but its classifier reads "
                f"{self.head_hidden_size} values of a map of {self.num_features} channels, not pooled ones; leave "
                "global_pool out"
            )
        name, _ = list(self._sequence().named_children())[-1]
        self._sequence().set_submodule(name, new.train(self.training))


class GlobalAvgPool(nn.Module):
    """Mean over height and width: (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class GlobalMaxPool(nn.Module):
    """Maximum over height and width: (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3))


def stacked_biases(model: nn.Module) -> set[str]:
    """Returns the names of biases and norms that are stacked by expert."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, ExpertNorm) or (isinstance(module, Experts) and name.startswith("bias"))
    }


def new_pooling(owner: str, global_pool: str, num_classes: int) -> nn.Module:
    """Returns the layer between the last map and a classifier: ``"avg"``, ``"max"``, or ``""`` without classifier.

    >>> new_pooling("ResNet", "max", 10)
    GlobalMaxPool()
    """
    kinds: dict[str, type[nn.Module]] = {"avg": GlobalAvgPool, "max": GlobalMaxPool, "": nn.Identity}
    check_choice(f"{owner}.reset_classifier", "global_pool", global_pool, tuple(kinds))
    if not global_pool and num_classes:
        raise ValueError(
            f"{owner}: global_pool='' leaves num_classes={num_classes} without vectors to read; use "
            "num_classes=0, or global_pool='avg' or 'max'"
        )
    return kinds[global_pool]()


def new_classifier(features: int, num_classes: int, like: Tensor | None = None) -> nn.Module:
    """Returns a linear layer on the device and in the dtype of ``like``, or an identity for no class.

    >>> new_classifier(8, 2), new_classifier(8, 0)
    (Linear(in_features=8, out_features=2, bias=True), Identity())
    """
    if not num_classes:
        return nn.Identity()
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    return nn.Linear(features, num_classes, device=device, dtype=dtype)


def check_classes(owner: str, num_classes: int) -> None:
    """Raises unless ``num_classes`` is a whole number of 0 or more.

    >>> check_classes("ResNet", -1)
    Traceback (most recent call last):
    ValueError: ResNet: num_classes=-1; it must be 1 or more, or 0 for a network without classifier
    """
    if not hasattr(num_classes, "__index__"):
        raise TypeError(f"{owner}: num_classes={num_classes!r} is a {type(num_classes).__name__}; it must be a number")
    limit = "1 or more, or 0 for a network without classifier"
    check_numbers(owner, limit, lambda value: value >= 0, {"num_classes": num_classes})


def _segments(stage: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The parts of a stage that are checkpointed: each block, with the layers that follow it."""
    segments: list[list[nn.Module]] = []
    for part in _blocks(stage):
        is_block = any(True for _ in part.children())
        if is_block or not segments:
            segments.append([part])
        else:
            segments[-1].append(part)
    return segments


def _blocks(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Parts of a stage, with sequences of blocks taken apart."""
    for part in parts:
        children = list(part.children())
        if type(part) is nn.Sequential and children and all(any(True for _ in each.children()) for each in children):
            yield from _blocks(children)
        else:
            yield part
