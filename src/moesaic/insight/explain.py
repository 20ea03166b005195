"""Explains the routing of a trained network over many images, as plain numbers that can be written as JSON.

`collect_outputs` runs the network and records its predictions and its routing. `explain` summarises them:
which patches each expert selects in images of each class, how much the selection says about the class,
the patches with the highest scores, receptive fields, and the accuracy per class and group; for gated
channels see `channel_explanation`. `report.write_explanation` writes a page of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.insight.channel_explanation import ChannelExplanation, GatedNetwork, GatedOutputs, explain_channels
from moesaic.insight.class_routing import MIN_CLASS_IMAGES, Information, check_labels, class_maps, class_routing
from moesaic.insight.metrics import summary
from moesaic.insight.patch_features import record_features
from moesaic.insight.receptive_field import ReceptiveField, receptive_field
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.recording import record_routing, routed_layers
from moesaic.models.inspection import eval_mode, first_tensor
from moesaic.routing_record import Chooser, Routing, Unit

__all__ = [
    "Accuracy",
    "Explanation",
    "ForwardPass",
    "LayerExplanation",
    "TopPatch",
    "collect_outputs",
    "explain",
    "top_patches",
]

_FIELD_IMAGES = 4
"""Images that the receptive field is measured on."""

Maps = tuple[tuple[tuple[float, ...], ...], ...]
"""(K, E, N)"""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """Predictions and routing of a network for some images; made by `collect_outputs`."""

    probabilities: Tensor
    """(B, K), on the CPU."""
    routing: dict[str, Routing]
    """The routing of every routed layer, by name."""
    fields: dict[str, ReceptiveField | None]
    """The receptive field of a patch in each layer; None if its units have no position in the image."""
    blocks: dict[str, int] = field(default_factory=dict[str, int])
    """Channels per gate of each layer with gated channels."""
    gated: GatedOutputs | None = None
    """Embeddings and costs, if the network is a `GatedNetwork`."""
    features: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """(B, N, F): what the router of a layer with a grid reads of each patch; see `patch_features`."""

    def images(self, start: int, stop: int) -> ForwardPass:
        """The outputs of the images from ``start`` to ``stop``."""
        own = slice(start, stop)
        gated = self.gated
        if gated is not None:
            gated = replace(gated, embedding=gated.embedding[own], macs=gated.macs[own])
        routing = {name: _images(each, own) for name, each in self.routing.items()}
        features = {name: each[own] for name, each in self.features.items()}
        return replace(self, probabilities=self.probabilities[own], routing=routing, gated=gated, features=features)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over the images of a class or group."""

    name: str
    correct: int
    images: int

    @property
    def percent(self) -> float:
        """The accuracy in percent."""
        return 100 * self.correct / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval (Wilson) in percent.

        >>> low, high = Accuracy("cats", 9, 10).interval
        >>> round(low, 1), round(high, 1)
        (59.6, 98.2)
        """
        n, share = max(1, self.images), self.percent / 100
        z2 = NormalDist().inv_cdf(0.975) ** 2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = (z2 * (share * (1 - share) / n + z2 / (4 * n * n))) ** 0.5 / (1 + z2 / n)
        return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


@dataclass(frozen=True)
class TopPatch:
    """A patch with a high score of an expert: the one with the highest score in its image."""

    image: int
    """Index of the image."""
    patch: int
    """Index of the patch, row by row."""
    score: float
    gate: float
    label: int
    """Class of the image, true or predicted (see `Explanation.by`)."""


@dataclass(frozen=True)
class LayerExplanation:
    """The routing of one layer."""

    name: str
    unit: Unit
    chooser: Chooser
    grid: tuple[int, int] | None
    """Rows and columns of patches; None if units have no position."""
    experts: int
    units: int
    """Patches per image; tokens per image on the grid."""
    patches_per_expert: int | None
    """None unless experts choose."""
    selection_rate: Maps
    """(K, E, N): share of the images of a class in which the expert selects the patch."""
    gate: Maps
    """(K, E, N): mean gate of the selected patch."""
    information: Information
    """Mutual information of the class and one (expert, patch) selection of the layer."""
    expert_information: tuple[Information, ...]
    """The same for one patch of each expert."""
    probe_accuracy: float | None
    """Accuracy of a naive Bayes classifier that sees the selection alone; None if it was not run."""
    majority_share: float
    """Share of the most frequent class, which a constant classifier would reach."""
    top_patches: tuple[tuple[TopPatch, ...], ...]
    """For each expert, highest score first."""
    field: ReceptiveField | None
    load_share: tuple[float, ...]
    dead_experts: tuple[int, ...]
    routing_entropy: float
    """Normalised: 0 for certain choices, 1 for uniform ones."""
    coverage: float
    """Share of patches that at least one expert selects."""
    overlap: float
    """Mean Jaccard similarity of the patches of two experts: 1 the same patches, 0 disjoint."""
    extent: tuple[float, float] | None = None
    """Rows and columns of patches that the map fills if it was padded; None: all of the grid."""
    prefix_rate: Maps = ()
    """(K, E, P): share of the images of a class in which the expert selects each token without a place on the grid,
    such as the class token; for a soft router, the mean dispatch weight."""

    @property
    def prefix(self) -> int:
        """P, tokens of an image without a place on the grid."""
        return len(self.prefix_rate[0][0]) if self.prefix_rate else 0

    @property
    def filled(self) -> tuple[float, float] | None:
        """Rows and columns of patches that the map fills; None if units have no position."""
        return self.grid if self.extent is None else self.extent


@dataclass(frozen=True)
class Explanation:
    """The routing of a network over a set of images; made by `explain`."""

    images: int
    by: Literal["label", "prediction"]
    """Whether classes are the true labels or, without labels, the predictions."""
    class_names: tuple[str, ...]
    class_images: tuple[int, ...]
    accuracy: Accuracy | None
    """Over all images; None without labels, and then the two below are empty."""
    class_accuracy: tuple[Accuracy, ...]
    group_accuracy: tuple[Accuracy, ...]
    """Of groups that differ from the classes."""
    layers: tuple[LayerExplanation, ...]
    """Layers that route patches or samples."""
    channels: ChannelExplanation | None = None
    """Layers with gated channels; None if there are none."""

    @property
    def small_classes(self) -> tuple[str, ...]:
        """Classes with fewer than `MIN_CLASS_IMAGES` images, whose numbers are unreliable."""
        pairs = zip(self.class_names, self.class_images, strict=True)
        return tuple(name for name, images in pairs if images < MIN_CLASS_IMAGES)


def collect_outputs(
    model: nn.Module,
    pixels: Tensor,
    transform: Callable[[Tensor], Tensor],
    *,
    layers: Sequence[str] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> ForwardPass:
    """Runs a network on images and records its predictions and its routing.

    Args:
        model: a network with routed layers.
        pixels: images (B, C, H, W).
        transform: maps a batch of ``pixels`` to the input of the model.
        layers: names of routed layers; all of them by default.
        batch_size: images per forward pass.
        device: where the model runs.
        progress: called after each batch with the number of images done.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> found = collect_outputs(model, torch.zeros(5, 3, 8, 8, dtype=torch.uint8), lambda pixels: pixels / 255)
    >>> found.probabilities.shape, found.routing["0"].index.shape
    (torch.Size([5, 2]), torch.Size([5, 2, 1]))
    """
    check_positive("collect_outputs", batch_size=batch_size)
    if not len(pixels):
        raise ValueError("collect_outputs: there is no image; give at least one")
    known = tuple(routed_layers(model))
    if not known:
        raise ValueError(
            f"collect_outputs: this {type(model).__name__} has no routed layer; use a model that has one, "
            "such as wrn10_10_pmoe or vgg16_deepmoe, or add one with moesaic.convert"
        )
    picked = known if layers is None else [check_choice("collect_outputs", "layer", name, known) for name in layers]
    own = {name: layer for name, layer in routed_layers(model).items() if name in picked}
    model = model.to(device)
    probabilities: list[Tensor] = []
    gated: list[tuple[Tensor, Tensor]] = []
    with eval_mode(model):
        with torch.no_grad(), record_routing(model, keep="all") as routing, record_features(own) as features:
            for start in range(0, len(pixels), batch_size):
                x = transform(pixels[start : start + batch_size].to(device))
                if isinstance(model, GatedNetwork):
                    output = model.forward_with_routing(x)
                    logits = cast("Tensor", output.logits)
                    gated.append((output.embedding.cpu(), model.macs(output.routing).cpu()))
                else:
                    logits = first_tensor(model(x))
                probabilities.append(logits.float().softmax(-1).cpu())
                if progress is not None:
                    progress(min(start + batch_size, len(pixels)))
        sample = transform(pixels[:_FIELD_IMAGES].to(device))
        fields = {name: receptive_field(model, name, sample) for name in picked if routing[name].grid is not None}
    outputs = None
    if isinstance(model, GatedNetwork):
        embeddings, macs = zip(*gated, strict=True)
        outputs = GatedOutputs(torch.cat(embeddings), torch.cat(macs), int(model.dense_macs), int(model.fixed_macs))
    return ForwardPass(
        torch.cat(probabilities),
        {name: routing[name] for name in picked},
        {name: fields.get(name) for name in picked},
        {name: layer.block for name, layer in own.items() if isinstance(layer, ChannelMoE)},
        outputs,
        {name: found for name in picked if (found := _features(features[name], routing[name])) is not None},
    )


def explain(
    outputs: ForwardPass,
    class_names: Sequence[str],
    *,
    labels: Tensor | None = None,
    groups: Tensor | None = None,
    group_names: Sequence[str] = (),
    top_patches: int = 12,
    seed: int = 0,
) -> Explanation:
    """Summarises the routing of a `ForwardPass`.

    Args:
        outputs: predictions and routing, from `collect_outputs`.
        class_names: one name for each output of the network.
        labels: true classes (B,); without them classes are the predicted ones, and there is no accuracy.
        groups: another grouping (B,) of the images, such as by a feature that the network should ignore; its
            accuracy is reported per group.
        group_names: names of the groups.
        top_patches: number of top patches per expert.
        seed: seed of shuffles and folds.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    >>> outputs = collect_outputs(model, pixels, lambda pixels: pixels / 255)
    >>> explanation = explain(outputs, ["cat", "dog"], labels=torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> explanation.class_images, explanation.layers[0].grid, len(explanation.layers[0].top_patches[1])
    ((3, 3), (2, 2), 6)
    """
    check_positive("explain", top_patches=top_patches)
    B, K = outputs.probabilities.shape
    if len(class_names) != K:
        raise ValueError(
            f"explain: {len(class_names)} class names for a network with {K} outputs; give one name for each output"
        )
    predicted = outputs.probabilities.argmax(1)
    classes = predicted if labels is None else check_labels("explain", labels, B, K)
    correct = None if labels is None else predicted == classes
    members = None if groups is None else check_labels("explain: groups", groups, B, len(group_names))
    channels = {name: routing for name, routing in outputs.routing.items() if routing.unit == "channel"}
    return Explanation(
        images=B,
        by="prediction" if labels is None else "label",
        class_names=tuple(class_names),
        class_images=tuple(int((classes == k).sum()) for k in range(K)),
        accuracy=None if correct is None else Accuracy("all", int(correct.sum()), B),
        class_accuracy=_accuracies(correct, classes, class_names),
        group_accuracy=_accuracies(correct, members, group_names),
        layers=tuple(
            _layer(name, routing, outputs.fields.get(name), classes, K, top_patches, seed)
            for name, routing in outputs.routing.items()
            if name not in channels
        ),
        channels=explain_channels(
            channels,
            outputs.blocks,
            outputs.gated,
            classes=classes,
            class_names=class_names,
            probabilities=outputs.probabilities,
            correct=correct,
            seed=seed,
        )
        if channels
        else None,
    )


def _features(parts: list[Tensor], routing: Routing) -> Tensor | None:
    """The features of the units of a grid; None if there is none, or its router reads something else than a map."""
    if routing.grid is None or routing.unit == "channel" or sum(map(len, parts)) != routing.batch:
        return None
    if any(part.shape[1] != routing.units for part in parts):
        return None
    return torch.cat(parts)[:, routing.prefix :]


def _accuracies(correct_B: Tensor | None, members_B: Tensor | None, names: Sequence[str]) -> tuple[Accuracy, ...]:
    if correct_B is None or members_B is None:
        return ()
    own_KB = [members_B == k for k in range(len(names))]
    return tuple(
        Accuracy(name, int(correct_B[own].sum()), int(own.sum())) for name, own in zip(names, own_KB, strict=True)
    )


def _layer(
    name: str, routing: Routing, field: ReceptiveField | None, classes_B: Tensor, K: int, count: int, seed: int
) -> LayerExplanation:
    everything, totals = routing, summary(routing)
    if routing.grid is not None:
        routing = routing.without_prefix()
    by_class = class_routing(routing, classes_B, K, seed=seed)
    prefix = everything.units - routing.units
    prefix_rate = class_maps(everything, classes_B, K).selection_rate[..., :prefix] if prefix else None
    per_expert = routing.index.shape[2] if routing.index is not None and routing.chooser == "expert" else None
    return LayerExplanation(
        name=name,
        unit=routing.unit,
        chooser=routing.chooser,
        grid=routing.grid,
        experts=routing.experts,
        units=routing.units,
        patches_per_expert=per_expert,
        selection_rate=_rounded(by_class.selection_rate),
        gate=_rounded(by_class.gate),
        information=by_class.information,
        expert_information=by_class.expert_information,
        probe_accuracy=by_class.probe_accuracy,
        majority_share=by_class.majority_share,
        top_patches=tuple(top_patches(routing, e, classes_B, count) for e in range(routing.experts)),
        field=field,
        load_share=totals.load_share,
        dead_experts=totals.dead_experts,
        routing_entropy=totals.routing_entropy,
        coverage=totals.coverage,
        overlap=totals.overlap,
        extent=routing.extent,
        prefix_rate=() if prefix_rate is None else _rounded(prefix_rate),
    )


def _images(routing: Routing, own: slice) -> Routing:
    return replace(
        routing,
        scores=routing.scores[own],
        index=None if routing.index is None else routing.index[own],
        gate=routing.gate[own],
        dispatch=None if routing.dispatch is None else routing.dispatch[own],
    )


def top_patches(routing: Routing, expert: int, classes_B: Tensor, count: int) -> tuple[TopPatch, ...]:
    """The patches with the highest scores of an expert: at most one per image, so that no image fills the list alone.

    >>> import torch
    >>> scores = torch.tensor([[[0.5], [3.0]], [[2.0], [1.0]]])                      # two images of two patches
    >>> routing = Routing("patch", scores, torch.tensor([[[1]], [[0]]]), torch.ones(2, 1, 1), "expert", grid=(1, 2))
    >>> [(each.image, each.patch) for each in top_patches(routing, 0, torch.tensor([0, 1]), 12)]
    [(0, 1), (1, 0)]
    """
    scores_BNE = routing.scores if routing.scores.ndim == 3 else routing.scores.mean(-1)
    score_BN = scores_BNE[..., expert].detach().cpu().float()
    score_BN = score_BN.masked_fill(~routing.mask[..., expert].cpu(), -torch.inf)
    gate_BN = routing.weights[..., expert].detach().cpu()
    best_B, patch_B = score_BN.max(1)
    order = cast("list[int]", best_B.sort(descending=True, stable=True).indices[:count].tolist())
    return tuple(
        TopPatch(b, int(patch_B[b]), float(best_B[b]), float(gate_BN[b, int(patch_B[b])]), int(classes_B[b]))
        for b in order
        if best_B[b] > -torch.inf
    )


def _rounded(values_KEN: Tensor) -> Maps:
    nested = cast("list[list[list[float]]]", values_KEN.tolist())
    return tuple(tuple(tuple(round(value, 5) for value in row) for row in rows) for rows in nested)
