"""convert on MLPs: what becomes of those of every family, what they compute then, and what is refused."""

import copy
import json
from dataclasses import astuple

import pytest
import torch
from mlp_networks import FAMILIES, build, shape_of
from torch import nn
from torch.nn import functional as F

import moesaic
from moesaic import ExpertChoice, TokenChoice, TokenMoE, record_routing
from moesaic.layers.recording import RoutedLayer
from moesaic.models.conversion_receipt import conversion_receipt
from moesaic.models.convert import applied_conversions, convert
from moesaic.models.convert_candidates import convertible_layers
from moesaic.models.convert_mlp import AddResidual, ChannelsFirstTokenMoE
from moesaic.models.mlp_candidates import find_mlps
from moesaic.models.mlp_expert_init import cluster_neurons
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import ModelSpec
from moesaic.models.rescaled_routers import RescaledExpertChoice, RescaledTokenChoice
from moesaic.models.spec_validation import check_spec
from moesaic.validated_json import InvalidFile

PATTERNS = {
    "vit": "blocks.*.mlp",
    "deit": "blocks.*.mlp",
    "swin": "layers.*.mlp",
    "beit": "blocks.*.mlp",
    "mixer": "blocks.*.mlp_*",
    "convnext": "stages.[01].*.mlp",
    "convnext of convolutions": "stages.[01].*.mlp",
    "pairs": "layer.*.intermediate",
    "sequential": ["mlp", "own"],
}
EXACT = {
    "copies, of which each token selects two": {"router": "token-choice", "init": "upcycle"},
    "copies that take every token": {"init": "upcycle", "capacity": 2.0},
    "parts that take every token": {"init": "split", "capacity": 2.0, "gate": "one"},
    "parts that every token selects": {"init": "split", "router": "token-choice", "top_k": 2, "gate": "one"},
}


def converted(model: nn.Module, family: str, **options) -> nn.Module:
    options = {"experts": 2, "input_size": shape_of(family), **options}
    return convert(copy.deepcopy(model), PATTERNS[family], **options)


