"""`skip`: blocks of timm's and our transformers on some of the tokens; what it refuses, and how it is repeated."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moesaic
from moesaic import insight
from moesaic.cli.train import _run_name
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.layers import TokenMoE, TokenSkip
from moesaic.models import ModelSpec, ViT, applied_skips, count_macs
from moesaic.models.conversion_receipt import conversion_receipt
from moesaic.models.spec_validation import check_spec
from moesaic.models.vit import Block
from moesaic.training.backbone_features import backbone_digest
from moesaic.training.checkpoint import Metadata, load_checkpoint, save_network
from moesaic.training.compared_models import expand_models
from moesaic.training.model_for_dataset import spec_for_dataset
from moesaic.training.trainable_layers import default_trainable
from moesaic.validated_json import InvalidFile

SMALL = {"dim": 16, "heads": 2, "depth": 4, "image_size": 16}


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(3, **SMALL).eval()


def timm_vit(timm, name: str = "vit_tiny_patch16_224", **options) -> nn.Module:
    """A network of timm on 4×4 tokens, with blocks that do something."""
    sizes = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model(name, **sizes | options).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 64, 64)}
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("vit_tiny_patch16_224", {"reg_tokens": 4, "init_values": 1e-5}, 5),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, 0),
        ("deit_tiny_distilled_patch16_224", {}, 2),
    ],
)
def test_blocks_of_timm_skip_tokens_and_all_of_them_are_the_original(timm, name, options, prefix):
    model, x = timm_vit(timm, name, **options), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        whole = moesaic.skip(copy.deepcopy(model), "blocks.*", keep=1, gate="one").eval()
        assert torch.equal(whole(x), expected)
        half = moesaic.skip(model, "blocks.*", keep=0.5)
        assert half is model
        with moesaic.record_routing(half) as routing:
            assert half(x).shape == expected.shape
    assert set(routing) == {"blocks.0", "blocks.1"}
    record = routing["blocks.1"]
    assert (record.grid, record.prefix, record.load.tolist()) == ((4, 4), prefix, [2 * (8 + prefix)])
    assert record.index[:, 0, :prefix].tolist() == [list(range(prefix))] * 2
    half.train()
    before = half.blocks[0].router.weight.detach().clone()
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    F.cross_entropy(half(x).reshape(2, -1), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert not torch.equal(half.blocks[0].router.weight, before)


@pytest.mark.parametrize(
    ("name", "options", "pattern", "reason"),
    [
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
            "layers.0.blocks.*",
            r"'layers.0.blocks.0' runs on a tensor \(1, 8, 8, 16\), not on tokens",
        ),
        (
            "beit_base_patch16_224",
            {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
            "blocks.*",
            "'blocks.0' does not run on 9 of 17 tokens: .*size",
        ),
        (
            "eva02_tiny_patch14_224",
            {"img_size": 56, "embed_dim": 32, "depth": 2, "num_heads": 2},
            "every-2",
            "'blocks.1' gets rope beside its tokens, which would no longer belong to those selected",
        ),
        (
            "mixer_s32_224",
            {"img_size": 64},
            "last-1",
            "'blocks.7' does not run on 2 of 4 tokens",
        ),
        ("test_convnext", {}, "stages.3.blocks.*", r"'stages.3.blocks.0' runs on a tensor \(1, \d+, \d, \d\)"),
    ],
)
def test_blocks_that_know_the_grid_are_refused_before_anything_changes(timm, name, options, pattern, reason):
    model = timm.create_model(name, num_classes=2, **options)
    modules = [(each, id(module)) for each, module in model.named_modules()]
    side = options.get("img_size", 64)
    with pytest.raises(ValueError, match=f"skip: {reason}"):
        moesaic.skip(model, pattern, input_size=side)
    assert [(each, id(module)) for each, module in model.named_modules()] == modules
    assert applied_skips(model) == ()


class Positioned(nn.Module):
    """Adds to each token its place in the sequence."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x) * torch.arange(x.shape[1])[:, None]


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum(1)


def test_plain_modules_take_part_where_their_dim_is_given():
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)])
    moesaic.skip(model, "last-2", keep=0.5, dim=4)
    assert [type(each) for each in model] == [nn.Sequential, TokenSkip, TokenSkip]
    assert model(torch.randn(2, 5, 4)).shape == (2, 5, 4)


