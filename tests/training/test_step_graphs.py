"""Steps that are replayed from a graph are those of eager mode; what cannot be replayed runs eagerly, and says why.

On a CPU the graphs are recorded operators (`recorded_graphs`), on a GPU CUDA graphs (``-m gpu``).
"""

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.gated import TASK as GATED_TASK
from training.gated import backbone, gated
from training.recorded_graphs import FailingGraphs, RecordedGraphs, WrongGraphs
from training.squares import (
    LONG,
    TASK,
    Notes,
    dense,
    mixture,
    routed,
    run_files,
    same,
    seeded,
    stopped_and_called_again,
    weights,
)

from moesaic import create_model
from moesaic.data.image_dataset import ImageDataset
from moesaic.layers import PatchMoE
from moesaic.routing import SoftRouter
from moesaic.training import Callback, fit, gate_training, trainer
from moesaic.training.callbacks import BalanceLossCallback, CollapseCallback, RoutingCallback
from moesaic.training.fit import Diverged, FitResult
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe
from moesaic.training.step_graphs import graph_obstacle, is_short
from moesaic.training.step_state import StepState

SHORT = replace(LONG, epochs=2, batch_size=24)  # batches of 24, 23 and 23


@pytest.fixture
def with_graphs(monkeypatch):
    """Runs `fit` with graphs of a kind; returns its result, what it logged, and the graphs."""

    def run(kind: type[RecordedGraphs], *arguments: Any, **options: Any) -> tuple[FitResult, list[str], RecordedGraphs]:
        graphs, notes = kind(), Notes()
        monkeypatch.setattr(sys.modules["moesaic.training.fit"], "_graphs", lambda *_: graphs)
        return fit(*arguments, progress=notes, **options), notes.logged, graphs

    return run