def images(family: str, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *shape_of(family), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return found["logits"] if isinstance(found, dict) else found


@pytest.fixture(scope="module")
def networks(timm):
    return {family: build(timm, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_converts_and_equals_the_original_at_the_start(networks, family):
    model = networks[family]
    for options in EXACT.values():
        receipt = conversion_receipt(converted(model, family, **options), model, images(family))
        assert len(receipt.layers) == (4 if family == "mixer" else 2)
        assert max(layer.difference for layer in receipt.layers) < 1e-5
        assert receipt.total.difference < 1e-5


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_in_float64_outputs_and_gradients_equal_the_originals(networks, options):
    model, x = copy.deepcopy(networks["vit"]).double(), images("vit").double().requires_grad_()
    new = converted(model, "vit", **options)
    outputs = [each(x) for each in (model, new)]
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_changes_router_and_experts_of_every_layer(networks, family):
    model = converted(networks[family], family, init="upcycle").train()
    layers = [module for module in model.modules() if isinstance(module, TokenMoE)]
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(logits(model, images(family, 4)), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    for layer, old in zip(layers, before, strict=True):
        assert all(not torch.equal(weight, old[name]) for name, weight in layer.state_dict().items())


@pytest.mark.parametrize("router", ["token-choice", "soft"])
@pytest.mark.parametrize("init", ["scratch", "upcycle", "split"])
def test_a_training_step_changes_the_router_of_every_start(networks, router, init):
    model = converted(networks["vit"], "vit", router=router, init=init, experts=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # between copies the choice does not matter until they differ
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(images("vit")), torch.tensor([0, 1])).backward()
    for module in model.modules():
        if isinstance(module, TokenMoE):
            assert all(weight.grad.abs().sum() > 0 for weight in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("router", ["expert-choice", "soft"])
def test_conversions_are_repeated_from_json_and_weights_load(networks, family, router):
    model = converted(networks[family], family, router=router, init="split", seed=3)
    again = copy.deepcopy(networks[family])
    for conversion in json.loads(json.dumps(applied_conversions(model))):
        convert(again, **conversion)
    assert applied_conversions(again) == applied_conversions(model)
    nn.init.zeros_(next(again.parameters()))
    again.load_state_dict(model.state_dict())
    x = images(family)
    with torch.no_grad():
        torch.testing.assert_close(logits(again, x), logits(model, x), rtol=0, atol=0)


def test_layers_are_of_the_kind_that_their_inputs_need(networks):
    conv = converted(networks["convnext of convolutions"], "convnext of convolutions")
    assert isinstance(conv.get_submodule("stages.0.blocks.0.mlp"), ChannelsFirstTokenMoE)
    pairs = converted(networks["pairs"], "pairs", init="upcycle", capacity=2.0)
    assert isinstance(pairs.layer[0].intermediate, TokenMoE)
    assert isinstance(pairs.layer[0].output, AddResidual)
    assert pairs.layer[0].intermediate.drop.p == 0.25
    plain = converted(networks["sequential"], "sequential")
    assert plain.mlp.experts.dropout == 0.1
    assert plain.mlp.drop.p == 0
    assert (plain.mlp.experts.activation, plain.own.experts.activation) == ("relu", "silu")


@pytest.mark.parametrize(
    ("family", "name", "grid", "prefix"),
    [
        ("vit", "blocks.1.mlp", (4, 4), 1),
        ("deit", "blocks.1.mlp", (4, 4), 2),
        ("swin", "layers.0.blocks.0.mlp", (4, 8), 0),
        ("swin", "layers.1.blocks.0.mlp", (2, 4), 0),
        ("mixer", "blocks.0.mlp_channels", (4, 4), 0),
        ("mixer", "blocks.0.mlp_tokens", None, 0),
        ("convnext", "stages.1.blocks.0.mlp", (4, 4), 0),
        ("convnext of convolutions", "stages.1.blocks.0.mlp", (4, 4), 0),
        ("pairs", "layer.0.intermediate", (4, 4), 3),
    ],
)
def test_records_have_the_grid_and_the_prefix_of_the_network(networks, family, name, grid, prefix):
    model = converted(networks[family], family)
    with torch.no_grad(), record_routing(model) as routing:
        model(images(family))
    assert (routing[name].grid, routing[name].prefix) == (grid, prefix)


def test_prefix_tokens_bypass_on_request(networks):
    model = converted(networks["vit"], "vit", prefix="bypass")
    with torch.no_grad(), record_routing(model) as routing:
        model(images("vit"))
    assert routing["blocks.0.mlp"].units == 16
    assert applied_conversions(model)[0]["prefix"] == "bypass"


def test_a_network_that_takes_images_of_every_size_still_does(timm):
    options = {"img_size": (16, 8), "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
    model = timm.models.vision_transformer.VisionTransformer(**options, dynamic_img_size=True)
    convert(model, "blocks.0.mlp", experts=2, input_size=(3, 16, 8))
    assert model(torch.zeros(1, 3, 16, 24)).shape == (1, 1000)
    fixed = timm.models.vision_transformer.VisionTransformer(**options)
    convert(fixed, "blocks.0.mlp", experts=2, input_size=(3, 16, 8))
    assert fixed.blocks[0].mlp.grid == (4, 2)


def test_a_receipt_counts_parameters_and_multiply_adds(networks):
    model = networks["vit"]
    new = converted(model, "vit", experts=4, init="upcycle", capacity=1.0)
    receipt = conversion_receipt(new, model, images("vit"))
    C, J, N, E, L = 12, 48, 17, 4, 5  # 17 / 4 tokens, rounded up
    first = receipt.layers[0]
    assert first.parameters == (2 * C * J + J + C, E * (2 * C * J + J + C) + E * C)
    assert first.macs == (N * 2 * C * J, E * L * 2 * C * J + N * E * C)
    assert receipt.total.parameters == tuple(sum(w.numel() for w in each.parameters()) for each in (model, new))
    assert receipt.total.macs == tuple(count_macs(each, (3, 16, 16)).macs for each in (model, new))
    assert 0 < receipt.layers[0].difference < float("inf")
    lines = str(receipt).splitlines()
    assert lines[0].split() == ["layer", "parameters", "after", "multiply-adds", "after", "difference"]
    assert [line.split()[0] for line in lines[1:]] == ["blocks.0.mlp", "blocks.1.mlp", "all"]
    assert len(set(map(len, lines))) == 1


def test_a_receipt_tells_of_each_layer_alone(networks):
    model = networks["vit"]
    new = converted(model, "vit", init="upcycle", router="token-choice")
    with torch.no_grad():
        new.blocks[0].mlp.experts.weight_out.zero_()
    first, second = conversion_receipt(new, model, images("vit")).layers
    assert first.difference > 0.1
    assert second.difference < 1e-5


def test_a_receipt_of_a_convolution_and_of_pairs(networks):
    model = networks["pairs"]
    new = converted(model, "pairs", init="split", capacity=2.0, gate="one")
    layer = conversion_receipt(new, model, images("pairs")).layers[0]
    assert layer.parameters[0] == 24 * 12 * 2 + 36
    assert layer.macs[0] == 19 * 24 * 12 * 2
    with pytest.raises(ValueError, match="Pairs has no layer that convert replaced"):
        conversion_receipt(model, model, images("pairs"))
    with pytest.raises(ValueError, match="the original has converted layers too"):
        conversion_receipt(new, new, images("pairs"))
    with pytest.raises(ValueError, match=r"images are \(3, 16, 16\); give a batch"):
        conversion_receipt(new, model, images("pairs")[0])


def test_parts_have_the_neurons_and_copies_are_equal(networks):
    unit = find_mlps(networks["vit"])["blocks.0.mlp"]
    split = converted(networks["vit"], "vit", init="split", experts=4).blocks[0].mlp.experts
    assert torch.equal(split.weight_in.flatten(0, 1), unit.fc1.weight)
    assert torch.equal(torch.cat(list(split.weight_out), 1), unit.fc2.weight)
    torch.testing.assert_close(split.bias_out.sum(0), unit.fc2.bias)
    copies = converted(networks["vit"], "vit", init="upcycle", experts=4).blocks[0].mlp.experts
    assert all(torch.equal(weight, unit.fc2.weight) for weight in copies.weight_out)


def test_neurons_that_are_active_together_share_an_expert(networks):
    torch.manual_seed(0)
    kinds = torch.arange(4).repeat(6)
    patterns = torch.randn(100, 4)
    activations = patterns[:, kinds] + 0.01 * torch.randn(100, 24)
    neurons = cluster_neurons(activations, 4, seed=5)
    assert sorted(neurons.flatten().tolist()) == list(range(24))
    assert all(len(set(kinds[row].tolist())) == 1 for row in neurons)
    assert torch.equal(neurons, cluster_neurons(activations, 4, seed=5))
    equal = cluster_neurons(torch.ones(5, 8), 4)  # nothing to tell them apart
    assert sorted(equal.flatten().tolist()) == list(range(8))


def test_neurons_that_lose_least_leave_a_full_expert():
    patterns = torch.randn(3, 64)
    like = [0, 0, 0, 0, 1, 1]  # three for each expert, so that one of the first four has to move
    activations = patterns[like] + 0.01 * torch.randn(6, 64)
    activations[2] += 0.5 * patterns[1]  # the one that is most like the others
    scale = torch.tensor([1.0, 30.0, 1.0, 0.1, 1.0, 5.0])  # how active a neuron is does not count
    found = cluster_neurons((scale[:, None] * activations).T, experts=2)
    assert found.tolist() == [[0, 1, 3], [2, 4, 5]]


def test_a_receipt_of_zeros_has_no_difference():
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    for weight in layer[2].parameters():
        nn.init.zeros_(weight)
    model = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.Flatten(2), Transposed(), layer).eval()
    new = convert(copy.deepcopy(model), "3", experts=2, init="upcycle", input_size=16)
    assert conversion_receipt(new, model, torch.randn(2, 3, 16, 16)).total.difference == 0


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_clustered_neurons_are_all_of_the_mlps_and_equal_it_together(networks):
    model, x = networks["convnext of convolutions"], images("convnext")
    options = {"init": "split", "capacity": 4.0, "gate": "one", "images": x, "experts": 4}
    new = converted(model, "convnext of convolutions", **options)
    assert conversion_receipt(new, model, x).total.difference < 1e-5
    unit = find_mlps(model)["stages.0.blocks.0.mlp"]
    rows = new.stages[0].blocks[0].mlp.experts.weight_in.flatten(0, 1)
    assert not torch.equal(rows, unit.fc1.weight.flatten(1))
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, unit.fc1.weight.flatten(1).tolist()))
    assert "images" not in applied_conversions(new)[0]


@pytest.mark.parametrize("gate", ["softmax_selected", "softmax_all", "softmax_experts", "one"])
@pytest.mark.parametrize("init", ["upcycle", "split"])
def test_the_mean_output_is_preserved_while_scores_are_equal(gate, init):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)))
    x = torch.randn(1, 1, 6).expand(1, 12, 6)  # tokens are equal, so that the choice does not matter
    new = convert(copy.deepcopy(model), "0", experts=4, capacity=2.0, gate=gate, init=init)
    with torch.no_grad():
        new[0].router.weight.zero_()
        torch.testing.assert_close(new(x).mean(1), model(x).mean(1))


