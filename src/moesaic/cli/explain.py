"""`moesaic explain`: a page on the routing of a trained network: selected patches, gates, open channels."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from moesaic.argument_checks import check_choice, check_positive
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

    from moesaic.data.input_images import InputFile
    from moesaic.insight.channel_explanation import ChannelExplanation
    from moesaic.insight.explain import Explanation, ForwardPass
    from moesaic.report.explorer_data import CheckpointPass, ShownImage
    from moesaic.training.checkpoint import Checkpoint

__all__ = ["Explain"]

_LOG_INTERVAL = 10.0
"""Seconds between progress messages."""
_OTHER_IMAGES = " (not those of the training run)"
_RAISE_SAMPLES = "Explain more images of the data: raise --samples."
_NO_MORE_IMAGES = "These are all test images of the data."
_MAX_LISTED = 5
"""Skipped files that are logged by name; the page lists more."""


@dataclass(frozen=True)
class Explain:
    """Explain the routing of a trained network: an HTML page, its figures, and all numbers as JSON.

    The page opens with an explorer: every image with the patches that each expert selects, mistakes first, then
    classes and experts. For networks with channel gates it shows which gates are open and what each image costs. Pass
    image files or folders to see their routing; an image in a folder named after a class gets that class. Use --data
    for statistics over many images; without it, statistics are over the images passed.
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
    checkpoints: Annotated[UseAppendAction[tuple[Path, ...]], arg(metavar="PATH")] = ()
    """Earlier checkpoint, or a directory of them, for the slider; may be repeated. Default: the run's snapshots."""
    samples: int = 1000
    """Maximum number of images for statistics."""
    max_images: int = 1000
    """Maximum number of images in the explorer."""
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
        from moesaic.report.explanation_page import begin_explanation, is_explanation

        with ExitStack() as stack:
            with user_errors("explain"):
                device = self._checked()
                check_folder(self.out)
                checkpoint = self._load(self.checkpoint, device)
                earlier = self._earlier(checkpoint)
                out = self.out or checkpoint.path.parent / "explanation"
                if out.is_dir() and any(out.iterdir()) and not is_explanation(out):
                    raise ValueError(f"--out={str(out)!r} has other files in it; name another directory, or a new one")
                inputs = self._input_images(checkpoint, stack) if self.images else None
                tested = None if self.data is None else self._test_images(checkpoint, self.data, stack)
                make_folder(out)
                begin_explanation(out)
            self._explain(checkpoint, earlier, inputs, tested, device, out, shlex.join(["moesaic", *given]))
        return 0

    def _explain(
        self,
        checkpoint: Checkpoint,
        earlier: Sequence[Path],
        inputs: _Images | None,
        tested: _Images | None,
        device: str,
        out: Path,
        command: str,
    ) -> None:
        """Runs the networks and writes the page."""
        from moesaic.insight.explain import explain
        from moesaic.report.explanation_page import About, write_explanation

        explained = tested or inputs
        assert explained is not None
        shown = inputs or explained
        rows = shown.some_rows(self.max_images, self.seed)
        if tested is not None and inputs is not None:
            shown = inputs.take(rows)
            pixels = _joined(shown.pixels, tested.pixels)
            first, count = len(shown), min(len(shown) + len(tested), self.max_images)
            images = [*shown.images(own=True), *tested.images(own=False)][:count]
        else:
            # the images of the explorer first; statistics do not depend on the order
            others = sorted(set(range(len(shown))) - set(rows))
            explained = explained.take([*rows, *others]) if others else explained
            pixels, first, count = explained.pixels, 0, len(rows)
            images = explained.images(own=tested is None)[:count]
        log(f"running the network on {len(pixels):,} {'image' if len(pixels) == 1 else 'images'}")
        passes = [self._pass(path, checkpoint, pixels, first, count, device) for path in earlier]
        found = self._collect(checkpoint, pixels, device)
        statistics = found.images(first, len(pixels))
        explanation = explain(
            statistics,
            checkpoint.class_names,
            labels=explained.labels,
            groups=explained.groups,
            group_names=explained.group_names,
            top_patches=self.top_patches,
            seed=self.seed,
        )
        passes.append(_CheckpointOutputs(checkpoint, found.images(0, count), statistics))
        with user_errors("explain"):
            page = write_explanation(
                out,
                explanation,
                About(
                    model=checkpoint.spec.name,
                    checkpoint=str(checkpoint.path),
                    data=explained.about,
                    more_images=explained.more_images,
                    skipped=inputs.skipped if inputs is not None else (),
                    command=command,
                ),
                pixels=explained.pixels,
                classes=statistics.probabilities.argmax(1) if explained.labels is None else explained.labels,
                images=images,
                checkpoints=_named(passes),
                top_patches=self.top_patches,
            )
        _summarise(explanation, page)

    def _checked(self) -> str:
        """Checks the options that do not depend on the network; returns the device."""
        check_positive("explain", samples=self.samples, max_images=self.max_images, top_patches=self.top_patches)
        if not self.images and self.data is None:
            raise ValueError("there are no images: pass image files or folders, or --data")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        return resolve_device("explain", self.device)

    def _load(self, path: Path, device: str) -> Checkpoint:
        from moesaic.layers.recording import routed_layers

        checkpoint = load_run(path, device, self.router)
        known = tuple(routed_layers(checkpoint.model))
        if not known:
            raise ValueError(
                f"{checkpoint.spec.name} of {checkpoint.path} has no routed layer, so there is no routing to explain; "
                "train a network with one, such as wrn10_2_pmoe, or a pretrained one with --head routed"
            )
        for layer in self.layer:
            check_choice("explain", "--layer", layer, known)
        if checkpoint.normalize is None:
            raise ValueError(
                f"{checkpoint.path} does not contain the normalization of its input; use "
                "moesaic.insight.collect_outputs with your own transform"
            )
        return checkpoint

    def _earlier(self, checkpoint: Checkpoint) -> list[Path]:
        """The files of earlier checkpoints: those of --checkpoints, or the snapshots of the run."""
        from moesaic.training.snapshots import find_snapshots

        given = self.checkpoints or (checkpoint.path.parent,)
        paths = [each for path in given for each in find_snapshots(path, required=bool(self.checkpoints))]
        return [path for path in paths if path.resolve() != checkpoint.path.resolve()]

    def _pass(
        self, path: Path, checkpoint: Checkpoint, pixels: Tensor, first: int, count: int, device: str
    ) -> _CheckpointOutputs:
        """The outputs of an earlier checkpoint, which must be of the same network."""
        with user_errors("explain"):
            other = self._load(path, device)
            _check_network(other, checkpoint)
        found = self._collect(other, pixels, device)
        return _CheckpointOutputs(other, found.images(0, count), found.images(first, len(pixels)))

    def _input_images(self, checkpoint: Checkpoint, stack: ExitStack) -> _Images:
        from moesaic.data.input_images import read_input_images

        shape, names = checkpoint.input_shape, checkpoint.class_names
        found = read_input_images(self.images, shape, names, max_images=self.samples, seed=self.seed, stack=stack)
        for each in found.skipped[:_MAX_LISTED]:
            log(f"skipped: {each.path} {each.reason}")
        if len(found.skipped) > _MAX_LISTED:
            log(f"skipped: {len(found.skipped) - _MAX_LISTED} more files, listed on the page")
        count = len(found.names)
        total = f"{count:,} of {found.files:,}" if count < found.files else f"{count:,}"
        about = f"{total} input image{'' if found.files == 1 else 's'}"
        skipped = tuple((each.path, each.reason) for each in found.skipped)
        return _Images(found.pixels, found.names, found.labels, about=about, skipped=skipped, sources=found.sources)

    def _test_images(self, checkpoint: Checkpoint, data: str, stack: ExitStack) -> _Images:
        from moesaic.data.file_sources import open_source, printable
        from moesaic.data.input_images import InputFile
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
        names, sources = tuple(f"test image {int(row)}" for row in rows), ()
        if sample.names:
            source = stack.enter_context(open_source(data))
            names = tuple(map(printable, sample.names))
            sources = tuple(InputFile(Path(data) / name, source, name) for name in sample.names)
        return _Images(
            sample.pixels,
            names,
            tuple(int(label) for label in sample.labels),
            sources=sources,
            more_images=_RAISE_SAMPLES if len(rows) < len(dataset.test) else _NO_MORE_IMAGES,
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
    sources: tuple[InputFile, ...] = ()
    """The files of the images, if they come from files."""
    more_images: str = "Explain more images, for example with --data."
    """What to do where there are too few of a class."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> Tensor | None:
        """The labels, if all are known."""
        import torch

        known = [label for label in self.known if label is not None]
        return torch.tensor(known) if len(known) == len(self.known) else None

    def some_rows(self, count: int, seed: int) -> list[int]:
        """The rows of ``count`` of the images, stratified by class if labels are known."""
        from moesaic.data.splits import stratified_order

        if self.labels is None or len(self) <= count:
            return list(range(min(count, len(self))))
        return sorted(int(row) for row in stratified_order(self.labels, self.labels, seed)[:count])

    def images(self, *, own: bool) -> list[ShownImage]:
        """The images for the explorer: their files at their own resolution, or their pixels."""
        from moesaic.report.embedded_images import picture_of
        from moesaic.report.explorer_data import ShownImage

        pictures = [file.read_whole for file in self.sources] or [picture_of(each) for each in self.pixels]
        return [ShownImage(*each, own) for each in zip(self.names, self.known, pictures, strict=True)]

    def take(self, rows: Sequence[int]) -> _Images:
        """The images at ``rows``, in that order."""
        rows = list(rows)
        return replace(
            self,
            pixels=self.pixels[rows],
            names=tuple(self.names[row] for row in rows),
            known=tuple(self.known[row] for row in rows),
            sources=tuple(self.sources[row] for row in rows) if self.sources else (),
            groups=None if self.groups is None else self.groups[rows],
        )


@dataclass(frozen=True, eq=False)
class _CheckpointOutputs:
    checkpoint: Checkpoint
    shown: ForwardPass
    statistics: ForwardPass


def _named(passes: Sequence[_CheckpointOutputs]) -> list[CheckpointPass]:
    """The outputs with the epochs of their checkpoints, if these differ, else with their paths."""
    from moesaic.report.explorer_data import CheckpointPass

    known = [each.checkpoint.metrics.get("epochs") for each in passes]
    epochs = [epoch for epoch in known if isinstance(epoch, int)]
    if len(set(epochs)) < len(passes):
        paths = [str(each.checkpoint.path.with_suffix("")) for each in passes]
        return [CheckpointPass(path, each.shown, each.statistics) for path, each in zip(paths, passes, strict=True)]
    return [
        CheckpointPass(f"epoch {epochs[i]}", passes[i].shown, passes[i].statistics)
        for i in sorted(range(len(passes)), key=lambda i: epochs[i])
    ]


def _check_network(other: Checkpoint, checkpoint: Checkpoint) -> None:
    """Refuses an earlier checkpoint of another network, whose layers or classes would not be the same."""
    for what in ("class_names", "input_shape", "spec"):
        if getattr(other, what) != getattr(checkpoint, what):
            raise ValueError(
                f"--checkpoints: {other.path} has another {what.replace('_', ' ')} than {checkpoint.path}; name "
                "checkpoints of one run"
            )


def _joined(first: Tensor, second: Tensor) -> Tensor:
    import torch

    return torch.cat([first, second])


def _summarise(explanation: Explanation, page: Path) -> None:
    lines: list[str] = []
    if explanation.accuracy is not None:
        lines.append(f"accuracy {explanation.accuracy.percent:.1f} % of {explanation.images:,} images")
    for layer in explanation.layers:
        name, kind = layer.name or "the network itself", "class" if explanation.by == "label" else "predicted class"
        if not layer.information.significant:
            lines.append(f"{name}: these images do not show that the routing depends on the {kind}")
            continue
        probe = _probe(layer.probe_accuracy, layer.majority_share)
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
        found = channels.distances
        lines.append(f"the open gates depend on the {kind}{_probe(found.probe_accuracy, found.majority_share)}")
    else:
        lines.append(f"these images do not show that the gates depend on the {kind}")
    return lines


def _probe(accuracy: float | None, majority_share: float) -> str:
    if accuracy is None:
        return ""
    guess = f"{100 * majority_share:.0f} % by always predicting the most frequent one"
    return f"; from these alone, naive Bayes predicts it with {100 * accuracy:.0f} % accuracy ({guess})"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    return f"{shown} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else shown