class Noisy(nn.Module):
    """A layer with a soft router behind noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = PatchMoE(3, 4, experts=2, router=SoftRouter(3, experts=2, patch_size=4), patch_size=4)
        self.head = nn.Linear(4, 2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return self.head(self.moe(x + 0.1 * noise).mean((2, 3)))


def noisy(seed: int = 0) -> nn.Module:
    return seeded(Noisy, seed)


CASES: dict[str, tuple[Any, ImageDataset, Recipe, Any]] = {
    "sgd": (routed, TASK, SHORT, None),
    "adamw, everything": (
        routed,
        TASK,
        replace(SHORT, optimizer="adamw", lr=0.01, ema_decay=0.9, clip_grad=0.1, grad_accum=2, label_smoothing=0.1),
        None,
    ),
    "normalized_gd, balance loss": (
        noisy,
        TASK,
        replace(SHORT, optimizer="normalized_gd", balance_weight=0.1),
        None,
    ),
    "bfloat16": (dense, TASK, replace(SHORT, precision="bfloat16"), None),
    "WRN-pMoE": (
        lambda: seeded(lambda: create_model("wrn10_1_pmoe", num_classes=2, image_size=16)),
        GATED_TASK,
        replace(SHORT, epochs=1),
        None,
    ),
    "gates, target, noise and teacher": (
        gated,
        GATED_TASK,
        Recipe(
            epochs=3,
            batch_size=24,
            lr=0.003,
            gates=GateRecipe(target_macs=0.5, joint_fraction=0.6, noise=0.3, distill_weight=1.0),
        ),
        lambda: seeded(backbone, 5),
    ),
}


@pytest.mark.parametrize(("make", "task", "recipe", "teacher"), CASES.values(), ids=CASES)
def test_a_run_from_graphs_equals_an_eager_one_bit_for_bit(make, task, recipe, teacher, with_graphs, monkeypatch):
    monkeypatch.setattr(gate_training, "_CHECKS_OF_STAGE", 2)  # of the gates, which are observed in every second step
    monkeypatch.setattr(gate_training, "_OBSERVED_BATCHES", 1)
    found, networks = {}, {}
    for kind in (RecordedGraphs, FailingGraphs):  # after a failure the same optimizers go on in eager mode
        networks[kind] = make()
        options = {} if teacher is None else {"teacher": teacher()}
        found[kind], logged, graphs = with_graphs(kind, networks[kind], task, recipe, seed=2, **options)
        steps = len(found[kind].epochs) * 3
        if kind is RecordedGraphs:
            assert not [line for line in logged if "CUDA graphs" in line]
            assert graphs.replays == steps + 2 * graphs.captured, "all steps, and two for each check"
            assert graphs.captured < steps
    captured, eager = found.values()
    assert same(*networks.values())
    for one, other in zip(captured.epochs, eager.epochs, strict=True):
        assert replace(one, seconds=0.0, images_per_second=0.0) == replace(other, seconds=0.0, images_per_second=0.0)
    assert captured.accuracy == eager.accuracy


def test_fifty_steps_have_the_losses_of_eager_mode(with_graphs):
    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[Tensor] = []

        def on_step_end(self, trainer, epoch, loss):
            self.losses.append(loss)

    recipe = replace(SHORT, epochs=17, schedule="cosine")
    captured, eager = Losses(), Losses()
    with_graphs(RecordedGraphs, dense(), TASK, recipe, callbacks=[captured])
    fit(dense(), TASK, recipe, callbacks=[eager], cuda_graph=False)
    assert len(captured.losses) == 51
    torch.testing.assert_close(torch.stack(captured.losses), torch.stack(eager.losses), rtol=0, atol=1e-6)


def test_a_stopped_run_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["moesaic.training.fit"], "_graphs", lambda *_: RecordedGraphs())
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    recipe = replace(SHORT, optimizer="adamw", ema_decay=0.9)
    undisturbed = noisy()
    fit(undisturbed, TASK, recipe, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    parts = stopped_and_called_again(noisy, TASK, recipe, tmp_path / "parts", (4, 100))
    assert same(parts, undisturbed)
    assert run_files(tmp_path / "parts") == run_files(tmp_path / "whole")


def test_a_loss_that_is_not_a_number_stops_a_run_from_graphs(with_graphs):
    with pytest.raises(Diverged, match="in epoch 1 of 2"):
        with_graphs(RecordedGraphs, dense(), TASK, replace(SHORT, lr=1e30, warmup_epochs=0.5))


# what cannot be replayed


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WrongGraphs, r"after 2 replays of a step, \S+ .* differs by \S+ where \S+ is rounding$"),
        (FailingGraphs, r"operation not permitted when stream is capturing \(recorded_graphs.py, line \d+\)$"),
    ],
)
def test_a_graph_that_is_wrong_or_fails_is_reported_once_and_nothing_is_lost(kind, reason, with_graphs):
    model, eager = dense(), dense()
    _, logged, _ = with_graphs(kind, model, TASK, SHORT)
    assert len(logged) == 1
    assert re.search(f"^training goes on in eager mode, without CUDA graphs: {reason}", logged[0])
    fit(eager, TASK, SHORT, cuda_graph=False)
    torch.testing.assert_close(weights(model), weights(eager), rtol=0, atol=1e-6)


def test_shapes_that_depend_on_numbers_run_eagerly(with_graphs):
    recipe = replace(SHORT, optimizer="adamw")
    model, eager = mixture(), mixture()
    _, logged, _ = with_graphs(RecordedGraphs, model, TASK, recipe)
    assert logged[0].startswith("training goes on in eager mode, without CUDA graphs: ")
    with_graphs(FailingGraphs, eager, TASK, recipe)
    assert same(model, eager)


class Replacing(nn.Module):
    """Its statistics are a new tensor after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.inner(x - self.mean)


def test_a_buffer_that_is_replaced_is_named(with_graphs):
    model, eager = Replacing(), Replacing()
    _, logged, _ = with_graphs(RecordedGraphs, model, TASK, SHORT)
    assert "steps replace the tensor of buffer mean; change it in place, with copy_ or add_" in logged[0]
    with_graphs(FailingGraphs, eager, TASK, SHORT)
    assert same(model, eager)


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if float(x.sum()) > 0 else -x)


