"""Maps whose sides the patch size does not divide: padded with zeros to whole patches, the output cut to the map."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BACKENDS, Case, assert_same, cases, run
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.insight import overlay
from moesaic.insight.explain import collect_outputs, explain
from moesaic.insight.receptive_field import receptive_field
from moesaic.models import applied_conversions, convert, count_macs, create_model
from moesaic.models.convert import ChannelsLastPatchMoE
from moesaic.models.wide_resnet.pooled_head import pooled_head
from moesaic.report.expert_figures import draw_class_maps, draw_top_patches, mean_images
from moesaic.training.predict import Predictor


class Defined(nn.Module):
    """Padding as it is defined: a layer on a map that is padded before, and cut afterwards."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        H, W, p = *x.shape[2:], self.layer.patch_size
        return self.layer(F.pad(x, (0, -W % p, 0, -H % p)))[..., :H, :W]


def without_prefix(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layer.", ""): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(case=cases(), missing=st.tuples(st.integers(0, 2), st.integers(0, 2)), training=st.booleans())
def test_a_padded_layer_equals_the_definition(backend, case: Case, missing, training):
    defined = Defined(case.build()).train(training)
    layer = case.build().train(training)
    layer.pad = True
    p = layer.patch_size
    x = case.map()[:, :, : case.shape[2] - missing[0] % p, : case.shape[3] - missing[1] % p]
    expected = without_prefix(run(defined, x, "reference", steps=2))
    assert_same(run(layer, x, backend, steps=2), expected, tolerance=1e-10)
    with torch.no_grad(), moesaic.backend(backend):
        torch.testing.assert_close(layer.eval()(x), defined.eval()(x))  # the inference path
        last = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(layer(last), layer(x))


@pytest.mark.parametrize("size", [(7, 10), (9, 9), (2, 2), (8, 5)])
def test_a_soft_router_pads_too(size):
    layer = moesaic.PatchMoE(3, 8, experts=4, router=moesaic.SoftRouter(3, 4, 2, 3), context="patch", pad=True)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(layer(x), Defined(layer)(x))


def test_a_map_that_divides_is_not_padded():
    torch.manual_seed(0)
    layer = moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=3, kernel_size=3, pad=True)
    x = torch.randn(2, 3, 6, 9)
    padded = layer(x)
    layer.pad = False
    assert torch.equal(layer(x), padded)
    assert layer.route(x).extent is None


def test_an_upcycled_padded_convolution_with_all_patches_equals_the_original():
    conv = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1)).double()
    x = torch.randn(2, 4, 7, 11, dtype=torch.float64)
    expected = conv(x)
    options = {"patch_size": 4, "pad": True, "patches_per_expert": 6, "gate": "one", "init": "upcycle"}
    convert(conv, "0", experts=2, input_size=(4, 7, 11), **options)
    torch.testing.assert_close(conv(x), expected)


def test_the_record_has_the_whole_grid_and_how_much_of_it_the_map_fills():
    layer = moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=4, pad=True)
    x = torch.randn(2, 3, 15, 6)
    with moesaic.record_routing(layer, keep="all") as records:
        layer(x)
        layer(x)
    assert records[""].grid == (4, 2)
    assert records[""].extent == records[""].filled == (3.75, 1.5)
    assert records[""].batch == 4
    assert layer.route(x).extent == (3.75, 1.5)


def test_maps_of_two_sizes_on_one_grid_are_not_put_together():
    layer = moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=4, pad=True)

    def both() -> None:
        with moesaic.record_routing(layer, keep="all"):
            layer(torch.randn(2, 3, 15, 6))
            layer(torch.randn(2, 3, 14, 6))

    with pytest.raises(ValueError, match="concatenates passes over maps of one size"):
        both()


