"""A page that shows what a network looks at: pictures, `explanation.json`, and one HTML file made of both.

`write_explanation` draws the pictures of an `Explanation`, writes down everything else the page says
as JSON, and makes the page of these files alone, so that it cannot say anything they do not. The
page carries its pictures in itself and forbids the browser to load anything (Content-Security-Policy);
names of files, classes and layers are escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.files import write_atomic, write_json
from moesaic.insight.explain import FEW, Explanation, LayerExplanation, Look
from moesaic.insight.overlays import overlay
from moesaic.report.channel_section import GatePictures, channel_part, draw_gates
from moesaic.report.expert_figures import MOST_CLASSES, draw_class_maps, draw_favourites, mean_images
from moesaic.report.formatting import listed, percent
from moesaic.report.style import COLOURS, ON_DARK
from moesaic.report.templates import render
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["About", "Shown", "write_explanation"]

_DPI = 140
_LISTED = 5
"""Names in a row, at most."""
_PICTURES = ("layer-*-*.png", "gates-*.png")


@dataclass(frozen=True)
class About:
    """What was explained, in words."""

    model: str
    checkpoint: str
    data: str
    """Which images the numbers are over: "1,000 of 2,804 test images of celeba-smiling"."""
    notes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """Files that could not be used, and why."""
    command: str = ""


@dataclass(frozen=True)
class Shown:
    """An image whose routing is drawn."""

    name: str
    predicted: str
    probability: float
    label: str | None
    """Its true class, if known."""


@dataclass(frozen=True)
class _Pictures:
    """Of one layer: names of files beside the page."""

    overlays: tuple[str, ...]
    share: str | None
    difference: str | None
    gate: str | None
    favourites: str | None


def write_explanation(
    folder: Path,
    explanation: Explanation,
    about: About,
    *,
    pixels: Tensor,
    classes: Tensor,
    shown: Sequence[Shown],
    shown_pixels: Tensor,
    shown_look: Look,
) -> Path:
    """Draw an explanation into ``folder``: PNG files, explanation.json and explanation.html, whose path is returned.

    ``pixels`` (B, C, H, W) and ``classes`` (B,) are those the explanation is over; ``shown_pixels``
    and ``shown_look`` those of the images whose routing is drawn one by one. Pictures of an earlier
    explanation in the folder are replaced.
    """
    if (folder / "explanation.json").exists():
        for old in [path for names in _PICTURES for path in folder.glob(names)]:
            old.unlink()
    drawn = [
        _draw(folder, i, layer, explanation, pixels, classes, shown, shown_pixels, shown_look)
        for i, layer in enumerate(explanation.layers)
    ]
    gates = draw_gates(folder, explanation, classes, pixels, shown_pixels, shown_look)
    record = {
        "about": asdict(about),
        "explanation": asdict(explanation),
        "shown": [asdict(each) for each in shown],
        "pictures": [asdict(each) for each in drawn],
        "gates": None if gates is None else asdict(gates),
    }
    write_json(folder / "explanation.json", record)
    page = folder / "explanation.html"
    write_atomic(page, _page(folder, explanation, about, shown, drawn, gates).encode())
    return page


def _draw(
    folder: Path,
    number: int,
    layer: LayerExplanation,
    explanation: Explanation,
    pixels: Tensor,
    classes: Tensor,
    shown: Sequence[Shown],
    shown_pixels: Tensor,
    shown_look: Look,
) -> _Pictures:
    def saved(figure: Figure, name: str) -> str:
        file = io.BytesIO()
        figure.savefig(file, dpi=_DPI, format="png", metadata={"Software": None})
        path = folder / f"layer-{number}-{name}.png"
        write_atomic(path, file.getvalue())
        return path.name

    if layer.grid is None:
        return _Pictures((), None, None, None, None)
    names, images = explanation.class_names, explanation.class_images
    backdrops = mean_images(pixels, classes, len(names))
    routing = shown_look.routing[layer.name]
    overlays = [
        saved(overlay(_colours(shown_pixels[b : b + 1]), _only(routing, b), titles=[title(each)]), f"image-{b}")
        for b, each in enumerate(shown)
    ]
    several = sum(count > 0 for count in images) > 1
    maps = {
        kind: saved(draw_class_maps(layer, names, backdrops, images, kind), kind)
        for kind in (("share", "difference", "gate") if several else ("share", "gate"))
    }
    favourites = saved(draw_favourites(layer, names, _colours(pixels)), "favourites")
    return _Pictures(tuple(overlays), maps["share"], maps.get("difference"), maps["gate"], favourites)


def title(image: Shown) -> str:
    r"""What stands over an image.

    >>> title(Shown("a.png", "smiling", 0.93, "not smiling"))
    'smiling, 93\xa0% (in truth: not smiling)'
    """
    truth = "" if image.label is None or image.label == image.predicted else f" (in truth: {image.label})"
    return f"{image.predicted}, {percent(image.probability)}{truth}"


def _only(routing: Routing, b: int) -> Routing:
    """The routing of one image."""
    own = slice(b, b + 1)
    return replace(
        routing,
        scores=routing.scores[own],
        index=None if routing.index is None else routing.index[own],
        gate=routing.gate[own],
        dispatch=None if routing.dispatch is None else routing.dispatch[own],
    )


def _colours(pixels: Tensor) -> Tensor:
    """What can be shown of images with more or fewer channels than a picture has."""
    return pixels[:, :3] if pixels.shape[1] > 3 else pixels[:, :1] if pixels.shape[1] == 2 else pixels


@dataclass(frozen=True)
class _Expert:
    """A row of the table."""

    number: int
    places: tuple[str, ...]
    """Where it looks most, class by class."""
    favourites: str
    """Of which class the images of its favourite patches are."""
    bits: str
    real: bool
    load: str


@dataclass(frozen=True)
class _Layer:
    name: str
    anchor: str
    what: str
    sees: str
    told: str
    numbers: str
    pictures: _Pictures
    experts: tuple[_Expert, ...]
    loads: bool
    """Whether the experts' loads may differ."""