def test_a_network_that_waits_for_the_device_is_found_before_a_capture(with_graphs):
    _, logged, graphs = with_graphs(RecordedGraphs, Waiting(), TASK, SHORT)
    assert re.search(r"_local_scalar_dense waits for the device \(\w+.py, line \d+\)$", logged[0])
    assert graphs.captured == 0


class Changing(Callback):
    """Freezes the first layer after two steps, and trains it again with another rate after four."""

    def on_step_end(self, trainer, epoch, loss):
        weight = next(trainer.model.parameters())
        weight.requires_grad_(trainer.train_step.steps not in (2, 3))
        if not weight.requires_grad:
            weight.grad = None
        if trainer.train_step.steps == 4:
            trainer.train_step.optimizers[0].param_groups[0]["weight_decay"] = 0.5


def test_settings_that_a_callback_changes_lead_to_other_graphs(with_graphs):
    model, eager = dense(), dense()
    _, logged, graphs = with_graphs(RecordedGraphs, model, TASK, SHORT, callbacks=[Changing()])
    assert not logged
    assert graphs.captured == 5
    with_graphs(FailingGraphs, eager, TASK, SHORT, callbacks=[Changing()])
    assert same(model, eager)


def test_a_rate_in_place_of_its_tensor_ends_in_eager_mode(with_graphs):
    class OwnRate(Callback):
        def on_step_end(self, trainer, epoch, loss):
            trainer.train_step.optimizers[0].param_groups[0]["lr"] = 0.0

    recipe = replace(SHORT, epochs=9)
    model, eager = dense(), dense()
    _, logged, _ = with_graphs(RecordedGraphs, model, TASK, recipe, callbacks=[OwnRate()])
    assert logged[0].endswith("settings of steps have changed 24 times; keep them in tensors")
    with_graphs(FailingGraphs, eager, TASK, recipe, callbacks=[OwnRate()])
    assert same(model, eager)


class Doubling(Callback):
    def extra_loss(self, trainer, output, x, labels, epoch):
        return output.square().mean()


class Capturable(Doubling):
    capturable = True


def test_what_is_known_to_run_eagerly_says_why():
    gpu, recipe = torch.device("cuda"), replace(SHORT, precision="float32")
    own = [BalanceLossCallback(), CollapseCallback(), RoutingCallback(), Capturable()]
    assert graph_obstacle(recipe, gpu, own, 1) == ""
    assert graph_obstacle(recipe, torch.device("cpu"), [], 1) == "device 'cpu' has none"
    assert graph_obstacle(recipe, gpu, [], 4) == "4 processes share a step"
    assert "compile=True" in graph_obstacle(replace(recipe, compile=True), gpu, [], 1)
    assert "float16" in graph_obstacle(replace(recipe, precision="float16"), gpu, [], 1)
    reason = graph_obstacle(recipe, gpu, [*own, Doubling()], 1)
    assert reason.startswith("extra_loss of the callback Doubling may change steps; set capturable=True")


def test_a_run_on_a_cpu_says_so_where_graphs_were_asked_for():
    asked, not_asked = Notes(), Notes()
    fit(dense(), TASK, SHORT, cuda_graph=True, progress=asked)
    fit(dense(), TASK, SHORT, progress=not_asked)
    assert asked.logged == ["training runs in eager mode, without CUDA graphs: device 'cpu' has none"]
    assert not_asked.logged == []


def test_runs_of_a_few_steps_do_not_pay_for_recording():
    assert is_short(SHORT, 70)
    assert not is_short(replace(SHORT, epochs=17), 70)


# states


