"""`moesaic explain`: what the experts of a trained network look at, or which channels it opens, image by image."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from moesaic.checks import check_choice, check_positive
from moesaic.cli.shared import log, make_folder, resolve_device, user_errors

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.insight.channel_explanation import ChannelExplanation
    from moesaic.insight.explain import Explanation, Look
    from moesaic.training.checkpoint import Checkpoint

__all__ = ["Explain"]

_EVERY = 10.0
"""Seconds between two lines on how far it is."""
_OTHERS = ", other ones than in training"
_TOLD = 5
"""Skipped files that are told by name; the page lists more."""


@dataclass(frozen=True)
class Explain:
    """Show what each expert of a trained network looks at: a page, its pictures, and all numbers as JSON.

    Of a network whose channels are gated it shows which gates are open for which images, and what
    each image costs. Give pictures, files or folders of them, to see where their patches go; a picture in a folder
    that is named after a class counts as one of that class. Give --data for statistics over many
    images; without it they are over the pictures given.
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """The folder of a run, or its model.safetensors."""
    images: Positional[Annotated[tuple[Path, ...], arg(metavar="IMAGE", help_behavior_hint="(several)")]] = ()
    """Picture files, or folders of them; without any, some of --data are shown."""
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: none)")] = None
    """A folder with a folder for each class, or a name such as celeba-smiling: its images to test on are looked at."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Where the files of a set that is given by name lie."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: that of the user)")] = None
    """Where decoded images of --data are kept."""
    layer: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """A routed layer, or several, each with a --layer of its own; all of them by default."""
    samples: int = 1000
    """How many images statistics are over, at most."""
    max_images: int = 8
    """How many images are shown one by one, at most."""
    favourites: int = 12
    """How many of the patches an expert likes best are shown."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: explanation, in the run)")] = None
    """Where the page goes; an explanation that is there is replaced."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    seed: int = 0
    """Decides which images; where --data has none to test on, give the seed that the network was trained with, for
    it decides which are held out."""

    def run(self, given: Sequence[str]) -> int:
        """Write the page and say where it is."""
        from moesaic.insight.explain import explain
        from moesaic.report.explanation import About, Shown, write_explanation

        with user_errors("explain"):
            device = self._checked()
            checkpoint = self._load(device)
            out = self.out or checkpoint.path.parent / "explanation"
            _check_folder(out)
            pictures = self._pictures(checkpoint) if self.images else None
            tested = None if self.data is None else self._tested(checkpoint, self.data)
            make_folder(out)
        over, shown = tested or pictures, (pictures or tested)
        assert over is not None and shown is not None
        shown = shown.some(self.max_images, self.seed)
        log(f"looking at {len(over):,} images")
        found = self._look(checkpoint, over.pixels, device)
        explanation = explain(
            found,
            checkpoint.class_names,
            labels=over.labels,
            groups=over.groups,
            group_names=over.group_names,
            favourites=self.favourites,
            seed=self.seed,
        )
        look_shown = self._look(checkpoint, shown.pixels, device)
        best = look_shown.probabilities.max(1)
        names = checkpoint.class_names
        records = [
            Shown(name, names[int(k)], float(share), None if label is None else names[label])
            for name, k, share, label in zip(shown.names, best.indices, best.values, shown.known, strict=True)
        ]
        with user_errors("explain"):
            page = write_explanation(
                out,
                explanation,
                About(
                    model=checkpoint.spec.name,
                    checkpoint=str(checkpoint.path),
                    data=over.about,
                    skipped=pictures.skipped if pictures is not None else (),
                    command=shlex.join(["moesaic", *given]),
                ),
                pixels=over.pixels,
                classes=found.probabilities.argmax(1) if over.labels is None else over.labels,
                shown=records,
                shown_pixels=shown.pixels,
                shown_look=look_shown,
            )
        _summarise(explanation, page)
        return 0

    def _checked(self) -> str:
        """Everything that can be looked at before there is a network; the device."""
        check_positive("explain", samples=self.samples, max_images=self.max_images, favourites=self.favourites)
        if not self.images and self.data is None:
            raise ValueError("there is nothing to look at: name picture files or folders, or give --data")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        return resolve_device("explain", self.device)

    def _load(self, device: str) -> Checkpoint:
        from moesaic.layers.recording import routed_layers
        from moesaic.training.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(self.checkpoint, device)
        known = tuple(routed_layers(checkpoint.model))
        if not known:
            raise ValueError(
                f"{checkpoint.spec.name} of {checkpoint.path} has no routed layer, so there is no routing to explain; "
                "train a network that has one, such as wrn10_10_pmoe or vgg16_deepmoe"
            )
        for layer in self.layer:
            check_choice("explain", "--layer", layer, known)
        if checkpoint.normalize is None:
            raise ValueError(
                f"{checkpoint.path} does not say how pixels become the network's input; use moesaic.insight.look with "
                "a view of your own"
            )
        return checkpoint

    def _pictures(self, checkpoint: Checkpoint) -> _Images:
        from moesaic.data.input_images import read_input_images

        shape, names = checkpoint.input_shape, checkpoint.class_names
        found = read_input_images(self.images, shape, names, max_images=self.samples, seed=self.seed)
        for each in found.skipped[:_TOLD]:
            log(f"skipped: {each.path} {each.reason}")
        if len(found.skipped) > _TOLD:
            log(f"skipped: {len(found.skipped) - _TOLD} files more, listed on the page")
        count = len(found.names)
        few = (
            f"{count:,} of the {found.files:,}" if count < found.files else f"the {count:,}" if count > 1 else "the one"
        )
        about = f"{few} image{'' if found.files == 1 else 's'} given"
        skipped = tuple((each.path, each.reason) for each in found.skipped)
        return _Images(found.pixels, found.names, found.labels, about=about, skipped=skipped)

    def _tested(self, checkpoint: Checkpoint, data: str) -> _Images:
        from moesaic.data.load import load_images
        from moesaic.data.splits import stratified_order

        C, H, W = checkpoint.input_shape
        dataset = load_images(data, data_dir=self.data_dir, size=H, cache_dir=self.cache_dir, seed=self.seed, log=log)
        if dataset.class_names != checkpoint.class_names:
            raise ValueError(
                f"--data={data!r} has the classes {_few(dataset.class_names)}, but the network was trained to tell "
                f"{_few(checkpoint.class_names)}; give data with these"
            )
        if dataset.test.pixels.shape[1:] != (C, H, W):
            raise ValueError(
                f"--data={data!r} has images of shape {tuple(dataset.test.pixels.shape[1:])}, but the network takes "
                f"({C}, {H}, {W}); give data like those it was trained on"
            )
        rows = stratified_order(dataset.test.labels, dataset.test.clusters, self.seed)[: self.samples]
        drawn = dataset.test.take(rows)
        about = f"{len(rows):,} of the {len(dataset.test):,}" if len(rows) < len(dataset.test) else f"the {len(rows):,}"
        apart = dataset.cluster_names != dataset.class_names
        others = checkpoint.card.tested not in ("", dataset.test.fingerprint())
        if others:
            log(
                f"note: these are not the images that the network was tested on when it was trained; if it was trained "
                f"on {dataset.name}, give the --seed of that, or it has seen some of them"
            )
        return _Images(
            drawn.pixels,
            tuple(f"test image {int(row)}" for row in rows),
            tuple(int(label) for label in drawn.labels),
            groups=drawn.clusters if apart else None,
            group_names=dataset.cluster_names if apart else (),
            about=f"{about} test images of {dataset.name}{_OTHERS if others else ''}",
        )

    def _look(self, checkpoint: Checkpoint, pixels: Tensor, device: str) -> Look:
        from moesaic.insight.explain import look

        assert checkpoint.normalize is not None
        last = time.monotonic()

        def told(done: int) -> None:
            nonlocal last
            if time.monotonic() - last > _EVERY and done < len(pixels):
                last = time.monotonic()
                log(f"{done:,} of {len(pixels):,}")

        return look(checkpoint.model, pixels, checkpoint.normalize, layers=self.layer or None, device=device, told=told)


@dataclass(frozen=True, eq=False)
class _Images:
    """Images to look at, and what is known of them."""

    pixels: Tensor
    names: tuple[str, ...]
    known: tuple[int | None, ...]
    """Their classes."""
    about: str
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> Tensor | None:
        """Their classes, where all are known."""
        import torch

        known = [label for label in self.known if label is not None]
        return torch.tensor(known) if len(known) == len(self.known) else None

    def some(self, count: int, seed: int) -> _Images:
        """So many of them, of every class in its share where classes are known."""
        from moesaic.data.splits import stratified_order

        rows = list(range(min(count, len(self))))
        if self.labels is not None and len(self) > count:
            rows = sorted(int(row) for row in stratified_order(self.labels, self.labels, seed)[:count])
        names, known = tuple(self.names[row] for row in rows), tuple(self.known[row] for row in rows)
        return replace(self, pixels=self.pixels[rows], names=names, known=known)


def _check_folder(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / "explanation.json").exists():
        raise ValueError(f"--out={str(out)!r} has other files in it; name another directory, or a new one")


def _summarise(explanation: Explanation, page: Path) -> None:
    lines: list[str] = []
    if explanation.score is not None:
        lines.append(f"accuracy {explanation.score.accuracy:.1f} % of {explanation.images:,} images")
    for layer in explanation.layers:
        name, kind = layer.name or "the network itself", "class" if explanation.by == "label" else "predicted class"
        if not layer.information.real:
            lines.append(f"{name}: that where its experts look depends on the {kind} cannot be seen in these images")
            continue
        told = "" if layer.told is None else f"; the place alone tells it of {100 * layer.told:.0f} % of images"
        lines.append(f"{name}: where its {layer.experts} experts look depends on the {kind}{told}")
    if explanation.channels is not None:
        lines += _gates(explanation.channels, "class" if explanation.by == "label" else "predicted class")
    sys.stdout.write("\n".join([*lines, f"Page: {page}", ""]))


def _gates(channels: ChannelExplanation, kind: str) -> list[str]:
    lines = [
        f"{channels.gates:,} gates in {len(channels.layers)} layers: {channels.dynamic:,} dynamic, "
        f"{channels.always_on:,} always on, {channels.dead:,} dead; an image opens {100 * channels.open_share:.1f} %"
    ]
    if channels.costs is not None:
        over = channels.costs.all
        span = "" if channels.costs.alike else f", from {over.least:.1f} to {over.most:.1f} %"
        lines.append(f"an image costs {over.mean:.1f} % of the dense network's multiply-adds{span}")
    if channels.distances.real:
        told = channels.distances.told
        rule = "" if told is None else f"; they alone tell it of {100 * told:.0f} % of images"
        lines.append(f"which gates are open depends on the {kind}{rule}")
    else:
        lines.append(f"that gates depend on the {kind} cannot be seen in these images")
    return lines


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_TOLD])
    return f"{shown} and {len(names) - _TOLD} more" if len(names) > _TOLD else shown