def _page(
    folder: Path,
    explanation: Explanation,
    about: About,
    shown: Sequence[Shown],
    drawn: Sequence[_Pictures],
    gates: GatePictures | None,
) -> str:
    def embedded(name: str) -> str:
        return f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"

    pairs = zip(explanation.layers, drawn, strict=True)
    present = [k for k, images in enumerate(explanation.class_images) if images]
    return render(
        "explanation.html",
        about=about,
        explanation=explanation,
        shown=[(image, title(image)) for image in shown],
        layers=[_layer(i, layer, own, explanation) for i, (layer, own) in enumerate(pairs)],
        classes=[explanation.class_names[k] for k in present][:MOST_CLASSES],
        left_out=max(0, len(present) - MOST_CLASSES),
        notes=(*about.notes, *_warnings(explanation)),
        gates=None if gates is None else channel_part(explanation, gates),
        light=COLOURS,
        dark=ON_DARK,
        embedded=embedded,
        percent=percent,
    )


def _warnings(explanation: Explanation) -> tuple[str, ...]:
    notes: list[str] = []
    if explanation.by == "prediction":
        notes.append(
            "The true classes of these images are not known, so they are sorted by the class that the network "
            "predicts, and nothing is said about its accuracy. Images in folders named after classes, and those of "
            "--data, have true classes."
        )
    if explanation.few:
        shown = [f"“{name}”" for name in explanation.few[:_LISTED]]
        more = len(explanation.few) - len(shown)
        few = listed([*shown, f"{more} classes more"] if more else shown)
        notes.append(
            f"There are fewer than {FEW} images of {few}: what is said here about so few may be accident. "
            "Give --data to look at more."
        )
    return tuple(notes)


def _layer(number: int, layer: LayerExplanation, pictures: _Pictures, explanation: Explanation) -> _Layer:
    return _Layer(
        name=layer.name or "the network itself",
        anchor=f"layer-{number}",
        what=_what(layer),
        sees=_sees(layer),
        told=_told(layer, explanation),
        numbers=_numbers(layer),
        pictures=pictures,
        experts=tuple(_expert(layer, e, explanation) for e in range(layer.experts)),
        loads=layer.chooser != "expert",
    )