def test_a_state_is_restored_in_place_and_tensors_that_were_not_there_begin_with_zeros():
    generator = torch.Generator().manual_seed(1)
    tensors = {"weight": torch.arange(3.0)}
    before = StepState(tensors, [generator])
    first = torch.rand(2, generator=generator)
    tensors["weight"].mul_(2)
    later = {**tensors, "momentum": torch.ones(2)}
    before.restore(later)
    assert later["weight"].tolist() == [0, 1, 2]
    assert later["momentum"].tolist() == [0, 0]
    assert torch.equal(torch.rand(2, generator=generator), first)


@pytest.mark.parametrize(
    ("value", "noise", "tolerance", "differs"),
    [
        (torch.tensor([1.0, 2.0]), 0.0, 0.0, False),
        (torch.tensor([1.0, 2.0 + 2e-7]), 0.0, 0.0, False),  # the last digit of float32
        (torch.tensor([1.0, 2.001]), 0.0, 1e-4, True),
        (torch.tensor([1.0, 2.001]), 0.0, 1e-2, False),
        (torch.tensor([1.0, 2.001]), 2e-4, 1e-4, False),  # eager steps differ among themselves
        (torch.tensor([1.0, torch.nan]), 0.0, 1e-2, True),
        (torch.tensor([1, 3]), 0.0, 1e-2, True),
    ],
)
def test_more_than_rounding_is_a_difference(value, noise, tolerance, differs):
    start = StepState({"x": torch.zeros_like(value)}, [])
    expected = StepState({"x": torch.tensor([1.0, 2.0]).to(value.dtype)}, [])
    found = expected.difference(start, {"x": value}, {"x": noise}, tolerance)
    assert bool(found) is differs


def test_random_numbers_that_do_not_advance_are_a_difference():
    generator = torch.Generator().manual_seed(1)
    start = StepState({}, [generator])
    torch.rand(2, generator=generator)
    expected = StepState({}, [generator])
    assert expected.difference(start, {}, {}, 0.0) == ""
    start.restore({})
    assert expected.difference(start, {}, {}, 0.0) == "its random numbers do not advance as in eager steps"


# CUDA graphs


@pytest.mark.gpu
@pytest.mark.parametrize("make", [dense, routed])
def test_fifty_steps_from_cuda_graphs_have_the_losses_of_eager_mode(make, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    recipe = replace(SHORT, epochs=17, precision="float32")
    notes = Notes()
    captured = fit(make(), TASK, recipe, device="cuda", progress=notes)
    eager = fit(make(), TASK, recipe, device="cuda", cuda_graph=False)
    assert not [line for line in notes.logged if "CUDA graphs" in line]
    for one, other in zip(captured.epochs, eager.epochs, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "task", "recipe", "teacher"), CASES.values(), ids=CASES)
def test_every_case_is_captured_in_cuda_graphs(make, task, recipe, teacher):
    if make is noisy:
        pytest.skip("its generator is the CPU's")
    notes = Notes()
    options = {} if teacher is None else {"teacher": teacher()}
    found = fit(make(), task, recipe, device="cuda", cuda_graph=True, progress=notes, **options)
    assert not [line for line in notes.logged if "CUDA graphs" in line]
    assert len(found.epochs) == recipe.epochs


@pytest.mark.gpu
def test_a_stopped_run_from_cuda_graphs_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    recipe = replace(SHORT, epochs=20, optimizer="adamw", ema_decay=0.9)
    whole, parts = routed(), routed(5)
    fit(whole, TASK, recipe, device="cuda", out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, recipe, device="cuda", out=tmp_path / "parts", progress=Notes(9), checkpoint_seconds=0)
    fit(parts, TASK, recipe, device="cuda", out=tmp_path / "parts")
    assert same(whole, parts)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_runs_eagerly_and_random_numbers_go_on():
    notes = Notes()
    found = fit(mixture(), TASK, SHORT, device="cuda", cuda_graph=True, progress=notes)
    assert len(found.epochs) == SHORT.epochs
    assert notes.logged[0].startswith("training goes on in eager mode, without CUDA graphs: ")
    assert torch.rand(3, device="cuda").isfinite().all()
