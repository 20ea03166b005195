"""`moesaic explain`: a page on the routing of a trained network: selected patches, gates, open channels."""

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
from moesaic.cli.faults import escaped
from moesaic.cli.shared import (
    RouterOption,
    check_folder,
    load_run,
    log,
    make_folder,
    register_datasets,
    resolve_device,
    user_errors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.insight.channel_explanation import ChannelExplanation
    from moesaic.insight.explain import Explanation, ForwardPass
    from moesaic.training.checkpoint import Checkpoint

__all__ = ["Explain"]

_LOG_INTERVAL = 10.0
"""Seconds between progress messages."""
_OTHER_IMAGES = " (not those of the training run)"
_MAX_LISTED = 5
"""Skipped files that are logged by name; the page lists more."""


@dataclass(frozen=True)
class Explain:
    """Explain the routing of a trained network: an HTML page, its figures, and all numbers as JSON.

    The page shows which patches each expert selects, by class and for single images. For networks with channel gates
    it shows which gates are open and what each image costs. Pass image files or folders to see their routing; an
    image in a folder named after a class gets that class. Use --data for statistics over many images; without it,
    statistics are over the images passed.
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="CHECKPOINT")]]
    """Run directory, or its model.safetensors."""
    images: Positional[Annotated[tuple[Path, ...], arg(metavar="IMAGE", help_behavior_hint="(several)")]] = ()
    """Image files, or folders or zip files of them. Default: some images of --data."""
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: none)")] = None
    """Dataset whose test images are used for statistics: a folder with one subfolder per class, or a name."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Directory with the files of a dataset given by name."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: ~/.cache/moesaic)")] = None
    """Cache directory for decoded images."""
    layer: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """Name of a routed layer; may be repeated. Default: all routed layers."""
    samples: int = 1000
    """Maximum number of images for statistics."""
    max_images: int = 8
    """Maximum number of images shown individually."""
    top_patches: int = 12
    """Number of highest-scoring patches shown per expert."""
    router: RouterOption = None
    """Router class of your own that the network was trained with; it is imported."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: RUN/explanation)")] = None
    """Output directory. An existing explanation in it is replaced."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto uses a GPU if there is one."""
    seed: int = 0
    """Random seed. If --data has no test split, use the seed of the training run, which decides the split."""

    def run(self, given: Sequence[str]) -> int:
        """Writes the page and prints its path."""
        from moesaic.insight.explain import explain
        from moesaic.report.explanation import About, Shown, begin_explanation, is_explanation, write_explanation

        with user_errors("explain"):
            device = self._checked()
            check_folder(self.out)
            checkpoint = self._load(device)
            out = self.out or checkpoint.path.parent / "explanation"
            if out.is_dir() and any(out.iterdir()) and not is_explanation(out):
                raise ValueError(f"--out={str(out)!r} has other files in it; name another directory, or a new one")
            inputs = self._input_images(checkpoint) if self.images else None
            tested = None if self.data is None else self._test_images(checkpoint, self.data)
            make_folder(out)
            begin_explanation(out)
        explained, shown = tested or inputs, (inputs or tested)
        assert explained is not None and shown is not None
        shown = shown.some(self.max_images, self.seed)
        log(f"running the network on {len(explained):,} images")
        found = self._collect(checkpoint, explained.pixels, device)
        explanation = explain(
            found,
            checkpoint.class_names,
            labels=explained.labels,
            groups=explained.groups,
            group_names=explained.group_names,
            top_patches=self.top_patches,
            seed=self.seed,
        )
        shown_pass = self._collect(checkpoint, shown.pixels, device)
        best = shown_pass.probabilities.max(1)
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
                    data=explained.about,
                    skipped=inputs.skipped if inputs is not None else (),
                    command=shlex.join(["moesaic", *given]),
                ),
                pixels=explained.pixels,
                classes=found.probabilities.argmax(1) if explained.labels is None else explained.labels,
                shown=records,
                shown_pixels=shown.pixels,
                shown_pass=shown_pass,
            )
        _summarise(explanation, page)
        return 0

    def _checked(self) -> str:
        """Checks the options that do not depend on the network; returns the device."""
        check_positive("explain", samples=self.samples, max_images=self.max_images, top_patches=self.top_patches)
        if not self.images and self.data is None:
            raise ValueError("there are no images: pass image files or folders, or --data")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        return resolve_device("explain", self.device)

    def _load(self, device: str) -> Checkpoint:
        from moesaic.layers.recording import routed_layers

        checkpoint = load_run(self.checkpoint, device, self.router)
        known = tuple(routed_layers(checkpoint.model))
        if not known:
            raise ValueError(
                f"{checkpoint.spec.name} of {checkpoint.path} has no routed layer, so there is no routing to explain; "
                "train a network with one, such as wrn10_10_pmoe or vgg16_deepmoe"
            )
        for layer in self.layer:
            check_choice("explain", "--layer", layer, known)
        if checkpoint.normalize is None:
            raise ValueError(
                f"{checkpoint.path} does not contain the normalization of its input; use "
                "moesaic.insight.collect_outputs with your own transform"
            )
        return checkpoint

    def _input_images(self, checkpoint: Checkpoint) -> _Images:
        from moesaic.data.input_images import read_input_images

        shape, names = checkpoint.input_shape, checkpoint.class_names
        found = read_input_images(self.images, shape, names, max_images=self.samples, seed=self.seed)
        for each in found.skipped[:_MAX_LISTED]:
            log(f"skipped: {each.path} {each.reason}")
        if len(found.skipped) > _MAX_LISTED:
            log(f"skipped: {len(found.skipped) - _MAX_LISTED} more files, listed on the page")
        count = len(found.names)
        total = f"{count:,} of {found.files:,}" if count < found.files else f"{count:,}"
        about = f"{total} input image{'' if found.files == 1 else 's'}"
        skipped = tuple((each.path, each.reason) for each in found.skipped)
        return _Images(found.pixels, found.names, found.labels, about=about, skipped=skipped)

    def _test_images(self, checkpoint: Checkpoint, data: str) -> _Images:
        from moesaic.data.load import load_images
        from moesaic.data.splits import stratified_order

        register_datasets()
        C, H, W = checkpoint.input_shape
        dataset = load_images(data, data_dir=self.data_dir, size=H, cache_dir=self.cache_dir, seed=self.seed, log=log)
        if dataset.class_names != checkpoint.class_names:
            raise ValueError(
                f"--data={data!r} has the classes {_few(dataset.class_names)}, but the network was trained on "
                f"{_few(checkpoint.class_names)}; use data with these classes"
            )
        if dataset.test.pixels.shape[1:] != (C, H, W):
            raise ValueError(
                f"--data={data!r} has images of shape {tuple(dataset.test.pixels.shape[1:])}, but the network takes "
                f"({C}, {H}, {W}); use data of this shape"
            )
        rows = stratified_order(dataset.test.labels, dataset.test.clusters, self.seed)[: self.samples]
        sample = dataset.test.take(rows)
        about = f"{len(rows):,} of the {len(dataset.test):,}" if len(rows) < len(dataset.test) else f"the {len(rows):,}"
        has_groups = dataset.cluster_names != dataset.class_names
        other = checkpoint.metadata.tested not in ("", dataset.test.fingerprint())
        if other:
            log(
                f"note: these are not the test images of the training run; if it was trained on {dataset.name}, "
                "use the --seed of that run, or some of these images were training images"
            )
        return _Images(
            sample.pixels,
            tuple(f"test image {int(row)}" for row in rows),
            tuple(int(label) for label in sample.labels),
            groups=sample.clusters if has_groups else None,
            group_names=dataset.cluster_names if has_groups else (),
            about=f"{about} test images of {dataset.name}{_OTHER_IMAGES if other else ''}",
        )

    def _collect(self, checkpoint: Checkpoint, pixels: Tensor, device: str) -> ForwardPass:
        from moesaic.insight.explain import collect_outputs

        assert checkpoint.normalize is not None
        last = time.monotonic()

        def progress(done: int) -> None:
            nonlocal last
            if time.monotonic() - last > _LOG_INTERVAL and done < len(pixels):
                last = time.monotonic()
                log(f"{done:,} of {len(pixels):,} images done")

        return collect_outputs(
            checkpoint.model, pixels, checkpoint.normalize, layers=self.layer or None, device=device, progress=progress
        )


