"""Training a network with channel gates: two stages, the cost that was asked for, and runs that are stopped."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from training.gated import LONG, TASK, backbone, gate_state, gated, images
from training.squares import Notes, lines, run_files, same, seeded, stopped_and_called_again

from moesaic.training import trainer
from moesaic.training.batches import eval_batches
from moesaic.training.checkpoint import load_weights
from moesaic.training.distillation import Distillation
from moesaic.training.fit import Diverged, GatesClosed, fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.gate_training import GateTraining


@pytest.mark.parametrize(
    "changes", [{"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}, {"ema_decay": 0.9}], ids=["sgd", "mean"]
)
def test_after_the_joint_stage_gates_and_embedding_stay_and_the_rest_goes_on(changes, monkeypatch):
    frozen, weights, model = [], [], gated()
    freeze = GateTraining.freeze

    def note(self, embeddings, *more):
        cost = freeze(self, embeddings, *more)
        frozen.extend(gate_state(model))
        weights.extend(weight.detach().clone() for weight in model.backbone.parameters())
        return cost

    monkeypatch.setattr(GateTraining, "freeze", note)
    fit(model, TASK, replace(LONG, **changes))
    assert frozen
    assert all(torch.equal(a, b) for a, b in zip(frozen, gate_state(model), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights, model.backbone.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters()), "the network comes back as it went"


def test_the_cost_that_was_asked_for_is_that_of_test_images_and_is_told(tmp_path):
    model, notes = gated(), Notes()
    found = fit(model, TASK, LONG, out=tmp_path, progress=notes)
    assert found.cost == pytest.approx(0.5, rel=0.05)
    with torch.no_grad():
        costs = [
            model.macs(model.forward_with_routing(x).routing) for x, _ in eval_batches(TASK, torch.device("cpu"), 16)
        ]
    assert torch.cat(costs).double().mean() / model.dense_macs == pytest.approx(found.cost)
    assert any(re.match(r"gates are frozen: 0\.(49|50)\d of the dense .*, target 0\.5", each) for each in notes.logged)
    assert any(re.search(r"cost [\d.]+, open_share [\d.]+, gate_l1 0\.\d", note) for note in notes.notes)
    epochs = lines(tmp_path)
    assert [epoch["gate_l1"] > 0 for epoch in epochs] == [True, True, False, False]
    assert epochs[0]["cost"] > 0.8 > epochs[-1]["cost"] == pytest.approx(0.5, rel=0.1)
    assert all(0 < epoch["open_share"] <= 1 for epoch in epochs)
    assert json.loads((tmp_path / "result.json").read_text())["cost"] == found.cost
    assert load_weights(tmp_path, gated(1)).metrics["cost"] == found.cost
    assert fit(gated(), TASK, LONG, out=tmp_path).cost == found.cost


def test_networks_without_gates_have_no_cost(tmp_path):
    found = fit(seeded(backbone), TASK, replace(LONG, epochs=1, gates=None), out=tmp_path)
    assert found.cost is None
    assert not {"cost", "open_share", "gate_l1"} & lines(tmp_path)[0].keys()
    assert "cost" not in json.loads((tmp_path / "result.json").read_text())


def test_with_one_stage_alone_the_cost_is_met_all_the_same():
    one = replace(LONG, epochs=2, gates=GateRecipe(target_macs=0.5, joint_fraction=1.0))
    assert fit(gated(), TASK, one).cost == pytest.approx(0.5, rel=0.05)


RUNS = {
    "target, mean, noise": replace(
        LONG, ema_decay=0.9, label_smoothing=0.1, gates=GateRecipe(target_macs=0.5, joint_fraction=0.6, noise=0.3)
    ),
    "strength, sgd, parts": replace(
        LONG,
        optimizer="sgd",
        lr=0.05,
        grad_accum=2,
        clip_grad=1.0,
        gates=GateRecipe(l1_weight=0.5, joint_fraction=0.55),
    ),
}
HARD = replace(LONG, gates=GateRecipe(target_macs=0.5, joint_fraction=0.6, shaping_weight=1.0, cost_weight=30.0))


@pytest.mark.parametrize("recipe", RUNS.values(), ids=RUNS)
def test_a_run_stopped_anywhere_and_called_again_ends_bit_identical(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    undisturbed = gated()
    fit(undisturbed, TASK, recipe, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    calls = (3, 9, 6, 5, 100)  # of progress, of which there are seven an epoch: in both stages
    assert same(stopped_and_called_again(gated, TASK, recipe, tmp_path / "parts", calls), undisturbed)
    assert run_files(tmp_path / "parts") == run_files(tmp_path / "whole")


def test_a_run_of_hard_gates_is_bit_identical_when_it_is_resumed_and_meets_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    make = partial(gated, mode="hard", center_embedding=True)
    undisturbed = make()
    found = fit(undisturbed, TASK, HARD, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    assert same(stopped_and_called_again(make, TASK, HARD, tmp_path / "parts", (9, 100)), undisturbed)
    assert run_files(tmp_path / "parts") == run_files(tmp_path / "whole")
    assert found.cost == pytest.approx(0.5, rel=0.05)
    assert 0 <= found.metrics["gates_differing"] <= 0.51
    assert 0 <= found.metrics["gate_entropy"] <= 1
    assert 0 <= found.metrics["embedding_accuracy"] <= 100


@pytest.mark.parametrize("mode", ["relu", "hard"])
def test_constant_gates_meet_their_cost_and_differ_for_no_image(mode):
    found = fit(gated(embedding_share=0.0, mode=mode), TASK, LONG)
    assert found.cost == pytest.approx(0.5, rel=0.1)  # every image closes the same gates, of which there are few
    assert (found.metrics["gates_differing"], found.metrics["gate_entropy"]) == (0, 0)
    assert "embedding_accuracy" not in found.metrics


def test_the_printed_form_is_steered_by_lambda_alone():
    recipe = replace(LONG, gates=GateRecipe(target_macs=0.3, joint_fraction=0.5, layer_weights="gates"))
    found = fit(gated(bias=None), TASK, recipe)
    assert [epoch.metrics["gate_l1"] for epoch in found.epochs][:2] != [0.1, 0.1]
    assert found.cost is not None


def test_a_static_network_learns_from_a_teacher():
    teacher, recipe = seeded(backbone, 5), replace(LONG, epochs=1, gates=None)
    taught, alone = seeded(backbone), seeded(backbone)
    fit(taught, TASK, recipe, callbacks=[Distillation(teacher)])
    fit(alone, TASK, recipe)
    assert not same(taught, alone)
    assert not teacher.training
    with pytest.raises(ValueError, match=r"weight=0; .*above 0"):
        Distillation(teacher, weight=0)


def test_a_strength_that_closes_every_gate_stops_the_run_with_its_last_good_checkpoint(tmp_path):
    gates = GateRecipe(l1_weight=30.0, warmup_fraction=0.0, min_open=0.0, joint_fraction=1.0)
    recipe = replace(LONG, optimizer="sgd", momentum=0.5, lr=0.01, epochs=20, warmup_epochs=0, gates=gates)
    with pytest.raises(GatesClosed, match=r"all gates of layer '\d' are closed") as error:
        fit(gated(), TASK, recipe, out=tmp_path, checkpoint_seconds=0)
    assert isinstance(error.value, Diverged)
    for part in (r"\(step ", "in epoch ", "Use a smaller l1_weight than 30, a longer warmup_fraction than 0.0"):
        assert error.match(part)
    if (tmp_path / "model.safetensors").exists():
        assert str(tmp_path / "model.safetensors") in str(error.value)
        model = gated().eval()
        load_weights(tmp_path, model)
        assert all(routing.mask.any() for routing in model.forward_with_routing(images()).routing.values())


def test_gates_that_keep_a_set_number_learn_straight_through(monkeypatch):
    seen: list[bool] = []
    begin_step = GateTraining.begin_step

    def note(self, steps, epoch):
        seen.append(all(gate.straight_through for gate in self._heads.values()))
        begin_step(self, steps, epoch)

    monkeypatch.setattr(GateTraining, "begin_step", note)
    model = gated(mode="topk", keep=0.5)
    found = fit(model, TASK, replace(LONG, epochs=2, gates=GateRecipe(straight_through=True)))
    assert seen
    assert all(seen)
    assert not any(gate.straight_through for gate in model.gates.values())
    assert [epoch.metrics["open_share"] for epoch in found.epochs] == [0.5, 0.5]
    assert found.epochs[0].metrics["cost"] == pytest.approx(found.cost)


def test_a_network_learns_from_a_teacher(tmp_path):
    teacher = seeded(backbone, 5)
    recipe = replace(LONG, epochs=1, gates=GateRecipe(distill_weight=1.0))
    taught, alone = gated(), gated()
    fit(taught, TASK, recipe, teacher=teacher, out=tmp_path / "run")
    fit(alone, TASK, replace(recipe, gates=GateRecipe()))
    assert not same(taught, alone)
    assert not teacher.training
    with pytest.raises(ValueError, match=r"teacher.weights was"):
        fit(gated(), TASK, recipe, teacher=seeded(backbone, 6), out=tmp_path / "run")


def test_a_teacher_and_a_recipe_must_agree():
    with pytest.raises(ValueError, match=r"distill_weight=1\.0, but there is no teacher"):
        fit(gated(), TASK, replace(LONG, gates=GateRecipe(distill_weight=1.0)))
    with pytest.raises(ValueError, match="does not weigh it"):
        fit(gated(), TASK, LONG, teacher=seeded(backbone))


def test_half_precision_and_float16_work():
    for precision in ("bfloat16", "float16"):
        found = fit(gated(), TASK, replace(LONG, epochs=2, precision=precision))
        assert found.cost == pytest.approx(0.5, rel=0.05)


def test_a_compiled_network_learns_the_same(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    recipe = replace(
        LONG, epochs=2, batch_size=70, gates=GateRecipe(target_macs=0.5, joint_fraction=1.0)
    )  # a graph, and one use of it
    compiled, plain = gated(), gated()
    fit(compiled, TASK, replace(recipe, compile=True))
    fit(plain, TASK, recipe)
    for a, b in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_gates_are_trained_on_a_gpu(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(gated(), TASK, LONG, device="cuda", out=tmp_path, progress=Notes(3), checkpoint_seconds=0)
    assert fit(gated(), TASK, LONG, device="cuda", out=tmp_path).cost == pytest.approx(0.5, rel=0.05)
