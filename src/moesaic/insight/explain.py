"""What a trained network looks at: its routing over many images, as plain numbers that JSON takes.

`look` runs the network and keeps what it answered and how it routed; `explain` makes of that what a
reader wants to know: where each expert looks in images of each class, how much the place tells of
the class, which patches an expert likes best, how much of the image a patch knows, and which
classes and groups the network gets right; of gated channels what `channel_explanation` tells.
`report.write_explanation` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice, check_positive
from moesaic.insight.channel_explanation import ChannelExplanation, Gated, GatedNetwork, explain_channels
from moesaic.insight.class_routing import Information, class_routing
from moesaic.insight.metrics import summary
from moesaic.insight.receptive_field import Field, receptive_field
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.layers.recording import record_routing, routed_layers
from moesaic.routing_record import Chooser, Routing, Unit

__all__ = ["Explanation", "Favourite", "LayerExplanation", "Look", "Score", "explain", "look"]

FEW = 20
"""With fewer images of a class than that, numbers about the class mean little."""

FOR_THE_FIELD = 4
"""Images that the receptive field is measured on."""

Maps = tuple[tuple[tuple[float, ...], ...], ...]
"""(K, E, N)"""


@dataclass(frozen=True, eq=False)
class Look:
    """What a network made of some images; made by `look`."""

    probabilities: Tensor
    """(B, K), on the CPU."""
    routing: dict[str, Routing]
    """Of every routed layer, by its name."""
    fields: dict[str, Field | None]
    """What a patch of it sees of the image, where what it routes has a place there."""
    blocks: dict[str, int] = field(default_factory=dict[str, int])
    """Of layers whose channels are gated: how many share a gate."""
    gated: Gated | None = None
    """What the network tells of embeddings and costs, where it has gates and does."""


@dataclass(frozen=True)
class Score:
    """How many images of a class or group the network gets right."""

    name: str
    right: int
    images: int

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.right / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy lies with 95 % confidence (Wilson's interval), in percent.

        >>> low, high = Score("cats", 9, 10).interval
        >>> round(low, 1), round(high, 1)
        (59.6, 98.2)
        """
        n, share = max(1, self.images), self.accuracy / 100
        z2 = NormalDist().inv_cdf(0.975) ** 2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = (z2 * (share * (1 - share) / n + z2 / (4 * n * n))) ** 0.5 / (1 + z2 / n)
        return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


@dataclass(frozen=True)
class Favourite:
    """A patch to which an expert gave a high score: the best of its image."""

    image: int
    """Which image of those explained."""
    patch: int
    """Which patch of it, row by row."""
    score: float
    gate: float
    group: int
    """The image's class, true or predicted, as the explanation's ``by`` says."""


@dataclass(frozen=True)
class LayerExplanation:
    """What one routed layer did."""

    name: str
    unit: Unit
    chooser: Chooser
    grid: tuple[int, int] | None
    """Rows and columns of patches; None where units have no place."""
    experts: int
    units: int
    """Patches in an image."""
    patches_per_expert: int | None
    """Where experts choose."""
    reach: Maps
    """(K, E, N): in which share of a class's images the expert works on the patch."""
    gate: Maps
    """(K, E, N): with which gate it does, on average."""
    information: Information
    """What one choice of the layer, expert and patch, tells of the class."""
    expert_information: tuple[Information, ...]
    """What one patch of each expert tells of it."""
    told: float | None
    """Share of images whose class can be told from the choices alone, by a simple rule; None: not tried."""
    commonest: float
    """The share that always naming the commonest class would get."""
    favourites: tuple[tuple[Favourite, ...], ...]
    """For each expert, best first."""
    field: Field | None
    load_share: tuple[float, ...]
    dead_experts: tuple[int, ...]
    routing_entropy: float
    """0: the choosers were certain, 1: as good as random."""
    coverage: float
    """Share of patches that some expert works on."""
    overlap: float
    """How alike the experts' patches are, averaged over pairs: 1 the same, 0 none shared."""


