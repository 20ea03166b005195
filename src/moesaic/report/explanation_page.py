"""Writes an `Explanation` as a self-contained HTML page, PNG figures and `explanation.json`.

The page opens with the routing explorer. It embeds its images and forbids the browser to load anything, or to run any
other script (Content-Security-Policy); names of files, classes and layers are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.files import write_atomic, write_json
from moesaic.insight.class_routing import MIN_CLASS_IMAGES
from moesaic.insight.explain import Explanation, ForwardPass, LayerExplanation
from moesaic.insight.metrics import plural_unit
from moesaic.report.canvas import save_png
from moesaic.report.channel_section import GateFigures, channel_section, draw_gates
from moesaic.report.expert_figures import MAX_CLASSES, draw_class_maps, draw_top_patches, mean_images
from moesaic.report.explorer import Explorer, make_explorer
from moesaic.report.explorer_data import CheckpointPass, ShownImage, prefix_name, prefix_rates, top_class
from moesaic.report.formatting import listed, percent
from moesaic.report.templates import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["About", "begin_explanation", "is_explanation", "write_explanation"]

_MAX_LISTED = 5
"""Class names listed in a sentence, at most."""
_FIGURE_PATTERNS = ("layer-*-*.png", "gates-*.png")


@dataclass(frozen=True)
class About:
    """The network and the images of an explanation, as shown on the page."""

    model: str
    checkpoint: str
    data: str
    """The images: "1,000 of the 2,804 test images of celeba-smiling"."""
    notes: tuple[str, ...] = ()
    more_images: str = "Explain more images, for example with --data."
    """What to do where there are too few images of a class."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Path and reason of files that were skipped."""
    command: str = ""


_UNFINISHED = ".explanation.unfinished"

_LayerFigures = dict[str, Any]
"""File names of the figures of one layer, or None."""


def begin_explanation(folder: Path) -> None:
    """Marks a folder as one of ours, so that an interrupted explanation is replaced by the next."""
    (folder / _UNFINISHED).touch()


def is_explanation(folder: Path) -> bool:
    """Whether the folder has an explanation, or the beginning of one that was interrupted."""
    return any((folder / name).exists() for name in ("explanation.json", _UNFINISHED))


def write_explanation(
    folder: Path,
    explanation: Explanation,
    about: About,
    *,
    pixels: Tensor,
    classes: Tensor,
    images: Sequence[ShownImage],
    checkpoints: Sequence[CheckpointPass],
    top_patches: int = 12,
) -> Path:
    """Writes PNG files, explanation.json and explanation.html into ``folder``; returns the path of the page.

    Figures of an earlier explanation in the folder are replaced.

    Args:
        folder: an existing folder.
        explanation: of the last checkpoint.
        about: the network and the images in words.
        pixels: images (B, C, H, W) of the explanation.
        classes: their classes (B,).
        images: those of the explorer, the user's own first.
        checkpoints: the outputs of one or more networks in the order of training; the page has a slider for several.
        top_patches: patches with the highest scores that the explorer shows for an expert.
    """
    if is_explanation(folder):
        for old in [path for names in _FIGURE_PATTERNS for path in folder.glob(names)]:
            old.unlink()
    figures = [_draw(folder, i, layer, explanation, pixels, classes) for i, layer in enumerate(explanation.layers)]
    shown = checkpoints[-1].shown
    gates = draw_gates(folder, explanation, classes, pixels, shown)
    record = {
        "about": asdict(about),
        "explanation": asdict(explanation),
        "shown": _shown(images, shown, explanation),
        "pictures": figures,
        "gates": None if gates is None else asdict(gates),
    }
    write_json(folder / "explanation.json", record)
    page = folder / "explanation.html"
    explorer = make_explorer(explanation, images, checkpoints, pixels=pixels, classes=classes, top_patches=top_patches)
    write_atomic(page, _page(explanation, about, explorer, gates).encode())
    (folder / _UNFINISHED).unlink(missing_ok=True)
    return page


