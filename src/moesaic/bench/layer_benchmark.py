"""Benchmark of a routed layer against the dense layer it replaces, on every backend.

"forward" is the layer in eval mode without gradients; "step" is forward and backward in training mode, with the
gradients of the input and of all weights. On a GPU both are captured in CUDA graphs and timed by CUDA events. If a
candidate fails, the error is in its notes, and the others are still timed.
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

from moesaic.argument_checks import first_line
from moesaic.bench.layer_shape import LayerOptions, LayerShape, dense_peers, random_inputs, routed_layer
from moesaic.bench.timing import Memory, Timing, capture_cuda_graph, peak_memory, time_interleaved
from moesaic.ops import backend, backends
from moesaic.ops.dispatch import BackendChoice, explain_backend
from moesaic.ops.tile_sizes import Tile, tune

__all__ = [
    "FORMATS",
    "MASKED_LIMIT",
    "LayerTimes",
    "Pass",
    "choose_backend",
    "fastest_dense",
    "layer_times",
    "run_once",
    "tune_layer",
]

Pass = Literal["forward", "step"]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MASKED_LIMIT = 2**28
"""``reference`` copies the input for every expert: it is not run beyond so many elements."""


@dataclass
class LayerTimes:
    """Times of one way to run a layer."""

    layer: str
    backend: str | None
    """None for a dense layer."""
    compiled: bool = False
    picked: bool = False
    """Whether it is the default backend of moesaic for this layer."""
    forward: dict[str, Timing] = field(default_factory=dict[str, Timing])
    """Times by memory format."""
    step: dict[str, Timing] = field(default_factory=dict[str, Timing])
    memory: Memory | None = None
    """Memory of a training step on a GPU, without a CUDA graph, in the first memory format."""
    left_out: bool = False
    notes: list[str] = field(default_factory=list[str])
    """Reasons why something was not run or failed."""

    def best(self, what: Pass) -> float | None:
        """Milliseconds in the faster memory format; None if it was not timed."""
        timings: dict[str, Timing] = getattr(self, what)
        return min((timing.median for timing in timings.values()), default=None)


def choose_backend(shape: LayerShape, options: LayerOptions, device: str, dtype: torch.dtype) -> BackendChoice:
    """The backend that moesaic chooses for this layer, and why.

    >>> shape = LayerShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> choose_backend(shape, LayerOptions(), "cpu", torch.float32).name
    'torch'
    """
    layer = routed_layer(shape, options).to(device, dtype)
    x, _ = random_inputs(shape, device, dtype, torch.channels_last)
    with torch.no_grad(), backend("reference"):  # the choice must not depend on kernels that may fail
        routing = layer.route(x)
    return explain_backend(x, routing)


def fastest_dense(rows: Sequence[LayerTimes], what: Pass) -> float | None:
    """Milliseconds of the fastest dense layer."""
    times = [row.best(what) for row in rows if row.backend is None]
    return min((time for time in times if time is not None), default=None)


def layer_times(
    shape: LayerShape,
    options: LayerOptions,
    *,
    device: str,
    dtype: torch.dtype,
    passes: Sequence[Pass] = ("forward", "step"),
    formats: Sequence[str] = ("channels_last",),
    without: Collection[str] = (),
    compiled: bool = False,
    repetitions: int = 20,
) -> list[LayerTimes]:
    """Times the dense layer, and the routed layer on every backend that supports it, interleaved.

    Compare times of the same call only.

    Args:
        shape: sizes of input and layer.
        options: options of the layer.
        device: device to run on.
        dtype: dtype of input and weights.
        passes: "forward", "step" or both.
        formats: memory formats of the input.
        without: backends to skip.
        compiled: also time compiled steps of the ``torch`` backend, or of the dense layer with BatchNorm and ReLU.
        repetitions: timed runs per candidate.

    >>> shape = LayerShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> rows = layer_times(shape, LayerOptions(), device="cpu", dtype=torch.float32, passes=["forward"], repetitions=2)
    >>> [row.layer for row in rows]
    ['dense convolution', 'dense, linear over pixels', 'PatchMoE, torch', 'masked (reference)']
    >>> fastest_dense(rows, "forward") > 0
    True
    """
    candidates = _candidates(shape, options, device, dtype, without, compiled=compiled)
    if compiled:
        torch.compiler.reset()  # a graph per shape, not one with dynamic shapes
    maps = {label: random_inputs(shape, device, dtype, FORMATS[label]) for label in formats}
    _time([_PreparedLayer(*each, label, *maps[label]) for each in candidates for label in formats], passes, repetitions)
    if torch.device(device).type == "cuda":
        del maps
        gc.collect()
        torch.cuda.empty_cache()
    return [row for row, _ in candidates]


def run_once(
    shape: LayerShape,
    options: LayerOptions,
    *,
    device: str,
    dtype: torch.dtype,
    passes: Sequence[Pass] = ("forward", "step"),
    without: Collection[str] = (),
    compiled: bool = False,
) -> dict[str, list[str]]:
    """Runs each candidate of `layer_times` that needs compilation once; returns the notes by candidate.

    This fills the on-disk caches of Triton and torch.compile, which several processes can do in parallel.

    >>> shape = LayerShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> run_once(shape, LayerOptions(), device="cpu", dtype=torch.float32, without=["reference"])
    {'PatchMoE, torch': []}
    """
    candidates = _candidates(shape, options, device, dtype, without, compiled=compiled)
    if compiled:
        torch.compiler.reset()  # as in layer_times, for the same graph
    x, grad_output = random_inputs(shape, device, dtype, torch.channels_last)
    ran: dict[str, list[str]] = {}
    for row, model in candidates:
        if row.left_out or not (row.backend or row.compiled):
            continue
        ready = _PreparedLayer(row, model, "channels_last", x, grad_output)
        for what in passes:
            ready.try_once(what)
        ran[row.layer] = row.notes
    return ran


def tune_layer(
    shape: LayerShape,
    options: LayerOptions,
    *,
    device: str,
    dtype: torch.dtype,
    what: Pass,
    log: Callable[[str], None],
    seconds: float = 120.0,
) -> dict[str, Tile]:
    """Times other tile sizes of the Triton kernels for this layer and saves the best; returns them by kernel.

    No new tile size is started after ``seconds``. A tile size is timed within the whole pass, as the median of 25
    replays of a CUDA graph: without a graph, a small layer is bound by kernel launches. Capture and replay take some
    hundredths of a second, the compilation before takes seconds.
    """
    x, grad_output = random_inputs(shape, device, dtype, torch.channels_last)
    row, model = LayerTimes("PatchMoE, triton", "triton"), routed_layer(shape, options)
    ready = _PreparedLayer(row, model, "channels_last", x, grad_output)

    def measure() -> float:
        run = capture_cuda_graph(ready.run_of(what), warm_up=2)  # the first of which compiles
        return time_interleaved({"layer": run}, 25, warm_up=2, gpu_clock=True)["layer"].median

    return tune(measure, log, seconds=seconds)


_Candidate = tuple[LayerTimes, nn.Module]
"""A row of the table, and its layer in float32 on the CPU."""


def _candidates(
    shape: LayerShape,
    options: LayerOptions,
    device: str,
    dtype: torch.dtype,
    without: Collection[str],
    *,
    compiled: bool,
) -> list[_Candidate]:
    torch.default_generator.manual_seed(0)
    dense = dense_peers(shape, options)
    layer = routed_layer(shape, options)
    choice = choose_backend(shape, options, device, dtype)
    found: list[_Candidate] = [(LayerTimes(name, None), model) for name, model in dense.items()]
    if compiled and options.expert_norm:  # a single convolution has nothing to fuse
        found.append((LayerTimes("dense, compiled", None, compiled=True), dense["dense convolution"]))
    supported = [name for name in backends() if name not in choice.refused and name not in without]
    for name in sorted(supported, key=lambda name: (name != choice.name, name == "reference")):  # reference last
        title = "masked (reference)" if name == "reference" else f"PatchMoE, {name}"
        row = LayerTimes(title, name, picked=name == choice.name)
        if name == "reference" and shape.experts * shape.batch * shape.channels * shape.size**2 > MASKED_LIMIT:
            row.notes.append("not run: it copies the input for each expert, which is too large here")
            row.left_out = True
        found.append((row, layer))
        if compiled and name == "torch" and not options.expert_norm:
            found.append((LayerTimes("PatchMoE, torch, compiled", name, compiled=True), layer))
    return found


class _PreparedLayer:
    """A candidate on its device in a memory format, with an input and a gradient of the output."""

    def __init__(self, row: LayerTimes, model: nn.Module, label: str, x: Tensor, grad_output: Tensor) -> None:
        self.row = row
        self.label = label
        self.on_gpu = x.is_cuda
        self._x = x.detach().requires_grad_()
        self._grad_output = grad_output
        self._model: nn.Module = copy.deepcopy(model).to(x.device, x.dtype)
        self._model.to(memory_format=FORMATS[label])  # pyright: ignore[reportCallIssue]: torch types it in part
        self._called: Callable[[Tensor], Tensor] = self._model
        if self.row.compiled:
            self._called = torch.compile(self._model, dynamic=False)

    def prepare(self, what: Pass) -> Callable[[], object] | None:
        """The function to time, after a test run; None if it fails or is not to be run."""
        run = self.try_once(what)
        if run is None or not self.on_gpu:
            return run
        try:
            if what == "step" and self.row.memory is None:
                self.row.memory = peak_memory(run, self._clear)
        except Exception as error:
            self.row.notes.append(f"{what} failed: {type(error).__name__}: {first_line(error)}")
            return None
        try:
            return capture_cuda_graph(run)
        except Exception as error:
            self.row.notes.append(f"{what} is not captured: {type(error).__name__}: {first_line(error)}")
            return run

    def try_once(self, what: Pass) -> Callable[[], object] | None:
        """Runs the pass once; None if it fails, which is noted, or is not to be run."""
        if self.row.left_out or (what == "forward" and self.row.compiled):
            return None
        run = self.run_of(what)
        try:
            run()
        except Exception as error:  # the other candidates are still timed
            self.row.notes.append(f"{what} failed: {type(error).__name__}: {first_line(error)}")
            return None
        return run

    def run_of(self, what: Pass) -> Callable[[], object]:
        """The function of the pass; sets the layer to train or eval mode."""
        self._model.train(what == "step")
        return self._step if what == "step" else self._forward

    def _forward(self) -> None:
        with self._on_backend(), torch.no_grad():
            self._called(self._x)

    def _step(self) -> None:
        self._clear()
        with self._on_backend():
            y = self._called(self._x)
        y.backward(self._grad_output)

    def _clear(self) -> None:
        self._model.zero_grad(set_to_none=True)
        self._x.grad = None

    def _on_backend(self) -> AbstractContextManager[object]:
        return nullcontext() if self.row.backend is None else backend(self.row.backend)


def _time(ready: Sequence[_PreparedLayer], passes: Sequence[Pass], repetitions: int) -> None:
    """Writes the times of all passes into the rows; CUDA graphs are released at the end."""
    for what in passes:
        prepared = {number: each.prepare(what) for number, each in enumerate(ready)}
        runs = {str(number): run for number, run in prepared.items() if run is not None}
        gpu_clock = any(each.on_gpu for each in ready)
        for number, timing in time_interleaved(runs, repetitions, gpu_clock=gpu_clock).items():
            each = ready[int(number)]
            times: dict[str, Timing] = getattr(each.row, what)
            times[each.label] = timing
