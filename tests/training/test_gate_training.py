"""What is added to the loss, how gates are held open, how a cost is met, and what is refused."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training.gated import LONG, backbone, gate_state, gated, images

from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput, deepmoe
from moesaic.models.vgg import VGG16
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.channel_gate import ChannelGate, gate_l1
from moesaic.training.batch_shaping_loss import batch_shaping_loss
from moesaic.training.gate_costs import cost_loss, gate_costs, shift_gates
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.gate_training import ClosedLayer, GateTraining, resolve_gate_recipe
from moesaic.training.recipe import Recipe

CPU = torch.device("cpu")
LABELS = torch.arange(12) % 2


def training(model: DeepMoE, teacher: nn.Module | None = None, **options) -> GateTraining:
    recipe = Recipe(epochs=10, gates=GateRecipe(**{"joint_fraction": 0.5, "warmup_fraction": 0.0, **options}))
    return GateTraining(model, recipe, 6, CPU, teacher)


def set_biases(model: DeepMoE, layer: int, *values: float) -> None:
    """Gates of a layer that are the same for every image."""
    gate = list(model.gates.values())[layer]
    assert isinstance(gate, ChannelGate)
    assert gate.bias is not None
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.tensor(values).repeat(len(gate.bias))[: len(gate.bias)])


def observe(gates: GateTraining, model: DeepMoE, steps: int) -> None:
    gates.begin_step(steps, 1.0)
    gates.observe(model.forward_with_routing(images()).routing)


def loss_of(
    gates: GateTraining, output: DeepMoEOutput, teacher_logits: Tensor | None = None, epoch: float = 1.0
) -> Tensor:
    gates.begin_step(0, epoch)
    return gates.loss(output, LABELS[: len(output.logits)], teacher_logits)


def cost(model: DeepMoE) -> float:
    return float(model.macs(model.forward_with_routing(images()).routing).double().mean()) / model.dense_macs


# the loss


def test_the_loss_is_the_pressure_on_gates_and_the_embedding_s_own_loss():
    model = gated()
    output = model.forward_with_routing(images())
    found = loss_of(training(model, l1_weight=0.3, embedding_weight=0.5, layer_weights="equal"), output)
    pressure = 0.3 * sum(gate_l1(routing) for routing in output.routing.values())
    torch.testing.assert_close(found, pressure + 0.5 * F.cross_entropy(output.embedding_logits, LABELS))


def test_layers_are_pressed_by_what_closing_them_saves():
    model = gated()
    output = model.forward_with_routing(images())
    with torch.no_grad():
        found = loss_of(training(model, l1_weight=1.0, embedding_weight=0.0), output)
    # the convolutions cost 3 · 16 on 16² pixels and twice 16 · 16 on 8²; closing one saves its own and its reader's
    saved = torch.tensor([3 * 256 + 16 * 64, 2 * 16 * 64, 16 * 64.0])
    means = torch.stack([gate_l1(routing).detach() for routing in output.routing.values()])
    torch.testing.assert_close(found, (3 * saved / saved.sum() * means).sum())


def test_nothing_presses_once_gates_are_frozen_or_where_they_keep_a_set_number():
    model = gated()
    gates = training(model)
    assert gates.l1_weight_at(1.0) == 0.1
    gates.freeze(None)
    assert gates.l1_weight_at(1.0) == 0
    assert loss_of(gates, model.forward_with_routing(images())) == 0
    assert training(gated(mode="topk", keep=0.5)).l1_weight_at(1.0) == 0


def test_a_teacher_that_says_the_same_adds_nothing_and_another_one_pulls():
    model = gated().eval()
    gates = training(model, teacher=model, distill_weight=2.0, embedding_weight=0.0, l1_weight=0.0)
    output, teacher_logits = model.forward_with_routing(images()), gates.teacher_logits(images())
    assert teacher_logits is not None
    assert not teacher_logits.requires_grad
    assert loss_of(gates, output, teacher_logits).item() == pytest.approx(0, abs=1e-6)
    teacher = torch.tensor([[4.0, -4.0]]).expand(12, 2)
    expected = 2.0 * 16 * F.kl_div((output.logits / 4).log_softmax(1), (teacher / 4).softmax(1), reduction="batchmean")
    torch.testing.assert_close(loss_of(gates, output, teacher), expected)


# the guard


def test_a_layer_that_is_nearly_closed_is_reported_once_and_relieved():
    model = gated()
    set_biases(model, 1, 1.0, *[-1.0] * 15)
    gates = training(model, min_open=0.07, embedding_weight=0.0, layer_weights="equal")
    warned: list[str] = []
    for step in range(1, 4):
        observe(gates, model, step - 1)
        warned += gates.update(step, 1.0, 12)
    assert len(warned) == 1
    assert re.search(r"only 6.2% of the gates of layer '3' are open on average, minimum 7.0%", warned[0])
    output = model.forward_with_routing(images())
    first, _, last = (gate_l1(routing) for routing in output.routing.values())
    rest = first * min(first.item(), 1) + last * min(last.item(), 1)  # sinking gates are relieved in proportion
    torch.testing.assert_close(loss_of(gates, output), 0.1 * rest)


def test_a_layer_that_is_closed_for_all_images_is_refused_by_name():
    model = gated()
    set_biases(model, 2, -1.0)
    gates = training(model)
    observe(gates, model, 0)
    with pytest.raises(ClosedLayer, match="all gates of layer '6' are closed for 100% of the images"):
        gates.update(1, 1.0, 12)
    assert "a smaller l1_weight than 0.1, a longer warmup_fraction than 0.0" in gates.advice()


def test_where_there_is_a_target_a_closed_layer_is_opened_again():
    model = gated()
    set_biases(model, 2, -1.0, -2.0)
    gates = training(model, target_macs=0.5)
    observe(gates, model, 0)
    gates.update(1, 1.0, 12)
    assert model.forward_with_routing(images()).routing["6"].mask.sum(-1).float().mean() >= 1


# the cost


@pytest.mark.parametrize("target", [0.9, 0.5, 0.3])
def test_shifted_gates_cost_what_was_asked_for(target):
    model = gated(embedding_share=0.05).eval()
    for gate in model.gates.values():
        nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(0))
    embeddings = torch.rand(100, model.embedding.dimension, generator=torch.Generator().manual_seed(0))
    assert shift_gates(model, embeddings, target) == pytest.approx(target, rel=0.01)
    assert gate_costs(model, embeddings).mean() == pytest.approx(target, rel=0.01)


def test_shifting_leaves_a_gate_of_every_layer_open_and_the_order_of_its_gates_as_it_is():
    model = gated().eval()
    embeddings = torch.rand(50, model.embedding.dimension, generator=torch.Generator().manual_seed(0))
    before = [gate(embeddings).scores for gate in model.gates.values()]
    shift_gates(model, embeddings, 1e-6)
    for gate, scores in zip(model.gates.values(), before, strict=True):
        routing = gate(embeddings)
        assert routing.mask.sum() >= 50
        moved = scores - routing.scores
        torch.testing.assert_close(moved, moved[:1, :1, :1].expand_as(moved), rtol=0, atol=1e-5)


def test_layers_keep_their_proportions_when_gates_are_shifted():
    model = gated().eval()
    embeddings = torch.rand(200, model.embedding.dimension, generator=torch.Generator().manual_seed(0))
    for layer, (gate, bias) in enumerate(zip(model.gates.values(), (0.0, 1.0, 5.0), strict=True)):
        nn.init.normal_(gate.weight, std=0.3, generator=torch.Generator().manual_seed(layer))
        nn.init.constant_(gate.bias, bias)
    before = torch.tensor([gate(embeddings).mask.float().mean() for gate in model.gates.values()])
    shift_gates(model, embeddings, 0.4)
    after = torch.tensor([gate(embeddings).mask.float().mean() for gate in model.gates.values()])
    assert before.max() > 1.3 * before.min()
    factors = after / before
    assert factors.max() < 0.9
    torch.testing.assert_close(factors, factors[:1].expand(3), rtol=0.02, atol=0)


def test_lambda_follows_the_cost():
    model = gated()
    gates = training(model, target_macs=0.5)
    for step in range(3):
        observe(gates, model, step)
        gates.update(step + 1, 4.9, 12)  # all gates are open, and the target is due
    assert gates.l1_weight > 0.1
    dear = gates.l1_weight
    for layer in range(3):
        set_biases(model, layer, 1.0, *(-0.1 * gate for gate in range(1, 16)))
    cheap = cost(model)
    observe(gates, model, 3)
    gates.update(4, 4.9, 12)
    assert gates.l1_weight < dear
    assert cheap < cost(model) < 0.5, "half of the way at once, for a batch is a matter of chance"


@pytest.mark.parametrize(
    ("ratio", "closed", "acts"), [(1.04, False, False), (1.07, False, True), (0.7, False, True), (1.0, True, True)]
)
def test_biases_are_shifted_where_the_cost_is_far_off_or_a_layer_is_closed(ratio, closed, acts):
    model = gated()
    for layer in range(3):
        shift = 2.0 if closed and layer == 2 else 0.0
        set_biases(model, layer, *(0.5 - 0.06 * gate - shift for gate in range(16)))
    gates = training(model, target_macs=0.5)
    observe(gates, model, 0)
    before = gate_state(model)
    gates._adapt(0.5 * ratio, 0.5, closed, gates._scores[12])
    changed = not all(torch.equal(a, b) for a, b in zip(before, gate_state(model), strict=True))
    assert changed is acts


def test_an_epoch_reports_cost_and_share_of_open_gates_of_all_layers():
    model = gated()
    set_biases(model, 1, 1.0, *[-1.0] * 15)
    gates = training(model)
    for step in range(2):
        observe(gates, model, step)
    found = gates.epoch_means()
    assert found == pytest.approx((cost(model), (1 + 1 / 16 + 1) / 3))
    assert gates.epoch_means() is None, "a new epoch has begun"


def test_without_a_target_lambda_stays():
    model = gated()
    gates = training(model)
    observe(gates, model, 0)
    gates.update(1, 1.0, 12)
    assert gates.l1_weight == 0.1


# hard gates, gates without biases, gates that are the same for all images


def test_without_biases_lambda_alone_follows_the_cost():
    model = gated(bias=None)
    gates = training(model, target_macs=0.05)
    before = gate_state(model)
    observe(gates, model, 0)
    gates.update(1, 4.9, 12)
    assert gates.l1_weight > 0.1
    assert gates.freeze(torch.ones(3, model.embedding.dimension)) is None
    assert all(torch.equal(a, b) for a, b in zip(before[-3:], gate_state(model)[-3:], strict=True))


def test_a_closed_layer_that_nothing_can_open_again_is_refused():
    model = gated(bias=None)
    with torch.no_grad():
        next(iter(model.gates.values())).weight.zero_()
    gates = training(model, target_macs=0.5)
    observe(gates, model, 0)
    with pytest.raises(ClosedLayer):
        gates.check_open()


def test_the_printed_penalty_is_the_same_for_every_gate():
    model = deepmoe(VGG16(num_classes=2, width=0.1), num_classes=2)
    routing = model.forward_with_routing(torch.rand(2, 3, 32, 32)).routing
    gates = training(model, layer_weights="gates", l1_weight=0.3, embedding_weight=0.0)
    blocks = sum(each.experts for each in routing.values())
    printed = sum(each.gate.sum().item() for each in routing.values()) / 2  # of an image
    output = DeepMoEOutput(torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(2, 2), routing)
    assert loss_of(gates, output).item() == pytest.approx(0.3 * 13 / blocks * printed)


def test_the_loss_of_hard_gates_is_the_squared_distance_of_the_expected_cost_from_its_goal():
    model = gated(mode="hard")
    gates = training(model, target_macs=0.5, embedding_weight=0.0, cost_weight=3.0)
    output = model.forward_with_routing(images())
    found = loss_of(gates, output, epoch=4.9)  # the target is due
    expected = model.expected_macs(output.routing).mean() / model.dense_macs
    torch.testing.assert_close(found, 3 * (expected - 0.5) ** 2)
    found.backward()
    slopes = [head.bias.grad for head in model.heads().values()]
    assert all(bool((slope > 0).all()) == bool(expected > 0.5) for slope in slopes)
    assert loss_of(training(model, embedding_weight=0.0), output, epoch=4.9) == 0, "no target, no loss"


def test_the_expected_cost_is_the_mean_cost_of_gates_with_noise():
    model = gated(mode="hard", bias=0.3, block=3)
    for head in model.heads().values():
        head.noise = 1.0
    embedding, _ = model.embedding(images(2))
    many = embedding.detach()[:1].expand(20_000, -1)
    torch.manual_seed(0)
    routing = {name: head(many) for name, head in model.heads().items()}
    expected = model.expected_macs({name: head(many[:1]) for name, head in model.heads().items()})
    assert float(model.macs(routing).double().mean()) == pytest.approx(expected.item(), rel=0.01)


def test_a_part_of_a_batch_has_the_gradients_of_the_cost_of_the_whole():
    class Parts(GlobalBatch):
        def __init__(self, total: float, size: int) -> None:
            self._total = total
            self._part = (0, 4, size)

        def sum(self, values):
            return torch.as_tensor(self._total)

    model = gated(mode="hard")

    def slope(first: int, last: int, batch: GlobalBatch | None) -> torch.Tensor:
        model.zero_grad()
        model.train().embedding.eval()
        routing = model.forward_with_routing(images()[first:last]).routing
        cost_loss(model, routing, 0.5, batch).backward()
        return next(iter(model.gates.values())).bias.grad.clone()

    total = (model.eval().expected_macs(model.forward_with_routing(images()).routing) / model.dense_macs).sum().item()
    whole = slope(0, 12, None)
    parts = [slope(first, last, Parts(total, 12)) * (last - first) / 12 for first, last in ((0, 4), (4, 12))]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_batch_shaping_is_part_of_the_loss_and_fades():
    model = gated(mode="hard")
    output = model.forward_with_routing(images())
    gates = training(model, embedding_weight=0.0, shaping_weight=2.0)
    shaping = batch_shaping_loss(output.routing.values(), 0.6, 0.4)
    torch.testing.assert_close(loss_of(gates, output, epoch=0.0), 2 * shaping)
    torch.testing.assert_close(loss_of(gates, output, epoch=2.5), shaping)  # half of the joint stage is over
    gates.freeze(None)
    assert loss_of(gates, output, epoch=2.5) == 0


def test_hard_gates_have_noise_and_a_temperature_while_they_learn():
    model = gated(mode="hard")
    gates = training(model, target_macs=0.5, gate_temperature=0.5)
    gates.begin_step(0, 0.0)
    assert {(head.noise, head.temperature) for head in model.heads().values()} == {(1.0, 0.5)}
    gates.freeze(None)
    gates.restore_model()
    assert {(head.noise, head.temperature) for head in model.heads().values()} == {(0.0, 1.0)}


def test_a_constant_embedding_has_no_loss_and_no_cost():
    model = gated(embedding_share=0.0)
    output = model.forward_with_routing(images())
    assert loss_of(training(model, l1_weight=0.0), output) == 0
    assert model.gate_macs == 48
    assert model.gate_parameters() == list(model.gates.parameters())


# what is refused


def test_a_network_with_gates_gets_a_recipe_for_them_and_others_none():
    plain = Recipe(epochs=1)
    assert resolve_gate_recipe(gated(), plain).gates == GateRecipe()
    assert resolve_gate_recipe(backbone(), plain) is plain


@pytest.mark.parametrize(
    ("network", "changes", "message"),
    [
        ({}, {"target_macs": 0.05}, r"target_macs=0.05 is less than what stays .*0\.\d+ of the dense network"),
        (
            {"mode": "topk", "keep": 0.5},
            {"target_macs": 0.36},
            r"which costs 0\.\d+; leave target_macs out .*keep=0.60",
        ),
        ({"mode": "hard", "bias": None}, {"target_macs": 0.5}, "biases of hard gates, and these have none"),
        ({"mode": "hard"}, {"noise": 0.5}, "noise=0.5 is for gates of the modes 'relu' and 'topk'"),
        ({}, {"shaping_weight": 1.0}, "which gates of mode='relu' do not have; leave it out"),
        ({}, {"straight_through": True}, "straight_through=True has no meaning for gates of mode='relu'"),
    ],
)
def test_gates_that_cannot_be_trained_so(network, changes, message):
    with pytest.raises(ValueError, match=message):
        resolve_gate_recipe(gated(**network), Recipe(epochs=1, gates=GateRecipe(**changes)))


def test_a_target_just_above_what_the_error_says_is_taken():
    with pytest.raises(ValueError, match="or more") as error:
        resolve_gate_recipe(gated(), Recipe(epochs=1, gates=GateRecipe(target_macs=0.05)))
    least = float(re.findall(r"use ([\d.]+) or more", str(error.value))[0])
    resolve_gate_recipe(gated(), Recipe(epochs=1, gates=GateRecipe(target_macs=least)))
    with pytest.raises(ValueError, match="or more"):
        resolve_gate_recipe(gated(), Recipe(epochs=1, gates=GateRecipe(target_macs=math.nextafter(least - 0.001, 0))))


def test_recipes_that_do_not_go_with_gates():
    with pytest.raises(ValueError, match="Sequential has no channel gates; leave its `gates` out"):
        resolve_gate_recipe(backbone(), LONG)
    with pytest.raises(ValueError, match="use 'adamw' or 'sgd'"):
        resolve_gate_recipe(gated(), replace(LONG, optimizer="normalized_gd"))
    with pytest.raises(ValueError, match="use compile=False, or noise=0"):
        resolve_gate_recipe(gated(), replace(LONG, compile=True, gates=GateRecipe(noise=0.1)))