@pytest.mark.parametrize(
    ("model", "blocks", "options", "message"),
    [
        (nn.Sequential(Positioned()), "0", {"dim": 4}, "'0' treats a token by its place in the sequence"),
        (nn.Sequential(Summing()), "0", {"dim": 4}, r"'0' returns a tensor \(2, 4\) for tokens \(2, 3, 4\)"),
        (nn.Sequential(Summing()), "0", {"dim": 5}, "'0' does not run on 3 of 6 tokens"),
        (nn.Sequential(Summing()), "0", {}, "the size of the tokens of Sequential is unknown; give input_size"),
        (nn.Sequential(Summing()), "0", {"input_size": (1, 2)}, r"input_size=\(1, 2\); give the side"),
        (nn.Sequential(Summing()), "0", {"input_size": 8}, "Sequential does not run on an image of 3×8×8"),
        (vit(), "block.*", {}, r"ViT has no block 'block.\*'"),
        (vit(), "blocks.7", {}, r"has no block 'blocks.7' \(did you mean 'blocks.\d'"),
        (vit(), [], {}, "no block is given"),
        (vit(), ["blocks.1", "blocks.1.attn"], {}, "'blocks.1.attn' is in 'blocks.1', which is to skip tokens as a wh"),
        (vit(), "every-5", {}, "'every-5' is a rule for 5 or more blocks of one kind in a list, and ViT has 4"),
        (nn.Sequential(nn.Linear(4, 4)), "last-1", {"dim": 4}, "and Sequential has 0; name the blocks"),
        (vit(), "blocks.1", {"dim": 8}, "dim=8, but 'blocks.1' runs on tokens of 16 features; leave dim out"),
        (vit(), "blocks.1", {"keep": 0.0}, "keep=0.0; it must be above 0"),
        (vit(), "blocks.1", {"prefix_tokens": 16}, "runs on 16 tokens, of which prefix_tokens=16; at least one"),
        (
            nn.Sequential(*4 * [nn.Sequential(nn.Conv2d(3, 3, 1))]),
            "[0-2]",
            {"input_size": 8},
            r"\(and 2 more blocks\)$",
        ),
        (vit(), "patch_embed", {}, r"'patch_embed' runs on a tensor \(1, 3, 16, 16\), not on tokens"),
    ],
)
def test_what_cannot_be_done_is_said_and_not_done(model, blocks, options, message):
    modules = [(each, id(module)) for each, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        moesaic.skip(model, blocks, **options)
    assert [(each, id(module)) for each, module in model.named_modules()] == modules


def test_a_block_skips_once_and_is_not_shared():
    model = moesaic.skip(vit(), "blocks.1")
    with pytest.raises(ValueError, match=r"'blocks.1' skips tokens already"):
        moesaic.skip(model, "every-2")
    shared = vit()
    shared.blocks[2] = shared.blocks[0]
    with pytest.raises(ValueError, match=r"'blocks.0' is also 'blocks.2'; give each a copy"):
        moesaic.skip(shared, "blocks.0")


def test_a_mixture_inside_composes_and_gets_its_grid_back_if_it_is_refused():
    model = vit()
    mixture = model.blocks[1].mlp = TokenMoE(16, experts=2, capacity=1.0, grid=(4, 4))
    with pytest.raises(ValueError, match=r"keep=3"):
        moesaic.skip(model, ["blocks.0", "blocks.1"], keep=3)
    model.blocks[3].mlp = TokenMoE(16, experts=2, tokens_per_expert=9)
    with pytest.raises(ValueError, match=r"'blocks.3' does not run on 8 of 16 tokens: .*has only 8"):
        moesaic.skip(model, ["blocks.1", "blocks.3"])
    assert mixture.grid == (4, 4)
    moesaic.skip(model, "blocks.1", keep=0.25)
    with moesaic.record_routing(model) as routing:
        model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert routing["blocks.1"].grid == (4, 4)
    assert routing["blocks.1.block.mlp"].grid is None
    assert routing["blocks.1.block.mlp"].units == 4
    assert all(weight.grad is not None for weight in model.parameters())


def test_routers_are_seeded_by_block():
    first, again, other = (moesaic.skip(vit(), "blocks.[01]", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.blocks[0].router.weight, again.blocks[0].router.weight)
    assert not torch.equal(first.blocks[0].router.weight, first.blocks[1].router.weight)
    assert not torch.equal(first.blocks[0].router.weight, other.blocks[0].router.weight)
    model = vit().bfloat16()
    state = torch.get_rng_state()
    moesaic.skip(model, "blocks.0")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.blocks[0].router.weight.dtype == torch.bfloat16
    assert not any(module.training for module in model.modules())


def test_what_blocks_behind_a_class_token_select_is_drawn_and_explained(timm):
    model = moesaic.skip(timm_vit(timm), "blocks.1", keep=0.25)
    pixels = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8)
    found = insight.collect_outputs(model, pixels, lambda some: some / 255)
    explanation = insight.explain(found, ["a", "b", "c"], labels=torch.tensor([0, 1, 2, 0]))
    (layer,) = explanation.layers
    assert (layer.name, layer.grid, layer.units) == ("blocks.1", (4, 4), 16)
    assert sum(layer.selection_rate[0][0]) == pytest.approx(4)
    with moesaic.record_routing(model) as routing:
        model(pixels / 255)
    assert len(insight.overlay(pixels, routing["blocks.1"]).axes) == 4 * 2


def test_cached_features_are_those_of_the_share_of_tokens():
    half, quarter = (moesaic.skip(vit(), "blocks.1", keep=keep) for keep in (0.5, 0.25))
    assert all(torch.equal(each, quarter.state_dict()[name]) for name, each in half.state_dict().items())
    assert backbone_digest(half) != backbone_digest(quarter)
    assert backbone_digest(half) == backbone_digest(moesaic.skip(vit(), "blocks.1", keep=0.5))


def test_costs_are_those_of_selected_tokens():
    dense = {row.name: row.macs for row in count_macs(vit(), (3, 16, 16)).layers}
    assert dense["blocks.1.attn"] == 2 * 16 * 16 * 16, "both matmuls of attention"
    cost = count_macs(moesaic.skip(vit(), "blocks.1", keep=0.25), (3, 16, 16))
    found = {row.name.replace(".block.", "."): row for row in cost.layers}
    assert found["blocks.1.attn"].macs * 16 == found["blocks.1.attn"].dense_macs == dense["blocks.1.attn"]
    for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        row = found[f"blocks.1.{name}"]
        assert row.macs * 4 == row.dense_macs == dense[f"blocks.1.{name}"]
        assert row.routed
    assert (found["blocks.1.router"].macs, found["blocks.1.router"].dense_macs) == (16 * 16, 0)
    assert cost.dense_macs == sum(dense.values())
    assert cost.parameters == sum(weight.numel() for weight in vit().parameters()) + 16


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec("vit_tiny_patch4_32", {"num_classes": 2, "depth": 2, "image_size": 8})


def test_it_is_repeated_from_its_record(spec):
    model = moesaic.skip(spec.build(), "every-2", keep=0.3, seed=5)
    done = json.loads(json.dumps(applied_skips(copy.deepcopy(model))))
    assert [each["skip"] for each in done] == ["blocks.1"]
    again = ModelSpec(spec.name, spec.arguments, tuple(done)).build()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.blocks[1].router.weight, model.blocks[1].router.weight)
    assert applied_skips(again) == tuple(done)
    inside = applied_skips(nn.Sequential(model))
    assert inside[0]["skip"] == "0.blocks.1"