def _what(layer: LayerExplanation) -> str:
    rows, columns = layer.grid or (1, layer.units)
    if layer.unit == "sample":
        return f"Each image as a whole is sent to some of the layer's {layer.experts} experts."
    grid = f"{layer.units} patches, {rows} rows of {columns}" if layer.grid else f"{layer.units} {layer.unit}s"
    if layer.chooser == "expert":
        return f"Each of {layer.experts} experts chooses {layer.patches_per_expert} of an image's {grid}."
    if layer.chooser == "unit":
        return f"Each of an image's {grid}, is sent to some of the layer's {layer.experts} experts."
    return f"Each of {layer.experts} experts gets its own mixture of an image's {grid}."


def _sees(layer: LayerExplanation) -> str:
    """The caveat about receptive fields."""
    field = layer.field
    if field is None:
        return ""
    height, width = (f"{side:g}" for side in field.patch)
    square = f"A patch lies over {height}×{width} pixels of the image"
    if field.own > 0.995:
        return f"{square}, and knows nothing of the pixels around them."
    far = "all of the image" if field.whole else f"up to {field.beyond} pixels beyond them on each side"
    return (
        f"{square}, but layers before have mixed what is around into it: it has seen {far}. By the gradient, "
        f"{percent(field.own)} of what it depends on lies within its own square; a frame is the place an expert "
        "chose, not the limit of what it knows."
    )


def _told(layer: LayerExplanation, explanation: Explanation) -> str:
    kind = "class" if explanation.by == "label" else "predicted class"
    found = layer.information
    if found.most == 0:
        return ""
    one = f"One choice of the layer, drawn at random, tells {found.bits:.3f} of {found.most:.2f} bits of the {kind}"
    one += f"; in images without any such link it would be below {found.by_chance:.3f}"
    verdict = f"Where experts look depends on the {kind}."
    if not found.real:
        verdict = f"That where experts look depends on the {kind} cannot be seen in these images."
    if found.real and layer.told is not None:
        verdict += (
            f" From the chosen places alone, without seeing any pixel, a simple rule tells the {kind} of "
            f"{percent(layer.told)} of images it was not made from; always naming the commonest would get "
            f"{percent(layer.commonest)}."
        )
    return f"{verdict} {one}."


def _numbers(layer: LayerExplanation) -> str:
    parts: list[str] = []
    if layer.unit == "patch" and layer.chooser != "soft":
        parts.append(f"{percent(layer.coverage)} of all patches reach some expert")
        parts.append(f"two experts share {percent(layer.overlap)} of their patches on average")
    if layer.dead_experts:
        parts.append(f"hardly used: expert {listed([str(e) for e in layer.dead_experts])}")
    return f"{'; '.join(parts)}.".capitalize() if parts else ""


def _expert(layer: LayerExplanation, expert: int, explanation: Explanation) -> _Expert:
    present = [k for k, images in enumerate(explanation.class_images) if images][:MOST_CLASSES]
    found = layer.expert_information[expert]
    return _Expert(
        number=expert,
        places=tuple(_place(layer, layer.reach[k][expert]) for k in present)
        if layer.grid
        else tuple(percent(layer.reach[k][expert][0]) for k in present),
        favourites=_of_which(layer, expert, explanation),
        bits=f"{found.bits:.3f}",
        real=found.real,
        load=percent(layer.load_share[expert]),
    )


def _place(layer: LayerExplanation, reach_N: Sequence[float]) -> str:
    """The patch an expert is found on most often."""
    assert layer.grid is not None
    most = max(range(len(reach_N)), key=lambda n: reach_N[n])
    if not reach_N[most]:
        return "–"
    row, column = divmod(most, layer.grid[1])
    return f"row {row + 1}, column {column + 1}: {percent(reach_N[most])}"


def _of_which(layer: LayerExplanation, expert: int, explanation: Explanation) -> str:
    """The class that most of its favourites are of: "11 of 12 smiling"."""
    groups = [favourite.group for favourite in layer.favourites[expert]]
    if not groups:
        return "–"
    most = max(dict.fromkeys(groups), key=groups.count)
    return f"{groups.count(most)} of {len(groups)} {explanation.class_names[most]}"
