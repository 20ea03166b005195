"""What gates do, as numbers: which channels are used, whether they follow the class, and what images cost."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.insight.channel_metrics import (
    channel_usage,
    class_shares,
    gate_dependence,
    gate_distances,
    open_gates,
    specific_gates,
)
from moesaic.insight.embedding_map import embedding_map
from moesaic.insight.explain import collect_outputs, explain
from moesaic.insight.image_cost import image_costs
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.vgg import VGG16
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing_record import Routing


def gates(open_BE: Tensor) -> Routing:
    """A routing in which exactly these are open."""
    return ChannelGate(1, open_BE.shape[1]).choose(torch.where(open_BE, 0.5, -0.5))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def unit(pixels: Tensor) -> Tensor:
    return pixels / 255


def test_channels_are_dead_always_on_or_dynamic():
    usage = channel_usage(gates(torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1]]).bool()))
    assert (usage.dead, usage.always_on, usage.dynamic) == ((1,), (0,), (2, 3))
    assert (usage.images, usage.gates, usage.patterns) == (3, 4, 2)
    assert usage.open_share == 0.5
    assert usage.spread == 0, "each image opens two"


def test_the_spread_is_that_of_how_many_gates_images_open():
    usage = channel_usage(gates(torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]).bool()))
    assert usage.spread == 0.5
    assert len(usage.dynamic) == 4


def test_kept_channels_of_top_k_gates_are_open():
    routing = ChannelGate(1, 6, block=2, mode="topk", keep=1).choose(torch.tensor([[-3.0, -1.0, -2.0]]))
    assert open_gates(routing).tolist() == [[False, True, False]]


def test_what_has_no_gates_is_refused():
    patches = Routing("patch", torch.zeros(1, 4, 1), torch.zeros(1, 1, 1).long(), torch.ones(1, 1, 1), "expert")
    with pytest.raises(ValueError, match="conv1 routes by patch, and only channels have gates"):
        open_gates({"conv1": patches})
    with pytest.raises(ValueError, match="there is no layer; give"):
        open_gates({})
    with pytest.raises(ValueError, match="the routing has no image"):
        channel_usage(gates(torch.zeros(0, 3).bool()))
    with pytest.raises(ValueError, match=r"gate_distances: labels go from 0 to 2; with classes=2"):
        gate_distances(gates(drawn(3, 4)), torch.arange(3), 2)


def test_distances_are_means_over_all_pairs_of_images():
    open_BE, labels = drawn(12, 7), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2])
    found = gate_distances(gates(open_BE), labels, classes=4)
    by_pair: dict[tuple[int, int], list[float]] = {}
    for a, b in combinations(range(12), 2):
        distance = float((open_BE[a] != open_BE[b]).double().mean())
        by_pair.setdefault((int(labels[a]), int(labels[b])), []).append(distance)
    for (j, k), distances in by_pair.items():
        expected = pytest.approx(sum(distances) / len(distances), abs=1e-5)
        assert found.distance[j][k] == found.distance[k][j] == expected
    assert found.distance[2][2] is None, "a single image has no pair"
    assert found.distance[3] == (None,) * 4
    same = [d for (j, k), distances in by_pair.items() if j == k for d in distances]
    other = [d for (j, k), distances in by_pair.items() if j != k for d in distances]
    assert found.within == pytest.approx(sum(same) / len(same))
    assert found.between == pytest.approx(sum(other) / len(other))


def test_gates_that_follow_the_class_are_told_from_gates_that_do_not():
    labels = torch.arange(60) % 3
    followed = drawn(60, 30, seed=1)
    followed[:, :3] = nn.functional.one_hot(labels).bool()
    follow, ignore = (gate_distances(gates(each), labels, 3) for each in (followed, drawn(60, 30, seed=1)))
    assert follow.significant
    assert follow.probe_accuracy == 1
    assert follow.majority_share == pytest.approx(1 / 3)
    assert not ignore.significant
    assert ignore.probe_accuracy == pytest.approx(1 / 3, abs=0.25)


def test_chance_alone_seldom_looks_real():
    labels = torch.arange(40) % 2
    looks_real = [gate_distances(gates(drawn(40, 10, seed=seed)), labels, 2).significant for seed in range(40)]
    assert sum(looks_real) <= 6  # one in twenty


def test_dependence_is_the_mean_over_pairs_entropy_and_information():
    gate, labels = ChannelGate(1, channels=3), torch.tensor([0, 0, 1, 1])
    open_BE = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]])  # the class, half of each class, always on
    routing = gate.choose(2.0 * open_BE - 1)
    found = gate_dependence({"a": routing, "b": routing}, labels, classes=2)
    pairs = [float((open_BE[i] != open_BE[j]).float().mean()) for i, j in combinations(range(4), 2)]
    assert found.differing == pytest.approx(sum(pairs) / len(pairs))
    assert (found.entropy, found.class_information) == pytest.approx((2 / 3, 1 / 3))
    with pytest.raises(ValueError, match="1 images do not differ"):
        gate_dependence(gate.choose(torch.ones(1, 3)), labels[:1], classes=2)


def test_layers_together_have_the_mean_distance_of_their_gates():
    labels = torch.arange(10) % 2
    one, other = gates(drawn(10, 3, seed=2)), gates(drawn(10, 9, seed=3))
    both = gate_distances({"a": one, "b": other}, labels, 2)
    apart = [gate_distances(each, labels, 2).within for each in (one, other)]
    assert both.within == pytest.approx((3 * (apart[0] or 0) + 9 * (apart[1] or 0)) / 12)


@pytest.mark.parametrize(("images", "classes"), [(1, 1), (2, 2), (3, 1)])
def test_few_images_or_classes_are_not_compared(images: int, classes: int):
    labels = torch.arange(images) % classes
    found = gate_distances(gates(drawn(images, 4)), labels, classes)
    assert (found.within is None) == (images == classes)
    assert (found.between is None) == (classes == 1)
    assert not found.significant
    assert specific_gates({"a": gates(drawn(images, 4))}, labels, classes) == ()


def test_mean_patterns_are_shares_of_a_class_s_images():
    shares = class_shares(gates(torch.tensor([[1, 0], [1, 1], [0, 1]]).bool()), torch.tensor([0, 0, 2]), 3)
    assert shares.tolist() == [[1, 0.5], [0, 0], [0, 1]]


def test_specific_gates_are_found_and_those_picked_by_luck_lose_their_lead():
    labels = torch.arange(200) % 4
    noise = drawn(200, 400, seed=4)
    planted = noise[:, :50].clone()
    planted[:, 17] = labels == 2
    first, *others = specific_gates({"conv1": gates(planted), "conv2": gates(noise)}, labels, 4, count=10)
    assert (first.layer, first.gate, first.label, first.own, first.others) == ("conv1", 17, 2, 1, 0)
    leads = [each.own - each.others for each in others]
    assert abs(sum(leads) / len(leads)) < 0.1, "measured on images that they were not picked by"


def test_a_map_is_the_same_for_the_same_seed_and_neighbours_are_counted():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 2
    points = torch.randn(24, 5, generator=generator) + 20 * labels[:, None]
    one, again = embedding_map(points, labels), embedding_map(points, labels)
    assert one == again
    assert len(one.x) == len(one.y) == 24
    assert one.neighbours == 1
    assert one.by_chance == 0.5
    assert embedding_map(points, labels[torch.randperm(24, generator=generator)]).neighbours < 1


@pytest.mark.parametrize(
    ("points", "why"),
    [
        (torch.randn(1, 3), "there is only 1 image, and"),
        (torch.randn(2, 3), "there are only 2 images, and a map needs at least 10"),
        (torch.ones(12, 3), "all images have the same embedding"),
        (torch.full((12, 3), math.nan), "not finite"),
    ],
)
def test_where_no_map_can_be_drawn_it_says_why(points: Tensor, why: str):
    found = embedding_map(points, torch.zeros(len(points)).long())
    assert why in found.why_not
    assert found.x == ()


def test_an_embedding_of_one_number_has_a_map():
    assert not embedding_map(torch.arange(12.0)[:, None], torch.zeros(12).long()).why_not


def costs(macs: list[int], labels: list[int], right: list[bool] | None = None, certain: Tensor | None = None):
    K = max(labels) + 1
    return image_costs(
        torch.tensor(macs),
        dense_macs=200,
        fixed_macs=10,
        classes=torch.tensor(labels),
        class_names=[f"class {k}" for k in range(K)],
        probabilities=torch.full((len(macs), 2), 0.5) if certain is None else torch.stack([certain, 1 - certain], 1),
        correct=None if right is None else torch.tensor(right),
        show=2,
    )


def test_costs_are_percent_of_the_dense_network_and_classes_are_sorted_by_cost():
    found = costs([100, 120, 20, 40], [0, 0, 2, 2])
    assert found.cost == (50, 60, 10, 20)
    assert [(each.name, each.images, each.mean) for each in found.classes] == [("class 2", 2, 15), ("class 0", 2, 55)]
    assert (found.least_expensive, found.most_expensive) == ((2, 3), (1, 0))
    assert found.right is found.wrong is found.extra_cost_when_wrong is None
    assert not found.constant


def test_one_image_has_a_cost_and_no_interval():
    found = costs([100], [0], [False])
    assert found.all.interval is None
    assert found.constant
    assert (found.least_expensive, found.most_expensive) == ((0,), ())
    assert found.right is None
    assert found.wrong is not None
    assert found.extra_cost_when_wrong is None


def test_the_extra_cost_of_wrong_predictions_has_an_interval():
    macs = [100 + i % 3 for i in range(30)] + [140 + i % 3 for i in range(30)]
    found = costs(macs, [0] * 60, [True] * 30 + [False] * 30).extra_cost_when_wrong
    assert found is not None
    assert found.value == pytest.approx(20)
    assert 19 < found.low < 20 < found.high < 21


def test_an_expensive_and_hard_class_does_not_make_wrong_predictions_expensive_within_it():
    easy = [(100 + i % 3, 0, i >= 12) for i in range(60)]  # 12 of 60 wrong
    hard = [(160 + i % 3, 1, i < 12) for i in range(60)]  # 48 of 60 wrong
    found = costs(*(list(column) for column in zip(*easy, *hard, strict=True)))
    overall, within = found.extra_cost_when_wrong, found.extra_cost_within_classes
    assert overall is not None
    assert within is not None
    assert overall.low > 5
    assert within.low <= 0 <= within.high


def test_cost_and_certainty_are_correlated_where_both_vary():
    certain = torch.linspace(0.5, 1, 40)
    found = costs([200 - i for i in range(40)], [0] * 40, certain=certain).certainty
    assert found is not None
    assert found.high < -0.9
    assert costs([100] * 40, [0] * 40, certain=certain).certainty is None
    assert costs([100, 120], [0, 0]).certainty is None


def tiny(classes: int = 2, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return deepmoe(VGG16(classes, width=0.05), num_classes=classes, **options)


def test_a_deepmoe_tells_its_embedding_and_costs_batch_by_batch_as_at_once():
    model = tiny()
    for gate in model.gates.values():
        nn.init.normal_(gate.bias)
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    found, at_once = collect_outputs(model, pixels, unit, batch_size=2), collect_outputs(model, pixels, unit)
    assert found.gated is not None
    assert at_once.gated is not None
    output = model.eval().forward_with_routing(unit(pixels))
    torch.testing.assert_close(found.gated.embedding, output.embedding.detach())
    assert found.gated.macs.tolist() == at_once.gated.macs.tolist() == model.macs(output.routing).tolist()
    assert found.gated.dense_macs == model.dense_macs
    assert list(found.routing) == [f"backbone.{name}" for name in model.gated]
    assert set(found.blocks.values()) == {1}
    torch.testing.assert_close(found.probabilities, output.logits.detach().softmax(-1))


def test_a_deepmoe_is_explained_by_its_gates_alone():
    found = collect_outputs(tiny(block=2), torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), unit)
    explanation = explain(found, ["cat", "dog"], labels=torch.tensor([0, 1, 0, 1]))
    assert explanation.layers == ()
    channels = explanation.channels
    assert channels is not None
    assert len(channels.layers) == 13
    assert channels.layers[-1].block == 2
    assert channels.gates == channels.always_on, "all gates start open"
    assert channels.open_share == 1
    assert channels.map is not None
    assert channels.map.why_not
    assert channels.costs is not None
    assert channels.costs.all.mean > 100, "open gates save nothing, and setting them costs"


class Mixed(nn.Module):
    """Patches are routed first, channels gated after."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
        self.gate = ChannelGate(3, 4)
        self.conv = ChannelMoE(4, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.moe(x), self.gate(x.mean((2, 3)))).mean((2, 3)))


def test_a_network_may_route_patches_and_gate_channels():
    torch.manual_seed(0)
    found = collect_outputs(Mixed(), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), unit)
    explanation = explain(found, ["cat", "dog"])
    assert [layer.name for layer in explanation.layers] == ["moe"]
    assert explanation.channels is not None
    assert [layer.name for layer in explanation.channels.layers] == ["conv"]
    assert explanation.channels.costs is explanation.channels.map is None, "it does not have them"
    assert explain(collect_outputs(Mixed(), torch.zeros(1, 3, 8, 8), unit, layers=["moe"]), ["a", "b"]).channels is None


def test_distances_need_an_image():
    with pytest.raises(ValueError, match="gate_distances: the routing has no image; give at least one"):
        gate_distances(gates(torch.zeros(0, 3, dtype=torch.bool)), torch.zeros(0, dtype=torch.int64), 2)