def test_checkpoints_rebuild_it(spec, tmp_path):
    made = ModelSpec(spec.name, spec.arguments, ({"skip": ["blocks.*"], "keep": 0.5, "seed": 3},))
    model = made.build().eval()
    metadata = Metadata(made, ("cat", "dog"), ("cat", "dog"), None, (3, 8, 8), "pets", {})
    save_network(tmp_path / "model.safetensors", model, metadata)
    again = load_checkpoint(tmp_path).model
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))
    assert isinstance(again.blocks[0], TokenSkip)


def test_a_spelled_network_of_timm_is_made_for_a_dataset_and_loaded_again(timm, tmp_path):
    labels, scale = torch.arange(4), Normalize((0.5,) * 3, (0.5,) * 3)
    images = LabelledImages(torch.zeros(4, 3, 48, 48, dtype=torch.uint8), labels, labels)
    dataset = ImageDataset(images, images, tuple("abcd"), tuple("abcd"), scale, scale, normalize=scale)
    asked = ModelSpec.parse("timm/test_vit:skip=every-2:keep=0.5").with_seed(1)
    made, cost = spec_for_dataset(asked, dataset)
    assert made.conversions[0]["input_size"] == [3, 48, 48]
    assert cost.routed_macs < 0.6 * cost.routed_dense_macs
    model = made.build().eval()
    save_network(tmp_path / "model.safetensors", model, Metadata.of(dataset, made, {}))
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path).model(x), model(x))


