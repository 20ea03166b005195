"""Vision transformers of the registry: timm's network, mixtures, skipped tokens, sizes, and that they learn."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F

import moesaic
from moesaic.layers import TokenMoE, TokenSkip
from moesaic.models import ViT, ViTMoE, ViTSkip, count_macs, create_model, list_models, undecayed_parameters
from moesaic.routing import SoftRouter, TokenChoice
from moesaic.training.optimizers import build_optimizers
from moesaic.training.recipe import Recipe

NAMES = list_models("vit_tiny*")
SMALL = {"dim": 16, "heads": 2, "depth": 2, "image_size": 8}


def test_the_four_kinds_are_listed():
    assert [f"vit_tiny_patch4_32{kind}" for kind in ("", "_moe", "_skip", "_soft_moe")] == NAMES
    assert len(list_models("vit_small*")) == 4


def test_it_computes_what_timm_computes_with_the_same_weights(timm):
    kind = import_module("timm.models.vision_transformer").VisionTransformer
    options = {"img_size": 12, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 3, "num_heads": 2}
    other = kind(**options, num_classes=5, class_token=False, global_pool="avg", fc_norm=False).double().eval()
    model = ViT(5, dim=16, heads=2, depth=3, image_size=12, in_channels=1).double().eval()
    torch.nn.init.normal_(other.head.weight)
    model.load_state_dict(other.state_dict())
    x = torch.randn(2, 1, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(model(x), other(x), rtol=1e-10, atol=1e-10)
    group = import_module("timm.models").group_parameters
    assert group(model, model.group_matcher()) == group(other, other.group_matcher())


def test_even_blocks_are_routed():
    mixed = create_model("vit_tiny_patch4_32_moe", num_classes=3, depth=4, experts=4, capacity=2.0)
    assert [isinstance(block.mlp, TokenMoE) for block in mixed.blocks] == [False, True, False, True]
    assert (mixed.blocks[1].mlp.capacity, len(mixed.blocks[1].mlp.experts)) == (2.0, 4)
    soft = create_model("vit_tiny_patch4_32_soft_moe", num_classes=3, depth=2, every=1)
    assert all(isinstance(block.mlp.router, SoftRouter) for block in soft.blocks)
    assert soft.blocks[0].mlp.router.slots_per_expert == 8
    chosen = create_model("vit_tiny_patch4_32_moe", num_classes=3, depth=2, router="token-choice")
    assert isinstance(chosen.blocks[1].mlp.router, TokenChoice)
    short = create_model("vit_tiny_patch4_32_skip", num_classes=3, depth=3, keep=0.25, gate="one")
    assert [isinstance(block, TokenSkip) for block in short.blocks] == [False, True, False]
    assert (short.blocks[1].keep, short.blocks[1].gate) == (0.25, "one")


def test_a_mixture_of_capacity_one_costs_what_the_mlp_costs():
    dense, mixed = (count_macs(create_model(name, num_classes=2, depth=2), (3, 32, 32)).macs for name in NAMES[:2])
    router = 64 * 8 * 192
    assert mixed - dense == router


@torch.no_grad()
def test_position_embeddings_have_the_size_of_the_image():
    model = create_model("vit_tiny_patch4_32", num_classes=2, depth=1, image_size=48, in_channels=1)
    assert model.pos_embed.shape == (1, 144, 192)
    assert model.forward_features(torch.zeros(1, 1, 48, 48)).shape == (1, 192, 12, 12)
    with pytest.raises(ValueError, match=r"takes images of 48×48 pixels .* got \(1, 1, 32, 32\); build it with im"):
        model(torch.zeros(1, 1, 32, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 30}, "image_size=30 is not divisible into patches of 4×4; use a multiple of 4, such as 32"),
        ({"heads": 5}, "heads=5 do not divide dim=16"),
        ({"depth": 0}, "depth=0; it must be at least 1"),
        ({"mlp_ratio": -1.0}, "mlp_ratio=-1.0; it must be above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ViT(2, **{**SMALL, **options})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch4_32_moe", {"every": 3, "depth": 2}, "every=3, but there are 2 blocks; use at most 2"),
        ("vit_tiny_patch4_32_moe", {"capacity": 0.0, "depth": 2}, "capacity=0.0; it must be above 0"),
        ("vit_tiny_patch4_32_skip", {"keep": 2.0, "depth": 2}, "keep=2.0; it must be above 0 and at most 1"),
    ],
)
def test_options_of_routed_blocks_are_checked(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, num_classes=2, **options)
    with pytest.raises(TypeError, match="has no option 'experts'; it takes depth, image_size, in_channels, mlp_ratio"):
        create_model("vit_tiny_patch4_32", num_classes=2, experts=2)


def test_biases_norms_and_embeddings_have_no_weight_decay():
    model = create_model("vit_tiny_patch4_32_moe", num_classes=2, depth=2)
    (optimizer,) = build_optimizers(model, Recipe(epochs=1, lr=1.0, weight_decay=0.3), torch.device("cpu"))
    names = {id(each): name for name, each in model.named_parameters()}
    decays = {names[id(each)]: group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert {name for name, decay in decays.items() if not decay} == undecayed_parameters(model)
    spared = ("bias", "bias_in", "bias_out", "pos_embed", "norm1.weight", "norm2.weight", "norm.weight")
    assert all((decay == 0) == name.endswith(spared) for name, decay in decays.items())
    assert set(decays.values()) == {0, 0.3}
    assert undecayed_parameters(create_model("wrn10_1_pmoe", num_classes=2)) == set()


def test_routers_of_skipping_blocks_learn_at_the_rate_of_routers():
    model = create_model("vit_tiny_patch4_32_skip", num_classes=2, depth=2)
    (optimizer,) = build_optimizers(model, Recipe(epochs=1, lr=1.0), torch.device("cpu"))
    slow = [each for group in optimizer.param_groups if group["peak"] == 0.1 for each in group["params"]]
    assert len(slow) == 1
    assert slow[0] is model.blocks[1].router.weight


def test_slots_of_a_soft_mixture_are_rounded_up():
    model = ViTMoE(2, **SMALL, experts=3, router="soft")
    assert model.patch_embed.num_patches == 4
    assert model.blocks[1].mlp.router.slots_per_expert == 2  # of 4 / 3
    with pytest.raises(ValueError, match="capacity=0; it must be above 0"):
        ViTMoE(2, **SMALL, experts=3, router="soft", capacity=0)


def test_weights_begin_small():
    model = ViT(2, **{**SMALL, "dim": 64})
    assert 0.01 < float(model.blocks[0].attn.qkv.weight.detach().std()) < 0.03


def test_undecayed_parameters_of_timm(timm):
    model = timm.create_model("test_vit", num_classes=2)
    spared = undecayed_parameters(model)
    assert spared < dict(model.named_parameters()).keys()  # it has no register tokens, though it names them
    assert {"cls_token", "pos_embed", "reg_token"} & dict(model.named_parameters()).keys() <= spared
    assert "blocks.0.attn.qkv.weight" not in spared


LEARNERS = {
    "dense": partial(ViT, 4, **SMALL),
    "moe": partial(ViTMoE, 4, **SMALL, experts=2),
    "soft": partial(ViTMoE, 4, **SMALL, experts=2, router="soft"),
    "skip": partial(ViTSkip, 4, **SMALL),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_it_learns_where_the_bright_patch_is(kind):
    """Classes differ in the place of one patch of a 2×2 grid, which position embeddings tell."""
    torch.manual_seed(3)
    model, labels = LEARNERS[kind](), torch.arange(32) % 4
    x = 0.1 * torch.randn(32, 3, 8, 8)
    for image, label in zip(x, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: each.detach().clone() for name, each in model.named_parameters() if "router" in name}
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    with torch.no_grad():
        assert (model.eval()(x).argmax(1) == labels).all()
    assert bool(before) == (kind != "dense")
    assert all(not torch.equal(dict(model.named_parameters())[name], each) for name, each in before.items())


@pytest.mark.parametrize("kind", LEARNERS)
@torch.no_grad()
def test_an_empty_batch_passes_and_images_do_not_depend_on_their_batch(kind):
    model, x = LEARNERS[kind]().eval(), torch.randn(3, 3, 8, 8)
    assert model(x[:0]).shape == (0, 4)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


def test_compiled_and_exported_it_computes_the_same():
    model, x = ViTSkip(3, **SMALL).eval(), torch.randn(2, 3, 8, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


def test_a_record_of_each_routed_block_lies_on_the_grid_of_patches():
    model = create_model("vit_tiny_patch4_32_moe", num_classes=3, depth=2, image_size=16)
    with moesaic.record_routing(model) as routing:
        model(torch.randn(2, 3, 16, 16))
    assert routing["blocks.1.mlp"].grid == (4, 4)
