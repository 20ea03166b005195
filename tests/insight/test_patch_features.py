"""Features of patches: means of what routers read, and their principal components."""

import pytest
import torch
from tiny_vit import TinyViT
from torch import nn

import moesaic
from moesaic.insight.explain import collect_outputs
from moesaic.insight.patch_features import FEATURES, principal_components, record_features
from moesaic.routing import TokenChoice


def test_features_are_the_means_over_the_patches_of_the_map_in_front_of_the_layer():
    torch.manual_seed(0)
    moe = moesaic.PatchMoE(3, 4, experts=2, router=TokenChoice(3, experts=2, patch_size=4))
    model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    pixels = torch.randint(0, 256, (5, 3, 8, 12), dtype=torch.uint8)
    found = collect_outputs(model, pixels, lambda x: x / 255, batch_size=2)
    expected = (pixels / 255).unfold(2, 4, 4).unfold(3, 4, 4).mean((4, 5)).flatten(2).mT
    torch.testing.assert_close(found.features["0"], expected)
    torch.testing.assert_close(found.images(1, 3).features["0"], expected[1:3])
    plain = collect_outputs(model, pixels, lambda x: x / 255)
    assert torch.equal(plain.routing["0"].mask, found.routing["0"].mask)


def test_features_of_tokens_are_those_on_the_grid():
    moe = moesaic.TokenMoE(8, experts=2, hidden_dim=4, tokens_per_expert=2, prefix_tokens=1)
    found = collect_outputs(TinyViT(2, moe), torch.zeros(3, 3, 24, 24, dtype=torch.uint8), lambda x: x / 255)
    assert found.features["mlp"].shape == (3, 9, 8)


def test_whole_images_have_no_features():
    model = moesaic.SampleMoE(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), [nn.Flatten(), nn.Flatten()])
    assert collect_outputs(model, torch.zeros(3, 3, 4, 4, dtype=torch.uint8), lambda x: x / 255).features == {}


def test_many_channels_are_projected_and_keep_their_distances():
    torch.manual_seed(0)
    moe = moesaic.PatchMoE(512, 4, experts=2, patches_per_expert=2, patch_size=1)
    x = torch.randn(4, 512, 2, 2)
    with record_features({"moe": moe}) as found:
        moe(x)
    (features,) = found["moe"]
    assert features.shape == (4, 4, FEATURES)
    flat, projected = x.flatten(2).mT.flatten(0, 1), features.flatten(0, 1)
    ratio = torch.cdist(projected, projected) / torch.cdist(flat, flat)
    kept = ratio[~torch.eye(16, dtype=torch.bool)]
    assert kept.mean() == pytest.approx(1, abs=0.1)
    assert not any(each._forward_pre_hooks for each in moe.modules())


def test_principal_components_keep_distances_where_features_vary_in_few_directions():
    torch.manual_seed(0)
    flat = torch.randn(20, 2) @ torch.randn(2, 7)
    found = principal_components(flat.view(4, 5, 7), 2).flatten(0, 1)
    torch.testing.assert_close(torch.cdist(found, found), torch.cdist(flat, flat), atol=1e-4, rtol=1e-4)
    assert principal_components(flat.view(4, 5, 7), 9).shape == (4, 5, 7)
    assert principal_components(flat[:0].view(0, 5, 7), 2).shape == (0, 5, 2)