def _shown(images: Sequence[ShownImage], found: ForwardPass, explanation: Explanation) -> list[dict[str, Any]]:
    """Name, prediction and true class of every image of the explorer."""
    best = found.probabilities.max(1)
    names = explanation.class_names
    return [
        {
            "name": image.name,
            "predicted": names[int(k)],
            "probability": float(share),
            "label": None if image.label is None else names[image.label],
        }
        for image, k, share in zip(images, best.indices, best.values, strict=True)
    ]


def _draw(
    folder: Path, number: int, layer: LayerExplanation, explanation: Explanation, pixels: Tensor, classes: Tensor
) -> _LayerFigures:
    def saved(figure: Figure, name: str) -> str:
        return save_png(figure, folder / f"layer-{number}-{name}.png")

    found: _LayerFigures = {"share": None, "difference": None, "gate": None, "top_patches": None}
    if layer.grid is None:
        return found
    names, images = explanation.class_names, explanation.class_images
    backdrops = mean_images(pixels, classes, len(names))
    several = sum(count > 0 for count in images) > 1
    maps = {
        kind: saved(draw_class_maps(layer, names, backdrops, images, kind), kind)
        for kind in (("share", "difference", "gate") if several else ("share", "gate"))
    }
    return found | maps | {"top_patches": saved(draw_top_patches(layer, names, _colours(pixels)), "top-patches")}


def _colours(pixels: Tensor) -> Tensor:
    """The channels that can be displayed: three, or the first."""
    return pixels[:, :3] if pixels.shape[1] > 3 else pixels[:, :1] if pixels.shape[1] == 2 else pixels


def _page(explanation: Explanation, about: About, explorer: Explorer, gates: GateFigures | None) -> str:
    present = [k for k, images in enumerate(explanation.class_images) if images]
    return render(
        "explanation.html",
        about=about,
        explanation=explanation,
        explorer=explorer.values,
        packed=explorer,
        kind=_kind(explanation),
        layers=[
            {
                "found": layer,
                "place": "share of images" if layer.unit == "sample" else f"most frequent {layer.unit}",
                "units": "images" if layer.unit == "sample" else plural_unit(layer.unit),
                "summary": f"{_summary(layer)}{_prefix(layer, explanation)}",
                "receptive_field": _receptive_field(layer),
                "class_dependence": _class_dependence(layer, explanation),
                "numbers": _numbers(layer),
            }
            for layer in explanation.layers
        ],
        classes=present[:MAX_CLASSES],
        place=_place,
        top_class=top_class,
        left_out=max(0, len(present) - MAX_CLASSES),
        notes=(*about.notes, *_warnings(explanation, about)),
        gates=None if gates is None else channel_section(explanation, gates),
        percent=percent,
    )


def _kind(explanation: Explanation) -> str:
    return "class" if explanation.by == "label" else "predicted class"


def _warnings(explanation: Explanation, about: About) -> tuple[str, ...]:
    notes: list[str] = []
    if explanation.by == "prediction":
        notes.append(
            "The true classes of these images are unknown. They are grouped by predicted class, and there is no "
            "accuracy. Images have a true class if they are in a folder named after a class, or come from --data."
        )
    if explanation.small_classes:
        shown = [f"“{name}”" for name in explanation.small_classes[:_MAX_LISTED]]
        more = len(explanation.small_classes) - len(shown)
        names = listed([*shown, f"{more} more classes"] if more else shown)
        notes.append(
            f"There are fewer than {MIN_CLASS_IMAGES} images of {names}: numbers about these classes are unreliable. "
            f"{about.more_images}"
        )
    return tuple(notes)


def _summary(layer: LayerExplanation) -> str:
    rows, columns = layer.grid or (1, layer.units)
    units = plural_unit(layer.unit)
    if layer.unit == "sample":
        return f"The router sends each image to some of the layer's {layer.experts} experts."
    grid = f"{layer.units} {units} ({rows} rows × {columns} columns)" if layer.grid else f"{layer.units} {units}"
    if layer.prefix:
        alone = layer.prefix == 1
        prefix = "the class token" if alone else f"{layer.prefix} prefix tokens (class and register tokens)"
        grid = f"{layer.units + layer.prefix} {units} ({rows} rows × {columns} columns, and {prefix})"
    if layer.chooser == "expert":
        return f"Each of the {layer.experts} experts selects {layer.patches_per_expert} of the {grid} of an image."
    if layer.chooser == "unit":
        return f"The router sends each of the {grid} of an image to some of the layer's {layer.experts} experts."
    return f"Each of the {layer.experts} experts gets a weighted average of the {grid} of an image."