def test_without_padding_the_error_names_both_ways_out():
    layer = moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=4)
    with pytest.raises(ValueError, match=r"pad it to 16×16 with pad=True or use patch_size=3 or 5"):
        layer(torch.zeros(1, 3, 15, 15))
    with pytest.raises(ValueError, match="a 0×4 map is not divisible"):
        moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=1, patch_size=4, pad=True)(torch.zeros(1, 3, 0, 4))
    with pytest.raises(ValueError, match=r"15×15 map, .*use patch_size=1, 3, 5 or 15, .*'nearest-4', or pad=True"):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=2, patch_size=4, input_size=15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_are_those_of_the_padded_patches_and_dense_ones_those_of_the_map(backend):
    layer = moesaic.PatchMoE(4, 8, experts=4, patches_per_expert=3, patch_size=4, kernel_size=3, pad=True)
    (row,) = count_macs(nn.Sequential(layer), (4, 15, 10)).layers
    assert row.dense_macs == 15 * 10 * 4 * 8 * 9
    router = 4 * 3 * 4 * 16 * 4  # 12 patches of 4 channels and 16 pixels for 4 experts
    assert row.macs == 4 * 3 * 16 * 4 * 2 * 9 + router
    last = ChannelsLastPatchMoE(4, 8, experts=4, patches_per_expert=3, patch_size=4, pad=True)
    rows = count_macs(nn.Sequential(Permuted(), last), (4, 15, 10)).layers
    assert rows[0].dense_macs == 15 * 10 * 4 * 8


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def network() -> nn.Sequential:
    """A routed layer with patches of 4×4 pixels at half the size of the image."""
    moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4, pad=True)
    with torch.no_grad():  # experts look for bright and for dark patches
        moe.router.weight[0], moe.router.weight[1] = 1, -1
    return nn.Sequential(nn.AvgPool2d(2), moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()


def test_overlays_end_with_the_image():
    model, images = network(), torch.zeros(1, 3, 20, 28)  # maps of 10×14, 3 rows and 4 columns of patches
    images[:, :, 17:, 25:] = 1  # in the last patch, of which the map has 2×2 pixels
    with moesaic.record_routing(model) as records:
        model(images)
    routing = records["1"]
    assert routing.grid == (3, 4)
    assert int(routing.index[0, 0]) == 11
    figure = overlay(images, routing)
    for axes in figure.axes:
        assert axes.get_xlim() == (0, 3.5)
        assert axes.get_ylim() == (2.5, 0)
        assert tuple(axes.images[0].get_extent()) == (0, 3.5, 2.5, 0), "the image"
        assert tuple(axes.images[1].get_extent()) == (0, 4, 3, 0), "the patches"
    frame = figure.axes[1].collections[0].get_paths()[0].vertices
    assert frame[:, 0].min() > 3
    assert frame[:, 0].max() < 3.5
    assert frame[:, 1].min() > 2
    assert frame[:, 1].max() < 2.5


def test_the_receptive_field_and_the_figures_of_an_explanation_know_the_padding():
    model, pixels = network(), torch.zeros(6, 3, 20, 28, dtype=torch.uint8)
    pixels[:, :, 17:, 25:] = 255
    field = receptive_field(model, "1", torch.rand(1, 3, 20, 28))
    assert field is not None
    assert field.patch_size == (8, 8)
    assert field.margin == 0
    assert field.own_share == pytest.approx(1)
    outputs = collect_outputs(model, pixels, lambda x: x / 255)
    labels = torch.tensor([0, 1] * 3)
    explanation = explain(outputs, ("even", "odd"), labels=labels)
    (layer,) = explanation.layers
    assert (layer.grid, layer.extent, layer.filled) == ((3, 4), (2.5, 3.5), (2.5, 3.5))
    assert {patch.patch for patch in layer.top_patches[0]} == {11}
    figure = draw_class_maps(layer, ("even", "odd"), mean_images(pixels, labels, 2), (3, 3), "share")
    (axes,) = figure.axes
    picture, tint = axes.images[:2]
    x0, x1, y1, y0 = picture.get_extent()
    t0, t1, u1, u0 = tint.get_extent()
    assert (t1 - t0) / (x1 - x0) == pytest.approx(4 / 3.5)
    assert (u1 - u0) / (y1 - y0) == pytest.approx(3 / 2.5)
    assert (t0, u0) == (x0, y0)
    corner, far = axes.transData.transform([(x0, y1), (x1, y0)])
    assert tint.get_clip_box().extents == pytest.approx([*corner, *far]), "cut to the image"
    numbers = [text for text in axes.texts if text.get_text() == "100"]
    assert numbers
    crops = draw_top_patches(layer, ("even", "odd"), pixels)
    brightest = crops.axes[0].images[0].get_array()
    assert math.isclose(float(brightest.max()), 1.0)
    assert (brightest[..., 0] == 1).mean() < 0.5


def test_predictions_have_the_whole_grid_and_the_cost_of_padded_patches():
    router = moesaic.TokenChoice(3, 4, patch_size=4, capacity_factor=0.5, in_eval=True)
    model = nn.Sequential(moesaic.PatchMoE(3, 8, experts=4, router=router, pad=True), nn.Flatten(), nn.Linear(1120, 2))
    model.metadata = SimpleNamespace(input_shape=(3, 10, 14))
    x = torch.randn(1, 3, 10, 14)
    (prediction,) = Predictor(model)(x)
    patches = prediction.patches["0"]
    assert patches.grid == (3, 4)
    taken = int(model[0].route(x).load.sum())
    assert sum(map(len, patches.experts)) == taken
    assert prediction.macs == taken * 16 * 3 * 2 + 12 * 4 * 3 * 16 + 1120 * 2


@pytest.mark.parametrize(
    ("side", "options", "patch_size", "patches"),
    [
        (13, {}, 1, 169),
        (13, {"pad": True}, 3, 25),
        (13, {"patch_size": "nearest-4"}, 1, 169),
        (15, {"patch_size": "nearest-4"}, 5, 9),  # 3 is as near
        (16, {"patch_size": "nearest-4"}, 4, 16),
        (16, {"patch_size": "nearest-100"}, 16, 1),
        (14, {"patch_size": 4, "pad": True}, 4, 16),
        (16, {"pad": True}, 3, 36),
        (12, {"pad": True}, 2, 36),
    ],
)
def test_convert_pads_or_chooses_the_nearest_size(side, options, patch_size, patches):
    model = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=2, input_size=side, **options)
    layer = model[0]
    assert (layer.patch_size, layer.route(torch.zeros(1, 3, side, side)).units) == (patch_size, patches)
    assert layer.patches_per_expert == max(1, patches // 2)
    (record,) = applied_conversions(model)
    assert record["patch_size"] == patch_size
    assert record.get("pad", False) == options.get("pad", False)
    again = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), **record)
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, side, side)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("text", ["nearest", "nearest-", "nearest-0", "nearest--3", "big"])
def test_other_words_for_patch_sizes_are_refused(text):
    with pytest.raises(ValueError, match=f"patch_size='{text}' is unknown; use a number, 'auto' or 'nearest-4'"):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=2, input_size=8, patch_size=text)


