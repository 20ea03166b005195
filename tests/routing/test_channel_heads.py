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
    expected = torch.cat([routing.weights[:, 0] for routing in together.values()], 1)
    torch.testing.assert_close(torch.from_numpy(together.on_host()), expected)


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_an_image_gets_the_gates_that_it_gets_in_a_batch(kind):
    heads, embedding = build(kind)
    joint = ChannelHeads(heads)
    alone, among = joint(embedding[1:2]).on_host(), joint(embedding).on_host()[1:2]
    torch.testing.assert_close(torch.from_numpy(alone), torch.from_numpy(among))


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