@dataclass(frozen=True)
class Explanation:
    """What a network looks at in a set of images; made by `explain`."""

    images: int
    by: Literal["label", "prediction"]
    """Whether an image's class is its true one or, where that is not known, the predicted one."""
    class_names: tuple[str, ...]
    class_images: tuple[int, ...]
    score: Score | None
    """Over all images, where their true classes are known; and so for the two below."""
    class_scores: tuple[Score, ...]
    group_scores: tuple[Score, ...]
    """Of groups that are not the classes."""
    layers: tuple[LayerExplanation, ...]
    """Those that route patches or samples."""
    channels: ChannelExplanation | None = None
    """Of the layers whose channels are gated; None: there are none."""

    @property
    def few(self) -> tuple[str, ...]:
        """The classes with so few images that what is said about them means little."""
        pairs = zip(self.class_names, self.class_images, strict=True)
        return tuple(name for name, images in pairs if images < FEW)


def look(
    model: nn.Module,
    pixels: Tensor,
    view: Callable[[Tensor], Tensor],
    *,
    layers: Sequence[str] | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    told: Callable[[int], None] | None = None,
) -> Look:
    """Run a network on images and keep what it answers and how it routes.

    ``view`` makes of a batch of ``pixels`` (B, C, H, W) what the model takes; ``layers`` picks
    routed layers by name, all of them by default; ``told`` hears after each batch how many images
    are done.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> found = look(model, torch.zeros(5, 3, 8, 8, dtype=torch.uint8), lambda pixels: pixels / 255)
    >>> found.probabilities.shape, found.routing["0"].index.shape
    (torch.Size([5, 2]), torch.Size([5, 2, 1]))
    """
    check_positive("look", batch=batch)
    if not len(pixels):
        raise ValueError("look: there is no image to look at; give at least one")
    known = tuple(routed_layers(model))
    if not known:
        raise ValueError(
            f"look: this {type(model).__name__} has no routed layer, so there is no routing to explain; take a model "
            "with one, such as wrn10_10_pmoe or vgg16_deepmoe, or put one into it with moesaic.convert"
        )
    picked = [check_choice("look", "layer", name, known) for name in layers] if layers is not None else list(known)
    training = model.training
    model = model.to(device).eval()
    answers: list[Tensor] = []
    told_of: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad(), record_routing(model, keep="all") as routing:
            for start in range(0, len(pixels), batch):
                x = view(pixels[start : start + batch].to(device))
                if isinstance(model, GatedNetwork):
                    output = model.forward_with_routing(x)
                    logits = cast("Tensor", output.logits)
                    told_of.append((output.embedding.cpu(), model.macs(output.routing).cpu()))
                else:
                    logits = cast("Tensor", model(x))
                answers.append(logits.float().softmax(-1).cpu())
                if told is not None:
                    told(min(start + batch, len(pixels)))
        few = view(pixels[:FOR_THE_FIELD].to(device))
        fields = {name: receptive_field(model, name, few) for name in picked if routing[name].grid is not None}
    finally:
        model.train(training)
    own = {name: layer for name, layer in routed_layers(model).items() if name in picked}
    return Look(
        torch.cat(answers),
        {name: routing[name] for name in picked},
        {name: fields.get(name) for name in picked},
        {name: layer.block for name, layer in own.items() if isinstance(layer, ChannelMoE)},
        _gated(model, told_of),
    )