def _prefix(layer: LayerExplanation, explanation: Explanation) -> str:
    """The experts of the tokens that have no place in the image, over all images."""
    if layer.chooser == "soft":
        return ""
    found: list[str] = []
    for token in range(layer.prefix):
        rates = [(prefix_rates(layer, e, explanation)[token], e) for e in range(layer.experts)]
        most = sorted((each for each in rates if each[0]), key=lambda each: (-each[0], each[1]))[:_MAX_LISTED]
        experts = listed([f"expert {e} ({percent(rate)} of the images)" for rate, e in most]) or "no expert"
        found.append(f" The {prefix_name(token, layer.prefix)} goes to {experts}.")
    return "".join(found)


def _receptive_field(layer: LayerExplanation) -> str:
    """How much of the image a patch depends on."""
    field = layer.field
    if field is None:
        return ""
    height, width = (f"{side:g}" for side in field.patch_size)
    square = f"A {layer.unit} covers {height}×{width} pixels of the image"
    if not field.margin:
        return f"{square} and depends on these pixels alone."
    extent = "the whole image" if field.covers_image else f"up to {field.margin} pixels beyond them on each side"
    return (
        f"{square}. Its receptive field is larger: {extent}, as earlier layers mix in the surroundings. "
        f"{percent(field.own_share)} of a {layer.unit}'s input gradient lies on its own pixels. A frame shows the "
        f"{layer.unit} that an expert selected, not everything that the {layer.unit} depends on."
    )


def _class_dependence(layer: LayerExplanation, explanation: Explanation) -> str:
    kind = _kind(explanation)
    found = layer.information
    if found.most == 0:
        return ""
    units = plural_unit(layer.unit)
    choice, chosen, seen = f"one selected {layer.unit}", f"selected {units}", f"positions of the selected {units}"
    verdict = f"The experts select different {units} for different {kind}es."
    if layer.unit == "sample":
        choice, chosen, seen = "the expert of an image", "experts of an image", "experts of an image"
        verdict = f"Images of different {kind}es go to different experts."
    if not found.significant:
        verdict = f"These images do not show that the {chosen} depend on the {kind}."
    bits = (
        f"The mutual information of the {kind} and {choice} is {found.bits:.3f} of at most "
        f"{found.most:.2f} bits; with shuffled labels it is below {found.by_chance:.3f} bits."
    )
    if found.significant and layer.probe_accuracy is not None:
        verdict += (
            f" A naive Bayes classifier that sees only the {seen}, and no pixels, reaches "
            f"{percent(layer.probe_accuracy)} accuracy on held-out images; always predicting the most frequent class "
            f"would reach {percent(layer.majority_share)}."
        )
    return f"{verdict} {bits}"


def _numbers(layer: LayerExplanation) -> str:
    parts: list[str] = []
    if layer.unit != "sample" and layer.chooser != "soft":
        units = plural_unit(layer.unit)
        parts.append(f"{percent(layer.coverage)} of all {units} are selected by at least one expert")
        parts.append(f"two experts share {percent(layer.overlap)} of their {units} on average")
    if layer.dead_experts:
        parts.append(f"dead (hardly used): expert {listed([str(e) for e in layer.dead_experts])}")
    return f"{'; '.join(parts)}.".capitalize() if parts else ""


def _place(layer: LayerExplanation, rate_N: Sequence[float]) -> str:
    """The patch or token that an expert selects most often; of samples, its share of them."""
    if layer.unit == "sample":
        return percent(rate_N[0])
    most = max(range(len(rate_N)), key=lambda n: rate_N[n])
    if not rate_N[most]:
        return "–"
    if layer.grid is None:
        return f"token {most + 1}: {percent(rate_N[most])}"
    row, column = divmod(most, layer.grid[1])
    return f"row {row + 1}, column {column + 1}: {percent(rate_N[most])}"
