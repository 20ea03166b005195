"""convert: what becomes of a convolution, what it computes then, and what is refused with which message."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from moesaic import PatchMoE, record_routing
from moesaic.models.convert import ChannelsLastPatchMoE, RescaledExpertChoice, applied_conversions, convert
from moesaic.models.convert_candidates import convertible_layers
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import ModelSpec, create_model
from moesaic.models.resnet import ResNet18
from moesaic.models.skip import skip


class Residual(nn.Module):
    """A block as torchvision writes it, with something of each kind that cannot be converted."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding="same")
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(x + self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, padding=2)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
    return model.eval()


def one(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer)


EXACT = {"gate": "one", "init": "upcycle"}


@pytest.mark.parametrize(
    ("layer", "patches"), [("stem", 32), ("layer1.0.conv?", 32), (["layer1.1.conv2", "layer1.1.conv1"], 8)], ids=str
)
@pytest.mark.parametrize("combine", ["concat", "sum"])
@pytest.mark.parametrize("gate_on", ["output", "input"])
def test_an_upcycled_network_with_all_patches_and_gate_one_equals_the_original(layer, patches, combine, gate_on):
    model, x = net().double(), torch.randn(2, 3, 32, 16, dtype=torch.float64)
    options = {"patches_per_expert": patches, "patch_size": 4, "combine": combine, "gate_on": gate_on}
    with torch.no_grad():
        before = model(x)
        assert convert(model, layer, experts=4, input_size=(3, 32, 16), **options, **EXACT) is model
        assert any(isinstance(module, PatchMoE) for module in model.modules())
        torch.testing.assert_close(model(x), before, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 12), nn.Conv2d(6, 12, 1, bias=False), nn.Conv2d(6, 12, 1, padding="valid", dilation=2)]
)
def test_upcycled_linear_layers_and_1_by_1_convolutions_equal_the_originals(layer):
    shape = (4, 4, 6) if isinstance(layer, nn.Linear) else (6, 4, 4)
    model, x = one(layer), torch.randn(2, *shape)
    with torch.no_grad():
        before = model(x)
        convert(model, "0", experts=3, patches_per_expert=16, patch_size=1, input_size=shape, **EXACT)
        assert isinstance(model[0], ChannelsLastPatchMoE) == isinstance(layer, nn.Linear)
        torch.testing.assert_close(model(x), before)
        assert model(x).is_contiguous()


def test_our_own_networks_can_be_converted():
    model, x = ResNet18(num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        convert(model, "body.9.*.0", experts=8, patches_per_expert=16, input_size=32, **EXACT)
        torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)
    assert sum(isinstance(module, PatchMoE) for module in model.modules()) == 2


@pytest.mark.parametrize("gate", ["softmax_selected", "softmax_all", "one"])
@pytest.mark.parametrize("gate_on", ["output", "input"])
def test_upcycled_gates_are_N_over_L_on_the_selected_patches(gate, gate_on):
    conv, x = nn.Conv2d(4, 6, 1), torch.randn(2, 4, 8, 8)
    options = {"patches_per_expert": 4, "patch_size": 2, "gate": gate, "gate_on": gate_on, "init": "upcycle"}
    layer = convert(one(copy.deepcopy(conv)), "0", experts=2, input_size=8, **options)[0]
    with torch.no_grad(), record_routing(layer) as routing:
        layer.router.weight.zero_()
        found, expected = layer(x), conv(x)
        if gate_on == "input":  # the bias is not gated
            found, expected = (y - conv.bias.view(1, -1, 1, 1) for y in (found, expected))
    mask = routing[""].mask.transpose(1, 2).reshape(2, 2, 4, 4)
    mask = mask.repeat_interleave(2, 2).repeat_interleave(2, 3).repeat_interleave(3, 1)
    torch.testing.assert_close(found, torch.where(mask, 4 * expected, 0))


@pytest.mark.parametrize("gate", ["softmax_selected", "softmax_all", "one"])
@pytest.mark.parametrize("summed", [False, True])
def test_gates_average_1_over_the_map_of_each_expert_or_of_their_sum(gate, summed):
    router = RescaledExpertChoice(4, 4, 3, gate=gate, summed=summed)
    nn.init.zeros_(router.weight)
    weights = router(torch.randn(2, 4, 4, 4)).weights
    found = weights.sum(2).mean(1) if summed else weights.mean(1)
    torch.testing.assert_close(found, torch.ones_like(found))


