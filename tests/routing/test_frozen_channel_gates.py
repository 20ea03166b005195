import numpy as np
import pytest
import torch
from torch import nn

from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.frozen_channel_gates import FrozenHeads

HEADS = {
    "relu": lambda: {name: ChannelGate(6, width) for name, width in (("a", 7), ("b", 16), ("c", 3))},
    "without bias": lambda: {name: ChannelGate(6, 8, bias=None) for name in "ab"},
    "hard": lambda: {name: ChannelGate(6, width, block=2, mode="hard") for name, width in (("a", 7), ("b", 16))},
    "topk": lambda: {
        name: ChannelGate(6, width, block=2, mode="topk", keep=keep)
        for name, width, keep in (("a", 8, 2), ("b", 8, 2), ("c", 5, 1))
    },
}


def build(kind: str) -> tuple[dict[str, ChannelGate], torch.Tensor]:
    torch.manual_seed(0)
    heads = {name: head.double().eval() for name, head in HEADS[kind]().items()}
    for head in heads.values():
        nn.init.normal_(head.weight)
        if head.bias is not None:
            nn.init.normal_(head.bias)
    return heads, torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_joined_heads_open_the_blocks_that_each_head_opens(kind):
    heads, embedding = build(kind)
    frozen = FrozenHeads(list(heads.values()))
    scores = frozen.scores(embedding)
    joined = frozen.routings(scores)
    for routing, head in zip(joined, heads.values(), strict=True):
        alone = head(embedding)
        assert torch.equal(routing.index, alone.index)
        torch.testing.assert_close(routing.gate, alone.gate)
        torch.testing.assert_close(routing.scores, alone.scores)
    gates = torch.cat([routing.weights[:, 0] for routing in joined], 1)
    assert torch.equal(frozen.gates(scores), gates)
    blocks = [head.blocks for head in heads.values()]
    for image, expected in enumerate(gates):
        opened, found, offsets = frozen.open_blocks(frozen.scores(embedding[image : image + 1]))
        assert opened.tolist() == expected.nonzero().flatten().tolist()
        torch.testing.assert_close(torch.from_numpy(found), expected[expected != 0])
        assert np.diff(offsets).tolist() == [int((part != 0).sum()) for part in expected.split(blocks)]


@torch.no_grad()
def test_blocks_with_equal_scores_are_opened_from_the_first_on():
    heads, _ = build("topk")
    for head in heads.values():
        head.weight.zero_()
        head.bias.fill_(2.0)
    frozen = FrozenHeads(list(heads.values()))
    scores = frozen.scores(torch.zeros(1, 6, dtype=torch.float64))
    opened, gates, offsets = frozen.open_blocks(scores)
    assert opened.tolist() == [0, 1, 4, 5, 8]
    assert offsets == [0, 2, 4, 5]
    assert [routing.index.flatten().tolist() for routing in frozen.routings(scores)] == [[0, 1], [0, 1], [0]]
    torch.testing.assert_close(torch.from_numpy(gates), nn.functional.softplus(torch.full((5,), 2.0).double()))


@torch.no_grad()
def test_ties_in_one_head_do_not_change_another():
    heads, _ = build("topk")
    for head, bias in zip(heads.values(), ([1, 3, 3, 3], [9, 5, 9, 9], [4, 7, 7]), strict=True):
        head.weight.zero_()
        head.bias.copy_(torch.tensor(bias[: len(head.bias)]))
    frozen = FrozenHeads(list(heads.values()))
    scores = frozen.scores(torch.zeros(1, 6, dtype=torch.float64))
    assert frozen.open_blocks(scores).blocks.tolist() == [1, 2, 4, 6, 9]
    assert frozen.gates(scores)[0].nonzero().flatten().tolist() == [1, 2, 4, 6, 9]


@torch.no_grad()
def test_a_gate_that_is_nan_is_open():
    heads, embedding = build("relu")
    heads["b"].bias[3] = torch.nan
    frozen = FrozenHeads(list(heads.values()))
    scores = frozen.scores(embedding[:1])
    assert 7 + 3 in frozen.open_blocks(scores).blocks
    assert frozen.gates(scores)[0, 7 + 3].isnan()


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_an_image_gets_the_same_scores_alone_and_in_a_batch(kind):
    heads, embedding = build(kind)
    frozen = FrozenHeads(list(heads.values()))
    torch.testing.assert_close(frozen.scores(embedding[1:2]), frozen.scores(embedding)[1:2])


@torch.no_grad()
def test_later_changes_to_the_heads_have_no_effect():
    heads, embedding = build("topk")
    frozen = FrozenHeads(list(heads.values()))
    expected = frozen.gates(frozen.scores(embedding))
    for head in heads.values():
        head.bias.fill_(-100)
        head.keep = 1
    assert torch.equal(frozen.gates(frozen.scores(embedding)), expected)


def test_heads_of_different_modes_or_sizes_are_refused():
    for other in (ChannelGate(6, 8, mode="topk", keep=1), ChannelGate(5, 8)):
        with pytest.raises(ValueError, match="must have the same mode and embedding size"):
            FrozenHeads([ChannelGate(6, 8), other])