def test_commands_spell_it():
    spelled = ModelSpec.parse("timm/x:skip=blocks.*:keep=0.25:gate=one:pretrained:convert=a:experts=2:head=mean")
    assert spelled.arguments == {"pretrained": True, "head": "mean"}
    assert spelled.conversions == (
        {"skip": ["blocks.*"], "keep": 0.25, "gate": "one"},
        {"layer": ["a"], "experts": 2},
    )
    assert spelled.with_seed(4).conversions[0]["seed"] == 4
    assert _run_name(spelled).startswith("timm-x-head-mean-skip-blocks")
    text = "vit_tiny_patch4_32:depth=2:skip=every-2:keep=0.25"
    assert expand_models([text]) == ("vit_tiny_patch4_32:depth=2", text)
    assert default_trainable([ModelSpec.parse("timm/x:pretrained:skip=every-2")], 10) == "all"
    with pytest.raises(ValueError, match="has skip without a block; use skip=BLOCK, or skip=BLOCK"):
        ModelSpec.parse("timm/x:skip=+")
    with pytest.raises(ValueError, match="has the option 'keep' twice"):
        ModelSpec.parse("timm/x:skip=a:keep=1:keep=1")


@pytest.mark.parametrize(
    "conversion",
    [
        {"skip": "blocks.0", "model": "x"},
        {"skip": "blocks.0", "layer": "x"},
        {"skip": "blocks.0", "keep": [0.5]},
        {"skip": "blocks.0", "keep": float("nan")},
        {"skip": ["x"] * 20_000},
        {"skip": "blocks.0", "dim": 10**12},
        {"skip": "blocks.0", "input_size": [3, 10**10, 10**10]},
    ],
)
def test_files_may_give_its_options_alone(conversion, spec):
    with pytest.raises(InvalidFile):
        check_spec(ModelSpec(spec.name, spec.arguments, (conversion,)), "model.safetensors")


def test_onnx_output_equals_torch(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = moesaic.skip(nn.Sequential(Block(8, 2)), "0", keep=0.5, dim=8, prefix_tokens=1).eval()
    nn.init.normal_(model[0].router.weight)
    x = torch.randn(3, 9, 8)
    batch = {"input": {0: torch.export.Dim("batch", min=2)}}
    torch.onnx.export(model, (x,), dynamo=True, verbose=False, dynamic_shapes=batch).save(tmp_path / "skip.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "skip.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x[:2]).detach(), rtol=1e-4, atol=1e-5)


def test_a_receipt_compares_converted_mlps_of_blocks_that_skip():
    original = vit()
    model = moesaic.convert(copy.deepcopy(original), "blocks.1.mlp", experts=4, init="upcycle", router="token-choice")
    x = torch.randn(2, 3, 16, 16)
    before = conversion_receipt(model, original, x)
    after = conversion_receipt(moesaic.skip(model, "blocks.1", keep=0.5), original, x)
    assert (after.layers[0].name, after.layers[0].parameters) == ("blocks.1.mlp", before.layers[0].parameters)
    assert after.layers[0].difference == before.layers[0].difference < 1e-5
    assert after.layers[0].macs == (before.layers[0].macs[0], before.layers[0].macs[1] // 2)


def test_mlps_of_blocks_that_skip_are_converted_before():
    model = moesaic.skip(vit(), "blocks.1")
    with pytest.raises(ValueError, match=r"is inside 'blocks.1', a TokenSkip, .*; convert first, then skip"):
        moesaic.convert(model, "blocks.1.block.mlp", experts=2, input_size=16)
