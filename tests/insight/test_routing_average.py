"""Mean routings are the metrics of all batches together, and survive a checkpoint."""

import math

import pytest
import torch

from moesaic.insight.metrics import coverage, dispatch_entropy, load_share, mean_of_pairs, overlap, routing_entropy
from moesaic.insight.routing_average import RoutingSums
from moesaic.routing import ExpertChoice, SoftRouter, TokenChoice
from moesaic.routing_record import Routing

ROUTERS = {
    "expert": lambda: ExpertChoice(3, experts=3, patches_per_expert=2, patch_size=4),
    "unit": lambda: TokenChoice(3, experts=3, patch_size=4),
    "soft": lambda: SoftRouter(3, experts=3, patch_size=4),
}
LABELS = torch.tensor([0, 1, 1, 2, 0, 2, 2])


def routing(chooser: str, images: torch.Tensor) -> Routing:
    torch.manual_seed(3)
    return ROUTERS[chooser]()(images)


@pytest.mark.parametrize("chooser", ROUTERS)
def test_one_batch_has_the_metrics_of_its_routing(chooser: str):
    record = routing(chooser, torch.randn(7, 3, 8, 8))
    sums = RoutingSums.empty(record, classes=4)
    sums.add(record, LABELS)
    mean = sums.mean()
    near = {"abs": 1e-5}
    assert mean.chooser == chooser
    assert mean.load == pytest.approx(load_share(record).tolist(), **near)
    assert mean.entropy == pytest.approx(routing_entropy(record, normalised=True), **near)
    assert mean.coverage == pytest.approx(coverage(record), **near)
    assert mean.class_entropy == pytest.approx(dispatch_entropy(record, LABELS) / math.log(4), **near)
    if chooser == "expert":
        assert mean.overlap == pytest.approx(float(mean_of_pairs(overlap(record))), **near)
        assert mean.chance == pytest.approx((2 * 2 / 4) / (2 + 2 - 1), **near)
    else:
        assert mean.overlap is mean.chance is None


@pytest.mark.parametrize("chooser", ROUTERS)
def test_batches_of_other_sizes_weigh_by_their_images_and_sums_survive_a_checkpoint(chooser: str):
    images = torch.randn(7, 3, 8, 8)
    whole = routing(chooser, images)
    together = RoutingSums.empty(whole, classes=3)
    together.add(whole, LABELS)
    parts = RoutingSums.empty(whole, classes=3)
    parts.add(routing(chooser, images[:2]), LABELS[:2])
    parts = RoutingSums.from_state(parts.chooser, parts.state_dict(), torch.device("cpu"))
    parts.add(routing(chooser, images[2:]), LABELS[2:])
    one, other = together.mean(), parts.mean()
    assert other.load == pytest.approx(one.load, abs=2e-5)
    assert [other.entropy, other.coverage, other.class_entropy] == pytest.approx(
        [one.entropy, one.coverage, one.class_entropy], abs=2e-5
    )


def test_an_empty_batch_adds_nothing():
    record = routing("unit", torch.randn(0, 3, 8, 8))
    sums = RoutingSums.empty(record, classes=2)
    sums.add(record, torch.zeros(0, dtype=torch.long))
    assert sums.mean().load == (0.0, 0.0, 0.0)


def test_cleared_sums_begin_again_at_the_same_addresses():
    record = routing("expert", torch.randn(7, 3, 8, 8))
    sums = RoutingSums.empty(record, classes=3)
    sums.add(record, LABELS)
    once, addresses = sums.mean(), [tensor.data_ptr() for tensor in sums.state_dict().values()]
    sums.clear()
    assert sums.images == 0
    sums.add(record, LABELS)
    assert sums.images == 7
    assert sums.mean() == once
    assert [tensor.data_ptr() for tensor in sums.state_dict().values()] == addresses