def test_experts_have_as_many_parameters_as_the_convolution():
    before = count_macs(net(), (3, 32, 32))
    after = count_macs(convert(net(), "layer1.0.conv2", experts=4, patch_size=8, input_size=32), (3, 32, 32))
    assert after.parameters == before.parameters + 4 * 8 * 8 * 8
    assert after.dense_macs == before.macs
    assert after.routed_macs == after.routed_dense_macs // 4 + 32 * 32 * 8 * 4


def test_upcycling_copies_the_filters():
    model = net()
    weight, bias = model.stem.weight.detach().clone(), model.stem.bias.detach().clone()
    stem = convert(model, "stem", experts=4, init="upcycle", input_size=32).stem
    assert torch.equal(stem.experts.weight.flatten(0, 1), weight)
    assert torch.equal(stem.experts.bias.flatten(), bias)
    assert stem.kernel_size == 5


def test_new_weights_depend_on_seed_and_layer_name_only():
    options = {"experts": 4, "patch_size": 4, "input_size": 32}
    alone = convert(net(), "layer1.1.conv2", **options)
    together = convert(net(), "layer1.*.conv2", **options)
    other = convert(net(), "layer1.1.conv2", seed=1, **options)
    for key, weight in alone.layer1[1].conv2.named_parameters():
        assert torch.equal(weight, together.layer1[1].conv2.get_parameter(key))
        assert not torch.equal(weight, together.layer1[0].conv2.get_parameter(key))
        assert not torch.equal(weight, other.layer1[1].conv2.get_parameter(key))


def test_converting_does_not_advance_the_global_rng():
    model = net()
    state = torch.get_rng_state()
    convert(model, "stem", experts=4, input_size=32)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("training", [True, False])
def test_dtype_mode_and_name_are_preserved(training):
    model = net().to(torch.bfloat16).train(training)
    convert(model, "layer1.0.conv1", experts=2, input_size=32)
    layer = model.layer1[0].conv1
    assert layer.experts.weight.dtype == layer.router.weight.dtype == torch.bfloat16
    assert {module.training for module in layer.modules()} == {training}
    assert layer.experts.bias is None
    with record_routing(model) as routing:
        model(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))
    assert list(routing) == ["layer1.0.conv1"]


@pytest.mark.parametrize(
    ("sides", "patch_size", "patches"),
    [
        ((32, 32), 8, 16),
        ((16, 16), 4, 16),
        ((8, 8), 2, 16),
        ((7, 7), 1, 49),
        ((14, 14), 2, 49),
        ((56, 56), 8, 49),
        ((12, 8), 2, 24),
        ((4, 4), 1, 16),
        ((2, 2), 1, 4),
        ((13, 17), 1, 221),
    ],
    ids=str,
)
def test_automatic_patch_sizes_give_about_16_to_64_patches(sides, patch_size, patches):
    model = convert(one(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=4, input_size=(3, *sides))
    assert model[0].patch_size == patch_size
    assert model[0].patches_per_expert == patches // 4


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_a_converted_model_runs_on_maps_of_every_size(rows, columns, experts):
    if rows * columns == 1:
        return
    model = convert(one(nn.Conv2d(1, 8, 3, padding=1)), "0", experts=experts, input_size=(1, rows, columns))
    assert model(torch.zeros(1, 1, rows, columns)).shape == (1, 8, rows, columns)
    assert 1 <= model[0].patches_per_expert <= rows * columns // model[0].patch_size ** 2


def test_patches_divide_the_maps_of_all_sizes_that_a_layer_runs_on():
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).mean((2, 3)) + self.head(F.avg_pool2d(x, 4)).mean((2, 3))

    model = convert(Pyramid(), "head", experts=2, input_size=24)
    assert (model.head.patch_size, model.head.patches_per_expert) == (2, 4)  # 144 and 9 patches
    with pytest.raises(
        ValueError, match=r"runs on a 6×6 map, which 4×4 patches do not divide; use patch_size=1, 2, 3 or"
    ):
        convert(Pyramid(), "head", experts=2, patch_size=4, input_size=24)
    with pytest.raises(ValueError, match="patches_per_expert=5, but the 6×6 map of 'head' has only 4 patches of 3×3"):
        convert(Pyramid(), "head", experts=2, patch_size=3, patches_per_expert=5, input_size=24)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            r"'0' has stride 2, and a routed layer preserves the size of the map",
        ),
        (nn.Conv2d(8, 8, 3, stride=(2, 1), padding=1), r"has stride 2×1"),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), r"is depthwise \(groups=8\), and experts read all channels"),
        (nn.Conv2d(8, 8, 3, padding=1, groups=2), r"is grouped \(groups=2\)"),
        (nn.Conv2d(8, 8, 3, padding=2, dilation=2), r"has dilation 2"),
        (nn.Conv2d(8, 8, 2), r"has a 2×2 kernel, and experts have odd square kernels"),
        (nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), r"has a 1×3 kernel"),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), r"pads with 'reflect', and experts pad with zeros"),
        (nn.Conv2d(8, 8, 3), r"has padding=\(0, 0\), and experts preserve the size of the map: padding 1"),
        (nn.Conv2d(8, 8, 1, padding=1), r"has padding=\(1, 1\).*padding 0"),
        (nn.BatchNorm2d(8), r"is a BatchNorm2d, neither a Conv2d nor a Linear"),
        (nn.ConvTranspose2d(8, 8, 3), r"is a ConvTranspose2d, neither"),
        (PatchMoE(8, 8, experts=2, patches_per_expert=1), r"is a PatchMoE, which is routed already"),
        (nn.LazyConv2d(8, 3, padding=1), r"has no weights yet; run the model once"),
        (nn.Linear(8, 8), r"is a Linear, which may run on maps or on vectors: give input_size"),
        (nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)), r"has a parametrised weight"),
        (nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)), r"computes its weight before each run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_cannot_be_converted_are_refused_with_reason_and_alternatives(layer, message):
    model = nn.Sequential(layer, nn.Conv2d(8, 8, 3, padding=1))
    with pytest.raises(ValueError, match=f"{message}.*; convertible: '1'$"):
        convert(model, "0", experts=2, patches_per_expert=1, patch_size=1)
    assert model[0] is layer