@pytest.mark.parametrize("gate", ["softmax_selected", "softmax_all", "one"])
@pytest.mark.parametrize("summed", [True, False])
def test_gates_of_token_choice_are_rescaled_for_copies_and_for_parts(gate, summed):
    router = RescaledTokenChoice(3, 4, 2, gate=gate, summed=summed)
    nn.init.zeros_(router.weight)
    found = router(torch.randn(2, 3, 2, 2)).gate
    torch.testing.assert_close(found, torch.full_like(found, 0.5 if summed else 2.0))


def test_routers_have_the_options_that_were_given_and_defaults(networks):
    def router(**options):
        return converted(networks["vit"], "vit", experts=4, **options).blocks[0].mlp.router

    plain = router()
    assert (type(plain), plain.capacity, plain.gate) == (ExpertChoice, 1.0, "softmax_experts")
    assert router(tokens_per_expert=3).patches_per_expert == 3
    assert type(router(init="upcycle")) is RescaledExpertChoice
    choice = router(router="token-choice")
    assert (type(choice), choice.top_k, choice.gate, choice.capacity_factor) == (
        TokenChoice,
        2,
        "softmax_selected",
        None,
    )
    one = router(router="token-choice", top_k=1, capacity=1.5)
    assert (one.top_k, one.gate, one.capacity_factor) == (1, "softmax_all", 1.5)
    assert router(router="soft").slots_per_expert == 5
    assert router(router="soft", capacity=2.0).slots_per_expert == 9
    assert router(router=lambda dim, experts, patch_size: TokenChoice(dim, experts, 3)).top_k == 3


