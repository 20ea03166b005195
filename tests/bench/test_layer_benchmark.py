"""A routed layer beside the dense one: the same function, the least work, and rows for all that can run it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moesaic.bench import layer_accuracy, layer_benchmark, timing
from moesaic.bench.layer_accuracy import TOLERANCE, layer_errors
from moesaic.bench.layer_benchmark import LayerTimes, fastest_dense, layer_times, run_once
from moesaic.bench.layer_shape import (
    LayerOptions,
    LayerShape,
    PixelLinear,
    dense_peers,
    dense_work,
    random_inputs,
    routed_layer,
    routed_work,
)
from moesaic.bench.timing import Memory, Timing
from moesaic.layers import PatchMoE
from moesaic.models.model_cost import count_macs
from moesaic.ops.torch_backend import TorchBackend

SHAPE = LayerShape(3, 8, 12, 12, experts=4, patches_per_expert=2, patch_size=3, kernel_size=3)
RELEASED = LayerOptions(gate="softmax_all", gate_on="input", expert_norm=True)


@pytest.mark.parametrize(
    "form", [LayerOptions(), LayerOptions(bias=False), RELEASED, LayerOptions(combine="sum", context="patch")], ids=str
)
def test_outputs_and_all_gradients_equal_the_reference(form: LayerOptions):
    errors = layer_errors(SHAPE, form, ["torch"], "cpu", torch.float64)["torch"]
    assert len(errors) == 2 + len(list(routed_layer(SHAPE, form).parameters()))
    assert max(errors.values()) < TOLERANCE[torch.float64]


def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch):
    right = TorchBackend.conv

    def wrong(self: TorchBackend, *args: Any) -> torch.Tensor:
        return 1.01 * right(self, *args)

    monkeypatch.setattr(TorchBackend, "conv", wrong)
    errors = layer_errors(SHAPE, LayerOptions(), ["torch"], "cpu", torch.float32)["torch"]
    assert errors["output"] == pytest.approx(0.01, rel=1e-3)
    assert min(errors.values()) > TOLERANCE[torch.float32]


def test_what_is_left_unwritten_is_an_error_that_no_tolerance_admits(monkeypatch: pytest.MonkeyPatch):
    right = TorchBackend.conv

    def hole(self: TorchBackend, *args: Any) -> torch.Tensor:
        return right(self, *args).index_fill(1, torch.tensor([0]), torch.nan)

    monkeypatch.setattr(TorchBackend, "conv", hole)
    error = layer_errors(SHAPE, LayerOptions(), ["torch"], "cpu", torch.float32)["torch"]["output"]
    assert not error <= TOLERANCE[torch.float32]


def test_inputs_whose_routing_rounding_could_change_are_drawn_again(monkeypatch: pytest.MonkeyPatch):
    answers = iter([False, False, True])
    monkeypatch.setattr(layer_accuracy, "_same_selection", lambda *_: next(answers))
    assert layer_errors(SHAPE, LayerOptions(), ["torch"], "cpu", torch.float64)
    assert next(answers, None) is None
    monkeypatch.setattr(layer_accuracy, "_same_selection", lambda *_: False)
    with pytest.raises(RuntimeError, match="routing differs"):
        layer_errors(SHAPE, LayerOptions(), ["torch"], "cpu", torch.float64)


def test_a_linear_layer_over_rows_of_pixels_is_the_convolution():
    conv = torch.nn.Conv2d(8, 12, 1)
    x, _ = random_inputs(SHAPE, "cpu", torch.float32, torch.channels_last)
    torch.testing.assert_close(PixelLinear(conv)(x), conv(x))


def test_the_dense_peer_has_the_norm_and_the_bias_of_the_experts():
    (plain,) = dense_peers(SHAPE, LayerOptions(bias=False)).values()
    assert isinstance(plain, torch.nn.Conv2d)
    assert plain.bias is None
    (released,) = dense_peers(SHAPE, RELEASED).values()
    assert [type(part).__name__ for part in released.children()] == ["BatchNorm2d", "ReLU", "Conv2d"]


@pytest.mark.parametrize("form", [LayerOptions(), LayerOptions(combine="sum")], ids=["concat", "sum"])
def test_multiply_adds_are_those_that_the_counter_of_networks_finds(form: LayerOptions):
    counted = count_macs(routed_layer(SHAPE, form), (SHAPE.channels, SHAPE.size, SHAPE.size))
    assert routed_work(SHAPE, form, torch.float32, step=False).flops == 2 * SHAPE.batch * counted.macs
    if form.combine == "concat":
        assert dense_work(SHAPE, torch.float32, step=False).flops == 2 * SHAPE.batch * counted.dense_macs


def test_an_expert_that_takes_all_patches_moves_as_much_as_the_dense_layer():
    everything = replace(SHAPE, patches_per_expert=SHAPE.patches)
    for step in (False, True):
        ours = routed_work(everything, LayerOptions(), torch.bfloat16, step=step)
        dense = dense_work(everything, torch.bfloat16, step=step)
        assert ours.bytes == dense.bytes
        assert ours.flops > dense.flops  # the router's scores


def test_gates_on_the_input_read_more_of_the_gradient():
    amounts = [
        routed_work(SHAPE, form, torch.float32, step=True).bytes
        for form in (LayerOptions(), LayerOptions(bias=False, gate_on="input"), LayerOptions(gate_on="input"))
    ]
    assert amounts == sorted(amounts)
    assert amounts[0] < amounts[1] < amounts[2]


def test_every_layer_is_timed_in_both_formats_and_the_faster_one_counts():
    rows = layer_times(
        SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, formats=("contiguous", "channels_last"), repetitions=2
    )
    assert [row.layer for row in rows] == ["dense convolution", "PatchMoE, torch", "masked (reference)"]
    assert [row.picked for row in rows] == [False, True, False]
    for row in rows:
        assert row.notes == []
        assert set(row.forward) == set(row.step) == {"contiguous", "channels_last"}
        assert row.best("step") == min(timing.median for timing in row.step.values())


def test_what_fails_is_noted_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand a long trace")

    monkeypatch.setattr(TorchBackend, "conv", broken)
    rows = layer_times(SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, repetitions=1)
    dense, ours, masked = rows
    assert ours.notes == [f"{what} failed: RuntimeError: no such kernel" for what in ("forward", "step")]
    assert ours.best("forward") is None
    assert dense.best("step")
    assert masked.best("step")


@pytest.mark.parametrize("can_capture", [True, False])
def test_on_a_gpu_steps_are_graphs_and_what_cannot_be_captured_is_timed_as_it_is(
    can_capture: bool, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []

    def capture(run: Any) -> Any:
        if not can_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        made.append("graph")
        return run

    def memory(run: Any, clear: Any) -> Memory:
        run()
        clear()
        return Memory(10, 30)

    start = layer_benchmark._PreparedLayer.__init__

    def on_gpu(self: Any, *args: Any) -> None:
        start(self, *args)
        self.on_gpu = True

    def time_interleaved(runs: Any, repetitions: int, *, gpu_clock: bool) -> dict[str, Timing]:
        assert gpu_clock
        return timing.time_interleaved(runs, repetitions)

    monkeypatch.setattr(layer_benchmark, "capture_cuda_graph", capture)
    monkeypatch.setattr(layer_benchmark, "peak_memory", memory)
    monkeypatch.setattr(layer_benchmark, "time_interleaved", time_interleaved)
    monkeypatch.setattr(layer_benchmark._PreparedLayer, "__init__", on_gpu)
    rows = layer_times(SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, repetitions=1)
    assert len(made) == (6 if can_capture else 0)
    for row in rows:
        assert row.best("forward")
        assert row.best("step")
        assert row.memory == Memory(10, 30)
        assert len(row.notes) == (0 if can_capture else 2)
        assert all("not captured: RuntimeError: operation not permitted" in note for note in row.notes)


def test_masks_are_left_out_where_they_take_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer_benchmark, "MASKED_LIMIT", 100)
    rows = layer_times(SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, passes=["forward"], repetitions=1)
    assert rows[-1].layer == "masked (reference)"
    assert rows[-1].notes[0].startswith("not run")
    assert rows[-1].forward == {}


def test_a_backend_can_be_left_out():
    rows = layer_times(
        SHAPE,
        LayerOptions(),
        device="cpu",
        dtype=torch.float32,
        passes=["forward"],
        without=["reference"],
        repetitions=1,
    )
    assert [row.backend for row in rows] == [None, "torch"]


def test_the_fastest_dense_layer_counts():
    rows = [
        LayerTimes("conv", None, forward={"contiguous": Timing(3, 3, 3), "channels_last": Timing(2, 2, 2)}),
        LayerTimes("rows", None, forward={"contiguous": Timing(5, 5, 5)}),
        LayerTimes("ours", "torch", forward={"contiguous": Timing(1, 1, 1)}),
    ]
    assert fastest_dense(rows, "forward") == 2
    assert fastest_dense(rows, "step") is None


def test_tuning_hands_on_its_bound_and_what_it_tells(monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []

    def stand_in(measure: object, log: Callable[[str], None], *, seconds: float) -> dict[str, tuple[int, ...]]:
        log(f"{seconds:g} s")
        return {"combine": (16, 16)}

    monkeypatch.setattr(layer_benchmark, "tune", stand_in)
    found = layer_benchmark.tune_layer(
        SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, what="step", log=messages.append, seconds=7
    )
    assert (found, messages) == ({"combine": (16, 16)}, ["7 s"])


def test_running_once_ahead_runs_every_pass_of_what_is_compiled_and_tells_what_fails(monkeypatch: pytest.MonkeyPatch):
    modes: list[tuple[bool, bool]] = []
    right = PatchMoE.forward

    def seen(self: PatchMoE, x: torch.Tensor) -> torch.Tensor:
        modes.append((self.training, torch.is_grad_enabled()))
        if self.training:
            raise RuntimeError("no room\nfor this")
        return right(self, x)

    monkeypatch.setattr(PatchMoE, "forward", seen)
    ran = run_once(SHAPE, LayerOptions(), device="cpu", dtype=torch.float32, without=["reference"])
    assert ran == {"PatchMoE, torch": ["step failed: RuntimeError: no room"]}  # and not the dense layer
    assert modes == [(False, False), (True, True)]


def test_a_training_step_of_the_routed_layer_counts_experts_thrice_and_scores_of_selected_pixels():
    shape = LayerShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    forward, step = (routed_work(shape, LayerOptions(), torch.float32, step=each).flops for each in (False, True))
    experts, scores, gradient = 2 * 8 * 9 * 8 * 4, 2 * 16 * 8 * 2, 2 * 2 * 8 * 8  # 8 of 16 pixels, 8 channels
    assert (forward, step) == (experts + scores, 3 * experts + scores + gradient)
