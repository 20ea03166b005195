"""Heads: what they compute of maps and tokens, and that the routed one is routed like any layer."""

import pytest
import torch
from torch import nn

import moesaic
from moesaic.layers import AttentionHead, PooledHead, RoutedHead, create_head

HEADS = ("routed", "attention", "mean", "max")


def test_the_routed_head_is_the_mean_over_experts_of_the_gated_positions_they_select():
    head, x = RoutedHead(6, 3, experts=4, patches_per_expert=2).double(), torch.randn(5, 6, 3, 4).double()
    with moesaic.record_routing(head) as routing:
        logits = head(x)
    positions, record = x.flatten(2).transpose(1, 2), routing["moe"]
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for b in range(5):
        for e in range(4):
            for n, gate in zip(record.index[b, e], record.gate[b, e], strict=True):
                weight, bias = head.moe.experts.weight[e, :, :, 0, 0], head.moe.experts.bias[e]
                expected[b] += gate * (weight @ positions[b, n] + bias) / 4
    torch.testing.assert_close(logits, expected)
    assert record.grid == (3, 4)
    assert torch.allclose(record.gate.sum(-1), torch.ones(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", HEADS)
def test_tokens_are_positions(kind):
    head, x = create_head(kind, 6, 3), torch.randn(2, 6, 4, 4)
    tokens = x.flatten(2).transpose(1, 2)
    torch.testing.assert_close(head(tokens), head(x))
    assert head(tokens[:, :15]).shape == (2, 3), "a number of tokens that is no square"
    with pytest.raises(ValueError, match=r"takes a map \(B, C, H, W\) or tokens \(B, N, C\), got 2 axes \(2, 6\)"):
        head(x.mean((2, 3)))


def test_attention_is_one_expert_that_takes_all_positions():
    attention, routed = AttentionHead(6, 3).double(), RoutedHead(6, 3, experts=1, patches_per_expert=16).double()
    with torch.no_grad():
        routed.moe.router.weight.copy_(attention.query.weight.view(1, 6, 1, 1))
        routed.moe.experts.weight.copy_(attention.classifier.weight.view(1, 3, 6, 1, 1))
        routed.moe.experts.bias.copy_(attention.classifier.bias.view(1, 3))
    x = torch.randn(2, 6, 4, 4).double()
    torch.testing.assert_close(attention(x), routed(x))


def test_mean_and_maximum_are_in_front_of_a_linear_layer():
    x = torch.randn(2, 6, 4, 4)
    for pooling, pooled in (("mean", x.mean((2, 3))), ("max", x.amax((2, 3)))):
        head = PooledHead(6, 3, pooling=pooling)
        torch.testing.assert_close(head(x), head.classifier(pooled))
        assert f"pooling={pooling!r}" in repr(head)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_router_and_experts_of_the_routed_head_learn_on_every_backend(backend):
    head, x = RoutedHead(6, 3, experts=2), torch.randn(4, 6, 4, 4)
    with moesaic.backend(backend):
        nn.functional.cross_entropy(head(x), torch.tensor([0, 1, 2, 0])).backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in head.parameters())


def test_a_routed_head_refuses_more_patches_than_there_are():
    with pytest.raises(ValueError, match="patches_per_expert=5, but a 2×2 grid has only 4 patches"):
        RoutedHead(6, 3, patches_per_expert=5)(torch.zeros(1, 6, 2, 2))


def test_heads_have_names_and_options_of_their_own():
    assert len(create_head("routed", 6, 3, experts=5, patches_per_expert=1, gate="softmax_all").moe.experts) == 5
    with pytest.raises(ValueError, match=r"head='routd' is unknown; .*did you mean 'routed'"):
        create_head("routd", 6, 3)
    with pytest.raises(TypeError, match="head='mean' has no option 'experts', got experts=4; leave it out, or use"):
        create_head("mean", 6, 3, experts=4)
    with pytest.raises(ValueError, match="experts=0; it must be at least 1"):
        RoutedHead(6, 3, experts=0)
