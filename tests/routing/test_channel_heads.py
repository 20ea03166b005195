import numpy as np
import pytest
import torch
from torch import nn

from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.channel_heads import ChannelHeads, JointGates

HEADS = {
    "relu": lambda: {name: ChannelGate(6, width) for name, width in (("a", 7), ("b", 16), ("c", 3))},
    "without bias": lambda: {name: ChannelGate(6, 8, bias=None) for name in "ab"},
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
def test_heads_at_once_choose_what_each_does(kind):
    heads, embedding = build(kind)
    together = ChannelHeads(heads)(embedding)
    assert isinstance(together, JointGates)
    assert list(together) == list(heads)
    for name, head in heads.items():
        alone = head(embedding)
        assert torch.equal(together[name].index, alone.index)
        torch.testing.assert_close(together[name].gate, alone.gate)
        torch.testing.assert_close(together[name].scores, alone.scores)
    blocks = [head.blocks for head in heads.values()]
    for image, gates in enumerate(torch.cat([routing.weights[:, 0] for routing in together.values()], 1)):
        opened, found, cuts = ChannelHeads(heads)(embedding[image : image + 1]).opened()
        assert opened.tolist() == gates.nonzero().flatten().tolist()
        torch.testing.assert_close(torch.from_numpy(found), gates[gates != 0])
        assert np.diff(cuts).tolist() == [int((part != 0).sum()) for part in gates.split(blocks)]


@torch.no_grad()
def test_blocks_with_equal_scores_are_opened_from_the_first_on():
    heads, _ = build("topk")
    for head in heads.values():
        head.weight.zero_()
        head.bias.fill_(2.0)
    found = ChannelHeads(heads)(torch.zeros(1, 6, dtype=torch.float64))
    opened, gates, cuts = found.opened()
    assert opened.tolist() == [0, 1, 4, 5, 8]
    assert cuts == [0, 2, 4, 5]
    assert [routing.index.flatten().tolist() for routing in found.values()] == [[0, 1], [0, 1], [0]]
    torch.testing.assert_close(torch.from_numpy(gates), nn.functional.softplus(torch.full((5,), 2.0).double()))


@torch.no_grad()
def test_the_host_looks_at_one_image():
    heads, embedding = build("relu")
    with pytest.raises(ValueError, match="gates for 4 images; `opened` is for one"):
        ChannelHeads(heads)(embedding).opened()


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_an_image_gets_the_gates_that_it_gets_in_a_batch(kind):
    heads, embedding = build(kind)
    joint = ChannelHeads(heads)
    torch.testing.assert_close(joint(embedding[1:2]).scores, joint(embedding).scores[1:2])


def test_heads_that_learn_work_by_themselves():
    heads, embedding = build("relu")
    joint = ChannelHeads(heads)
    assert joint(embedding)["a"].gate.requires_grad
    with torch.no_grad():
        heads["b"].train()
        assert not isinstance(joint(embedding), JointGates)


@torch.no_grad()
def test_heads_that_have_hooks_are_called():
    heads, embedding = build("relu")
    heard: list[int] = []
    heads["b"].register_forward_hook(lambda head, args, routing: heard.append(routing.experts))
    ChannelHeads(heads)(embedding)
    assert heard == [16]


@torch.no_grad()
def test_heads_that_changed_are_noticed():
    heads, embedding = build("relu")
    joint = ChannelHeads(heads)
    joint(embedding)
    heads["b"].bias.fill_(-100)
    assert not joint(embedding)["b"].gate.any()


@torch.no_grad()
def test_an_embedding_that_does_not_fit_is_refused_as_a_head_does():
    heads, _ = build("relu")
    with pytest.raises(ValueError, match=r"ChannelGate: takes embeddings \(B, 6\), got \(2, 5\)"):
        ChannelHeads(heads)(torch.zeros(2, 5))