def test_shared_weights_and_hooks_are_refused():
    first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"'1' shares its weights with '0'; give each a copy.*no layer of this Seq"):
        convert(nn.Sequential(first, second), "1", experts=2, input_size=8)
    with pytest.raises(ValueError, match="'0' shares its weights with '1'"):
        convert(nn.Sequential(first, first), "0", experts=2, input_size=8)
    hooked = nn.Conv2d(8, 8, 3, padding=1)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="'0' has forward hooks, which would be lost"):
        convert(one(hooked), "0", experts=2, input_size=8)


def test_a_layer_on_maps_of_one_pixel_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1))
    assert convertible_layers(model, input_size=8) == ("0",)
    with pytest.raises(ValueError, match="'2' runs on a map of one pixel, which has a single patch; convertible: '0'"):
        convert(model, "2", experts=2, input_size=8)


def test_a_subclass_that_computes_something_else_is_refused():
    class Doubled(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(ValueError, match="'0' is a Doubled, which does not compute the plain layer of its weights"):
        convert(one(Doubled(3, 4, 3, padding=1)), "0", experts=2, input_size=8)


def test_subclasses_are_examined_with_random_weights_also_on_the_meta_device():
    class Plain(nn.Conv2d):
        pass

    class Standardised(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.conv2d(input, self.weight - self.weight.mean(), self.bias, padding=self.padding)

    model = nn.Sequential(Plain(3, 4, 3, padding=1), Standardised(4, 4, 3, padding=1))
    nn.init.zeros_(model[1].weight)
    assert convertible_layers(model) == ("0",)
    assert convertible_layers(model.to("meta"), input_size=8) == ("0",)


def test_a_network_in_distributed_data_parallel_is_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match=r"convert: the network is in DistributedDataParallel, .* wrap it then"):
        convert(wrapped, "module.stem", experts=2)
    with pytest.raises(ValueError, match="skip: the network is in DistributedDataParallel"):
        skip(wrapped, "every-2")


def test_channels_that_are_guessed_wrong_can_be_given():
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    with pytest.raises(ValueError, match=r"on an image of 8×16×16: .*give input_size=\(C, H, W\) if its images"):
        convert(Reversed(), "last", experts=2, input_size=16)
    assert isinstance(convert(Reversed(), "last", experts=2, input_size=(3, 16, 16)).last, PatchMoE)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("layer1.1.conv3", r"Net has no layer 'layer1.1.conv3' \(did you mean 'layer1.1.conv[12]' or 'layer1.1.conv"),
        ("layer2.*", r"no convolution or MLP of Net matches 'layer2.\*'.*; convertible: .*'layer1.1.conv2'"),
        ("", r"'' is the model itself; put it into an nn.Sequential"),
        ([], r"no layer is given; convertible"),
        ("layer1.*", r"'layer1.0.down' has stride 2.*; 'layer1.1.down' has stride 2.*and 1 more \(moesaic.models.conv"),
        ("fc", r"'fc' did not run on a map \(B, H, W, C\)"),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_suggestions(layer, message):
    model = net()
    with pytest.raises(ValueError, match=f"convert: {message}"):
        convert(model, layer, experts=4, input_size=32)
    assert not any(isinstance(module, PatchMoE) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 3}, r"'stem' has 8 output channels, which 3 experts cannot share .*; use 2 or 4 experts, or comb"),
        ({"experts": 0}, r"experts=0; it must be at least 1"),
        ({"init": "warm"}, r"init='warm' is unknown; use 'scratch', 'upcycle' or 'split'"),
        ({"init": "upcycle", "expert_norm": True}, r"expert_norm=True puts BatchNorm and ReLU before filters"),
        ({"input_size": None}, r"patch_size and patches_per_expert of 'stem' depend on the size of its maps"),
        ({"input_size": None, "patch_size": 2}, r"patches_per_expert of 'stem' depends on the size"),
        ({"input_size": (32, 32)}, r"input_size=\(32, 32\); give the side of square images, or \(C, H, W\)"),
        ({"input_size": "big"}, r"input_size='big'; give the side of square images, or \(C, H, W\)"),
        ({"input_size": (4, 32, 32)}, r"Net does not run on an image of 4×32×32: "),
        (
            {"patch_size": 5},
            r"'stem' runs on a 32×32 map, which 5×5 patches do not divide; use patch_size=1, 2, 4, 8, 16",
        ),
        ({"patches_per_expert": 65, "patch_size": 4}, r"patches_per_expert=65, but .* has only 64 patches of 4×4"),
        ({"patches_per_expert": 0}, r"patches_per_expert=0; it must be at least 1"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_with_valid_ones(options, message):
    with pytest.raises(ValueError, match=f"convert: {message}"):
        convert(net(), "stem", **{"experts": 4, "input_size": 32, **options})


def test_a_failed_conversion_leaves_the_model_unchanged():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * self.conv.weight.mean()

    model = Reader()
    conv = model.conv
    with pytest.raises(ValueError, match=r"Reader no longer runs with 'conv' converted on an image of 3×8×8: .*weight"):
        convert(model, "conv", experts=2, input_size=8)
    assert model.conv is conv
    assert applied_conversions(model) == ()


def test_tracing_does_not_change_statistics_modes_or_hooks():
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    assert convertible_layers(model, input_size=32) == (
        "stem",
        *(f"layer1.{i}.conv{j}" for i in (0, 1) for j in (1, 2)),
    )
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_conversions_can_be_repeated_from_json():
    spec = ModelSpec("wrn10_1", {"num_classes": 3})
    model = spec.build()
    names = convertible_layers(model, input_size=32)
    convert(model, names[-1], experts=4, init="upcycle", input_size=32)
    convert(model.body, "group1.*.conv2", experts=2, patch_size=8, gate="softmax_all", input_size=32)
    done = json.loads(json.dumps(applied_conversions(model)))
    assert [each["layer"] for each in done] == [names[-1], "body.group1.0.conv2"]
    again = ModelSpec("wrn10_1", {"num_classes": 3}, tuple(done)).build()
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x), model.eval()(x))
    assert applied_conversions(again) == tuple(done)
    assert applied_conversions(create_model("wrn10_1", num_classes=3)) == ()


def test_a_training_step_updates_router_and_experts_of_an_upcycled_layer():
    model = convert(net().train(), "layer1.1.conv2", experts=4, init="upcycle", input_size=32)
    layer = model.layer1[1].conv2
    before = copy.deepcopy(layer.state_dict())
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8) % 5).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(not torch.equal(before[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("returned", ["another shape", "a tuple", "an error"])
def test_a_subclass_that_returns_something_else_is_refused(returned: str):
    class Odd(nn.Conv2d):
        def forward(self, input: torch.Tensor):
            y = super().forward(input)
            if not self.training and input.shape[-1] != 8:  # only when it is probed
                if returned == "an error":
                    raise TypeError("takes no map of this size")
                return (y,) if returned == "a tuple" else y[..., 1:]
            return y

    with pytest.raises(ValueError, match="is a Odd, which does not compute the plain layer of its weights"):
        convert(one(Odd(3, 4, 3, padding=1)), "0", experts=2, input_size=8)