def test_a_wide_network_pads_its_map():
    torch.manual_seed(0)
    model = create_model("wrn10_1_pmoe", num_classes=2, image_size=60, patch_size=4, pad=True)
    assert model.moe.patches_per_expert == 2  # of 4×4
    x = torch.randn(2, 3, 60, 60)
    model.train()(x).sum().backward()
    assert model.moe.router.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"15×15 map, .*use patch_size=3, pad=True, or images of 64×64"):
        create_model("wrn10_1_pmoe", num_classes=2, image_size=60, patch_size=4)


def test_the_pooled_head_means_over_the_map_alone():
    layer = moesaic.PatchMoE(
        4, 8, experts=2, patches_per_expert=2, patch_size=4, gate_on="input", expert_norm=True, pad=True
    ).eval()
    norm, x = nn.BatchNorm2d(8).eval(), torch.randn(2, 4, 7, 9)
    nn.init.normal_(norm.bias)
    calls: list[int] = []
    with moesaic.record_routing(layer, keep="all") as records:
        pooled = pooled_head(layer, x, norm)
    calls.append(records[""].batch)
    torch.testing.assert_close(pooled, norm(layer(x)).relu().mean((2, 3)))
    assert calls == [2], "hooks are called once"


def test_a_padded_layer_is_exported():
    layer = moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=4, kernel_size=3, pad=True).eval()
    x = torch.randn(2, 3, 7, 9)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))