def test_rules_count_the_mlps_on_tokens(networks):
    def names(family, rule):
        model = convert(copy.deepcopy(networks[family]), rule, experts=2, input_size=shape_of(family))
        return [conversion["layer"] for conversion in applied_conversions(model)]

    assert names("vit", "last-1") == ["blocks.1.mlp"]
    assert names("mixer", "every-2") == ["blocks.0.mlp_channels", "blocks.1.mlp_channels"]
    assert names("sequential", "last-2") == ["mlp", "own"]  # the head runs on vectors
    assert names("vit", ["last-1", "blocks.0.mlp"]) == ["blocks.0.mlp", "blocks.1.mlp"]


def test_convertible_layers_lists_mlps_on_tokens(networks):
    assert convertible_layers(networks["vit"], input_size=16) == ("blocks.0.mlp", "blocks.1.mlp")
    assert "head" not in convertible_layers(networks["sequential"], input_size=16)
    assert "stages.0.blocks.0.mlp.fc1" in convertible_layers(networks["convnext"], input_size=32)


@pytest.mark.parametrize(
    ("family", "layer", "options", "message"),
    [
        ("vit", "last-3", {}, "'last-3', but VisionTransformer has 2 MLPs that can be converted; use last-1 to last-2"),
        ("vit", "every-0", {}, "use every-1 to every-2"),
        ("vit", "blocks.0.mlp.fc1", {}, "did not run on a map .*; it is a part of the MLP 'blocks.0.mlp'"),
        ("vit", "blocks.0.attn", {}, "'blocks.0.attn' has 36 hidden neurons"),
        ("vit", "blocks.*.mpl", {}, "did you mean 'blocks.1.mlp' or 'blocks.0.mlp'"),
        ("vit", "blocks.?", {}, "'blocks.0' is a Block, neither a Conv2d nor a Linear, nor an MLP"),
        ("sequential", "head", {}, r"'head' runs on vectors \(B, C\), which have no tokens; convertible: 'mlp', 'own'"),
        ("vit", None, {"patch_size": 4}, "patch_size=4 is for convolutions, and 'blocks.0.mlp' is an MLP; leave"),
        ("vit", None, {"patches_per_expert": 4}, "use tokens_per_expert or capacity"),
        ("vit", None, {"gate_on": "input"}, "gate_on='input' is for convolutions"),
        ("vit", None, {"combine": "sum"}, "combine='sum' is for convolutions"),
        ("vit", None, {"pad": True}, "pad=True is for convolutions"),
        ("vit", None, {"images": torch.zeros(1, 3, 16, 16)}, "images are for init='split'"),
        ("vit", None, {"images": torch.zeros(3, 16, 16), "init": "split"}, r"images are \(3, 16, 16\)"),
        ("vit", None, {"init": "split", "experts": 5}, "48 hidden neurons, which 5 experts .*; use 4 or 6"),
        ("vit", None, {"tokens_per_expert": 2, "capacity": 1.0}, "leave one out"),
        ("vit", None, {"tokens_per_expert": 18}, "has only 17 tokens; take at most 17"),
        ("vit", None, {"tokens_per_expert": 0}, "tokens_per_expert=0; it must be at least 1"),
        ("vit", None, {"capacity": 0.0}, "capacity=0"),
        ("vit", None, {"top_k": 2}, "top_k=2, but router='expert-choice' has no such option"),
        ("vit", None, {"top_k": 3, "router": "token-choice"}, "top_k=3, but there are 2 experts"),
        ("vit", None, {"tokens_per_expert": 3, "router": "token-choice"}, "tokens_per_expert=3, but router="),
        ("vit", None, {"gate": "one", "router": "soft"}, "gate='one', but router='soft'"),
        ("vit", None, {"gate": "max"}, "gate='max' is unknown"),
        ("vit", None, {"prefix": "skip"}, "prefix='skip' is unknown"),
        ("mixer", None, {"prefix": "bypass"}, "'bypass', but 'blocks.0.mlp_tokens' has no class or register tokens"),
        ("convnext", "stages.0.blocks.0.mlp.fc1", {"capacity": 1.0}, "capacity=1.0 is for MLPs, .* use patches_per"),
        ("convnext", "stages.0.blocks.0.mlp.fc1", {"init": "split"}, "init='split' shares out hidden neurons of MLPs"),
    ],
)  # fmt: skip
def test_what_does_not_apply_is_refused_and_the_model_is_unchanged(networks, family, layer, options, message):
    model = networks[family]
    before = [(name, id(module)) for name, module in model.named_modules()]
    options = {"experts": 2, "input_size": shape_of(family), **options}
    with pytest.raises(ValueError, match=message):
        convert(model, layer or PATTERNS[family], **options)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert applied_conversions(model) == ()


