"""A routed layer against the dense one it stands for, timed on this machine in turns.

Forward is the layer in eval mode without gradients; a step is forward and backward in training, with the gradients of
the map and of all weights. On a GPU both are captured in CUDA graphs and timed by the GPU's clock. What fails is told
in the notes of its row, and the others go on.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.bench.layer_shape import Form, RoutedShape, dense_peers, random_maps, routed_layer
from moesaic.bench.timing import Memory, Timing, captured, in_turns, peak_memory
from moesaic.ops import backend, backends
from moesaic.ops.backend_choice import BackendChoice, explain_backend
from moesaic.ops.tile_sizes import Tile, tune

__all__ = [
    "FORMATS",
    "MASKED_LIMIT",
    "LayerTimes",
    "Pass",
    "fastest_dense",
    "layer_times",
    "picked",
    "run_once",
    "tune_layer",
]

Pass = Literal["forward", "step"]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MASKED_LIMIT = 2**28
"""Masks take a copy of the map for every expert: beyond so many numbers ``reference`` is left out."""


@dataclass
class LayerTimes:
    """One way to run a layer, and what was measured of it."""

    layer: str
    backend: str | None
    """None of a dense layer."""
    compiled: bool = False
    picked: bool = False
    """Whether it is what moesaic runs if nobody asks for a backend."""
    forward: dict[str, Timing] = field(default_factory=dict[str, Timing])
    """By memory format."""
    step: dict[str, Timing] = field(default_factory=dict[str, Timing])
    memory: Memory | None = None
    """Of a step on a GPU, by itself and not captured, in the first memory format."""
    left_out: bool = False
    notes: list[str] = field(default_factory=list[str])
    """What was left out, or failed, and why."""

    def best(self, what: Pass) -> float | None:
        """Milliseconds in the faster memory format; None where nothing was measured."""
        timings: dict[str, Timing] = getattr(self, what)
        return min((timing.median for timing in timings.values()), default=None)


def picked(shape: RoutedShape, form: Form, device: str, dtype: torch.dtype) -> BackendChoice:
    """What moesaic would run this layer on, and why.

    >>> shape = RoutedShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> picked(shape, Form(), "cpu", torch.float32).name
    'torch'
    """
    layer = routed_layer(shape, form).to(device, dtype)
    x, _ = random_maps(shape, device, dtype, torch.channels_last)
    with torch.no_grad(), backend("reference"):  # the choice must not hang on kernels that may be what is wrong
        routing = layer.route(x)
    return explain_backend(x, routing)


def fastest_dense(rows: Sequence[LayerTimes], what: Pass) -> float | None:
    """Milliseconds of the fastest dense layer."""
    times = [row.best(what) for row in rows if row.backend is None]
    return min((time for time in times if time is not None), default=None)


def layer_times(
    shape: RoutedShape,
    form: Form,
    *,
    device: str,
    dtype: torch.dtype,
    passes: Sequence[Pass] = ("forward", "step"),
    formats: Sequence[str] = ("channels_last",),
    without: Collection[str] = (),
    compiled: bool = False,
    repetitions: int = 20,
) -> list[LayerTimes]:
    """Time the dense layer and the routed one on every backend that fits, in turns.

    ``without`` names backends to leave out. With ``compiled``, steps are timed compiled too where that may help: the
    ``torch`` backend, and the dense layer behind BatchNorm and ReLU. Ratios mean something within one call.

    >>> shape = RoutedShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> rows = layer_times(shape, Form(), device="cpu", dtype=torch.float32, passes=["forward"], repetitions=2)
    >>> [row.layer for row in rows]
    ['dense convolution', 'dense, rows of pixels', 'PatchMoE, torch', 'masked (reference)']
    >>> fastest_dense(rows, "forward") > 0
    True
    """
    candidates = _candidates(shape, form, device, dtype, without, compiled=compiled)
    if compiled:
        torch.compiler.reset()  # each shape gets a graph of its own, not a share of one for all shapes
    maps = {label: random_maps(shape, device, dtype, FORMATS[label]) for label in formats}
    _time([_Ready(each, label, *maps[label]) for each in candidates for label in formats], passes, repetitions)
    if torch.device(device).type == "cuda":
        del maps
        gc.collect()
        torch.cuda.empty_cache()
    return [each.row for each in candidates]


def run_once(
    shape: RoutedShape,
    form: Form,
    *,
    device: str,
    dtype: torch.dtype,
    passes: Sequence[Pass] = ("forward", "step"),
    without: Collection[str] = (),
    compiled: bool = False,
) -> dict[str, list[str]]:
    """Run once, untimed, what `layer_times` has to compile before it can time it; what ran by name, with its notes.

    Compiled kernels stay in the caches of Triton and of torch.compile, which other processes read: several that each
    run some layers fill them in a fraction of the time.

    >>> shape = RoutedShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> run_once(shape, Form(), device="cpu", dtype=torch.float32, without=["reference"])
    {'PatchMoE, torch': []}
    """
    candidates = _candidates(shape, form, device, dtype, without, compiled=compiled)
    if compiled:
        torch.compiler.reset()  # as for what is timed, so that it is the same graph
    x, wanted = random_maps(shape, device, dtype, torch.channels_last)
    ran: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.row.left_out or not (candidate.row.backend or candidate.row.compiled):
            continue
        ready = _Ready(candidate, "channels_last", x, wanted)
        for what in passes:
            ready.try_once(what)
        ran[candidate.row.layer] = candidate.row.notes
    return ran


def tune_layer(
    shape: RoutedShape,
    form: Form,
    *,
    device: str,
    dtype: torch.dtype,
    what: Pass,
    tell: Callable[[str], None],
    seconds: float = 120.0,
) -> dict[str, Tile]:
    """Time other tiles of the GPU kernels for this layer and keep the best on this machine; the winners by name.

    When ``seconds`` are over no other tile is begun. A tile is timed within the whole pass, as the median of 25
    replays of a CUDA graph: outside of one, a small layer's time is that of launching its kernels, whatever their
    tiles. Capturing and replaying take some hundredths of a second, compiling the tile before takes seconds.
    """
    x, wanted = random_maps(shape, device, dtype, torch.channels_last)
    candidate = _Candidate(LayerTimes("PatchMoE, triton", "triton"), routed_layer(shape, form))
    ready = _Ready(candidate, "channels_last", x, wanted)

    def measure() -> float:
        run = captured(ready.run_of(what), warm_up=2)  # the first of which compiles
        return in_turns({"layer": run}, 25, warm_up=2, gpu_clock=True)["layer"].median

    return tune(measure, tell, seconds=seconds)


@dataclass(frozen=True)
class _Candidate:
    """A way to run the layer, and the layer, in float32 on the CPU."""

    row: LayerTimes
    model: nn.Module


def _candidates(
    shape: RoutedShape, form: Form, device: str, dtype: torch.dtype, without: Collection[str], *, compiled: bool
) -> list[_Candidate]:
    torch.default_generator.manual_seed(0)
    dense = dense_peers(shape, form)
    layer = routed_layer(shape, form)
    choice = picked(shape, form, device, dtype)
    found = [_Candidate(LayerTimes(name, None), model) for name, model in dense.items()]
    if compiled and form.expert_norm:  # alone, a convolution has nothing to be fused with
        found.append(_Candidate(LayerTimes("dense, compiled", None, compiled=True), dense["dense convolution"]))
    fitting = [name for name in backends() if name not in choice.refused and name not in without]
    for name in sorted(fitting, key=lambda name: (name != choice.name, name == "reference")):  # masks last
        title = "masked (reference)" if name == "reference" else f"PatchMoE, {name}"
        row = LayerTimes(title, name, picked=name == choice.name)
        if name == "reference" and shape.experts * shape.batch * shape.channels * shape.size**2 > MASKED_LIMIT:
            row.notes.append("left out: masks take a copy of the map for each expert, too much here")
            row.left_out = True
        found.append(_Candidate(row, layer))
        if compiled and name == "torch" and not form.expert_norm:
            found.append(_Candidate(LayerTimes("PatchMoE, torch, compiled", name, compiled=True), layer))
    return found


class _Ready:
    """A candidate on its device, in a memory format, with what goes in and the gradient of what comes out."""

    def __init__(self, candidate: _Candidate, label: str, x: Tensor, wanted: Tensor) -> None:
        self.row = candidate.row
        self.label = label
        self.on_gpu = x.is_cuda
        self._x = x.detach().requires_grad_()
        self._wanted = wanted
        self._model: nn.Module = copy.deepcopy(candidate.model).to(x.device, x.dtype)
        self._model.to(memory_format=FORMATS[label])  # pyright: ignore[reportCallIssue]: torch types it in part
        self._called: Callable[[Tensor], Tensor] = self._model
        if self.row.compiled:
            self._called = torch.compile(self._model, dynamic=False)

    def prepare(self, what: Pass) -> Callable[[], object] | None:
        """What is to be timed, tried before; None where it cannot be, or is not to be."""
        run = self.try_once(what)
        if run is None or not self.on_gpu:
            return run
        try:
            if what == "step" and self.row.memory is None:
                self.row.memory = peak_memory(run, self._clear)
        except Exception as error:
            self.row.notes.append(f"{what} failed: {_first_line(error)}")
            return None
        try:
            return captured(run)
        except Exception as error:
            self.row.notes.append(f"{what} is not captured: {_first_line(error)}")
            return run

    def try_once(self, what: Pass) -> Callable[[], object] | None:
        """The pass, run once; None where it fails, which is noted, or is not to be run."""
        if self.row.left_out or (what == "forward" and self.row.compiled):
            return None
        run = self.run_of(what)
        try:
            run()
        except Exception as error:  # whatever it is, the others are to be measured
            self.row.notes.append(f"{what} failed: {_first_line(error)}")
            return None
        return run

    def run_of(self, what: Pass) -> Callable[[], object]:
        """The pass itself, the layer being set for it."""
        self._model.train(what == "step")
        return self._step if what == "step" else self._forward

    def _forward(self) -> None:
        with self._on_backend(), torch.no_grad():
            self._called(self._x)

    def _step(self) -> None:
        self._clear()
        with self._on_backend():
            y = self._called(self._x)
        y.backward(self._wanted)

    def _clear(self) -> None:
        self._model.zero_grad(set_to_none=True)
        self._x.grad = None

    def _on_backend(self) -> AbstractContextManager[object]:
        return nullcontext() if self.row.backend is None else backend(self.row.backend)


def _time(ready: Sequence[_Ready], passes: Sequence[Pass], repetitions: int) -> None:
    """Write the times of all passes into the candidates' rows; what was captured for them is given up at the end."""
    for what in passes:
        prepared = {number: each.prepare(what) for number, each in enumerate(ready)}
        runs = {str(number): run for number, run in prepared.items() if run is not None}
        gpu_clock = any(each.on_gpu for each in ready)
        for number, timing in in_turns(runs, repetitions, gpu_clock=gpu_clock).items():
            each = ready[int(number)]
            times: dict[str, Timing] = getattr(each.row, what)
            times[each.label] = timing


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