def explain(
    found: Look,
    class_names: Sequence[str],
    *,
    labels: Tensor | None = None,
    groups: Tensor | None = None,
    group_names: Sequence[str] = (),
    favourites: int = 12,
    seed: int = 0,
) -> Explanation:
    """What the experts look at, over the images of a `Look`; of gated channels, which are open.

    ``labels`` (B,) are the images' true classes; without them classes are the predicted ones, and
    nothing is said about accuracy. ``groups`` (B,) part the images in another way, such as by a
    feature that the network should not care about: each gets an accuracy of its own.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    >>> found = look(model, pixels, lambda pixels: pixels / 255)
    >>> told = explain(found, ["cat", "dog"], labels=torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> told.class_images, told.layers[0].grid, len(told.layers[0].favourites[1])
    ((3, 3), (2, 2), 6)
    """
    check_positive("explain", favourites=favourites)
    B, K = found.probabilities.shape
    if len(class_names) != K:
        raise ValueError(f"explain: {len(class_names)} class names for a network of {K} outputs; give one for each")
    predicted = found.probabilities.argmax(1)
    classes = predicted if labels is None else labels.cpu().long()
    right = None if labels is None else predicted == classes
    channels = {name: routing for name, routing in found.routing.items() if routing.unit == "channel"}
    return Explanation(
        images=B,
        by="prediction" if labels is None else "label",
        class_names=tuple(class_names),
        class_images=tuple(int((classes == k).sum()) for k in range(K)),
        score=None if right is None else Score("all", int(right.sum()), B),
        class_scores=_scores(right, classes, class_names),
        group_scores=_scores(right, groups, group_names),
        layers=tuple(
            _layer(name, routing, found.fields.get(name), classes, K, favourites, seed)
            for name, routing in found.routing.items()
            if name not in channels
        ),
        channels=explain_channels(
            channels,
            found.blocks,
            found.gated,
            classes=classes,
            class_names=class_names,
            probabilities=found.probabilities,
            right=right,
            seed=seed,
        )
        if channels
        else None,
    )


def _gated(model: nn.Module, told_of: Sequence[tuple[Tensor, Tensor]]) -> Gated | None:
    if not isinstance(model, GatedNetwork) or not told_of:
        return None
    embeddings, macs = zip(*told_of, strict=True)
    return Gated(torch.cat(embeddings), torch.cat(macs), int(model.dense_macs), int(model.fixed_macs))


def _scores(right_B: Tensor | None, members_B: Tensor | None, names: Sequence[str]) -> tuple[Score, ...]:
    if right_B is None or members_B is None:
        return ()
    own_KB = [members_B.cpu() == k for k in range(len(names))]
    return tuple(Score(name, int(right_B[own].sum()), int(own.sum())) for name, own in zip(names, own_KB, strict=True))


def _layer(
    name: str, routing: Routing, field: Field | None, classes_B: Tensor, K: int, favourites: int, seed: int
) -> LayerExplanation:
    by_class = class_routing(routing, classes_B, K, seed=seed)
    headline = summary(routing)
    per_expert = routing.index.shape[2] if routing.index is not None and routing.chooser == "expert" else None
    return LayerExplanation(
        name=name,
        unit=routing.unit,
        chooser=routing.chooser,
        grid=routing.grid,
        experts=routing.experts,
        units=routing.units,
        patches_per_expert=per_expert,
        reach=_rounded(by_class.reach),
        gate=_rounded(by_class.gate),
        information=by_class.information,
        expert_information=by_class.expert_information,
        told=by_class.told,
        commonest=by_class.commonest,
        favourites=tuple(_favourites(routing, e, classes_B, favourites) for e in range(routing.experts)),
        field=field,
        load_share=headline.load_share,
        dead_experts=headline.dead_experts,
        routing_entropy=headline.routing_entropy,
        coverage=headline.coverage,
        overlap=headline.overlap,
    )


def _favourites(routing: Routing, expert: int, classes_B: Tensor, count: int) -> tuple[Favourite, ...]:
    """One patch an image, so that no image fills the list alone."""
    scores_BNE = routing.scores if routing.scores.ndim == 3 else routing.scores.mean(-1)
    score_BN = scores_BNE[..., expert].detach().cpu().float()
    score_BN = score_BN.masked_fill(~routing.mask[..., expert].cpu(), -torch.inf)
    gate_BN = routing.weights[..., expert].detach().cpu()
    best_B, patch_B = score_BN.max(1)
    order = cast("list[int]", best_B.sort(descending=True, stable=True).indices[:count].tolist())
    return tuple(
        Favourite(b, int(patch_B[b]), float(best_B[b]), float(gate_BN[b, int(patch_B[b])]), int(classes_B[b]))
        for b in order
        if best_B[b] > -torch.inf
    )


def _rounded(values_KEN: Tensor) -> Maps:
    nested = cast("list[list[list[float]]]", values_KEN.tolist())
    return tuple(tuple(tuple(round(value, 5) for value in row) for row in rows) for rows in nested)