@dataclass(frozen=True, eq=False)
class _Images:
    """Images with their names, labels and groups."""

    pixels: Tensor
    names: tuple[str, ...]
    known: tuple[int | None, ...]
    """Label of each image, if it is known."""
    about: str
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> Tensor | None:
        """The labels, if all are known."""
        import torch

        known = [label for label in self.known if label is not None]
        return torch.tensor(known) if len(known) == len(self.known) else None

    def some(self, count: int, seed: int) -> _Images:
        """``count`` of the images, stratified by class if labels are known."""
        from moesaic.data.splits import stratified_order

        rows = list(range(min(count, len(self))))
        if self.labels is not None and len(self) > count:
            rows = sorted(int(row) for row in stratified_order(self.labels, self.labels, seed)[:count])
        names, known = tuple(self.names[row] for row in rows), tuple(self.known[row] for row in rows)
        return replace(self, pixels=self.pixels[rows], names=names, known=known)


def _summarise(explanation: Explanation, page: Path) -> None:
    lines: list[str] = []
    if explanation.accuracy is not None:
        lines.append(f"accuracy {explanation.accuracy.percent:.1f} % of {explanation.images:,} images")
    for layer in explanation.layers:
        name, kind = layer.name or "the network itself", "class" if explanation.by == "label" else "predicted class"
        if not layer.information.significant:
            lines.append(f"{name}: these images do not show that the routing depends on the {kind}")
            continue
        probe = _probe(layer.probe_accuracy)
        lines.append(f"{name}: the routing to its {layer.experts} experts depends on the {kind}{probe}")
    if explanation.channels is not None:
        lines += _gates(explanation.channels, "class" if explanation.by == "label" else "predicted class")
    sys.stdout.write(escaped("\n".join([*lines, f"Page: {page}", ""])))


def _gates(channels: ChannelExplanation, kind: str) -> list[str]:
    lines = [
        f"{channels.gates:,} gates in {len(channels.layers)} layers: {channels.dynamic:,} dynamic, "
        f"{channels.always_on:,} always on, {channels.dead:,} dead; {100 * channels.open_share:.1f} % open per image"
    ]
    if channels.costs is not None:
        cost = channels.costs.all
        span = "" if channels.costs.constant else f", from {cost.least:.1f} to {cost.most:.1f} %"
        lines.append(f"an image costs {cost.mean:.1f} % of the dense network's multiply-adds{span}")
    if channels.distances.significant:
        lines.append(f"the open gates depend on the {kind}{_probe(channels.distances.probe_accuracy)}")
    else:
        lines.append(f"these images do not show that the gates depend on the {kind}")
    return lines


def _probe(accuracy: float | None) -> str:
    return (
        "" if accuracy is None else f"; from these alone, naive Bayes predicts it with {100 * accuracy:.0f} % accuracy"
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    return f"{shown} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else shown