def test_rules_need_mlps_and_say_what_else_can_be_converted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    with pytest.raises(ValueError, match=r"'last-2' counts MLPs, and Sequential has none .*; convertible: '0'"):
        convert(model, "last-2", experts=2)


def test_soft_slots_need_the_number_of_tokens():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    with pytest.raises(ValueError, match="give input_size, the side of your images, or tokens_per_expert"):
        convert(model, "0", experts=2, router="soft")
    assert convert(model, "0", experts=2, router="soft", tokens_per_expert=3)[0].router.slots_per_expert == 3


def test_mlps_without_a_batch_axis_or_on_one_token_are_refused():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
            self.squeeze = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))

        def forward(self, x):
            return x * self.squeeze(x.mean((2, 3), keepdim=True)) + self.positions(torch.zeros(1, 4, 2)).sum()

    with pytest.raises(ValueError, match=r"'positions' runs on \(1, 4, 2\) for 2 images, which has no batch axis"):
        convert(Table(), "positions", experts=2, input_size=4)
    with pytest.raises(ValueError, match="'squeeze' runs on one token of an image"):
        convert(Table(), "squeeze", experts=2, input_size=4)


def test_new_weights_depend_on_seed_and_name_and_leave_the_global_rng_alone(networks):
    state = torch.get_rng_state()
    first, again, other = (converted(networks["vit"], "vit", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.blocks[0].mlp.experts.weight_in, again.blocks[0].mlp.experts.weight_in)
    assert torch.equal(first.blocks[0].mlp.router.weight, again.blocks[0].mlp.router.weight)
    assert not torch.equal(first.blocks[0].mlp.router.weight, other.blocks[0].mlp.router.weight)
    assert not torch.equal(first.blocks[0].mlp.experts.weight_in, first.blocks[1].mlp.experts.weight_in)


def test_dtype_and_mode_are_preserved(networks):
    model = copy.deepcopy(networks["vit"]).to(torch.bfloat16).train()
    layer = converted(model, "vit", init="upcycle").blocks[0].mlp
    assert layer.training
    assert {weight.dtype for weight in layer.parameters()} == {torch.bfloat16}


def test_a_converted_network_cannot_be_converted_there_again(networks):
    model = converted(networks["vit"], "vit")
    assert sum(isinstance(module, RoutedLayer) for module in model.modules()) == 2
    with pytest.raises(ValueError, match=r"'blocks.0.mlp' is a TokenMoE, which is routed already"):
        convert(model, "blocks.0.mlp", experts=2, input_size=16)


@pytest.mark.parametrize("router", ["expert-choice", "soft"])
def test_a_converted_network_compiles_and_exports(networks, router, tmp_path):
    model = copy.deepcopy(networks["vit"])
    del model.blocks[1]
    convert(model, "blocks.0.mlp", experts=2, router=router, init="upcycle", input_size=16)
    x = images("vit")
    with torch.no_grad():
        expected = model(x)
        if router == "expert-choice":
            whole = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(whole(x), expected)
            program = torch.export.export(model, (x,))
            torch.testing.assert_close(program.module()(x), expected)
        onnx = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        torch.onnx.export(model, (x,), tmp_path / "x.onnx", dynamo=True, verbose=False)
        session = onnx.InferenceSession(tmp_path / "x.onnx")
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ViT", "Dinov2WithRegisters", "Swin"])
def test_networks_of_transformers_convert(timm, name):
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "patch_size": 8}
    if name == "Swin":
        sizes = {"image_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    x = torch.randn(2, 3, 32, 32)
    new = convert(copy.deepcopy(model), "every-1", experts=2, router="token-choice", init="upcycle")
    receipt = conversion_receipt(new, model, x)
    assert len(receipt.layers) == 2
    assert max(each.difference for each in (*receipt.layers, receipt.total)) < 1e-5
    with torch.no_grad(), record_routing(new) as routing:
        new(x)
    expected = {"ViT": (4, 1), "Dinov2WithRegisters": (4, 5), "Swin": (8, 0)}[name]
    first = next(iter(routing.values()))
    assert (first.grid, first.prefix) == ((expected[0],) * 2, expected[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 1}, "'images' is no argument of convert that a file may give"),
        ({"tokens_per_expert": 0}, "tokens_per_expert=0 of convert is not from 1 to"),
        ({"tokens_per_expert": 1.5}, "is not a whole number"),
        ({"top_k": 1 << 40}, "top_k=.* is not from 1 to"),
        ({"capacity": 1e9}, "capacity=1000000000.0 of convert is beyond"),
    ],
)
def test_options_of_tokens_in_a_file_pass_within_limits_alone(networks, options, message):
    (*_, conversion) = applied_conversions(converted(networks["vit"], "vit", router="token-choice", init="split"))

    def spec(more):
        return ModelSpec("timm/test_vit", {"num_classes": 2}, ({**conversion, **more},))

    check_spec(spec({"prefix": "bypass", "capacity": 1.25}), "model.safetensors")
    with pytest.raises(InvalidFile, match=message):
        check_spec(spec(options), "model.safetensors")


def test_receipts_are_plain_numbers(networks):
    receipt = conversion_receipt(converted(networks["vit"], "vit"), networks["vit"], images("vit"))
    assert json.loads(json.dumps(astuple(receipt.total)))[0] == "all"


@pytest.mark.parametrize("init", ["scratch", "upcycle", "split"])
def test_a_default_device_does_not_change_the_conversion(init):
    model = moesaic.create_model("vit_tiny_patch4_32", num_classes=2, depth=1, image_size=8)
    images = torch.randn(4, 3, 8, 8) if init == "split" else None

    def convert():
        made = moesaic.convert(copy.deepcopy(model), "blocks.0.mlp", experts=2, capacity=1.0, init=init, images=images)
        return moesaic.skip(made, "blocks.0", keep=0.5).state_dict()

    expected = convert()
    with torch.device("meta"):
        found = convert()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
