"""The cost model of expert parallelism; that it counts what ranks send is in tests/experts/test_sharding.py."""

import pytest

from moesaic.bench.expert_parallel_cost import (
    H100_CLUSTER,
    ExpertLayer,
    Link,
    Machine,
    all_reduce_seconds,
    all_to_all_seconds,
    break_even_images,
    expert_parallel_step,
)

MLP = ExpertLayer(64, 768, 768, patches_per_expert=4, hidden_channels=3072)
CONV = ExpertLayer(8, 640, 80, patches_per_expert=2, patch_size=4, kernel_size=3, halo=True)
FREE = Link(1e30, 0.0)


def only_links(link: Link) -> Machine:
    """A machine on which nothing but the links takes time."""
    return Machine(1e30, 1e30, link, link, ranks_per_node=10**6)


def test_one_rank_sends_nothing():
    cost = expert_parallel_step(MLP, 8, 1, 1, H100_CLUSTER)
    assert (cost.exchange, cost.gradients) == (0, 0)


@pytest.mark.parametrize("layer", [MLP, CONV])
def test_at_the_break_even_both_send_equally_many_bytes(layer):
    machine, ranks = only_links(Link(1e9, 0.0)), layer.experts
    images = break_even_images(layer)
    for factor, sign in ((0.5, -1), (1, 0), (2, 1)):
        sharded = expert_parallel_step(layer, factor * images, ranks, ranks, machine).total()
        replicated = expert_parallel_step(layer, factor * images, ranks, 1, machine).total()
        assert sharded - replicated == pytest.approx(sign * abs(sharded - replicated), abs=1e-9 * replicated)


def test_sharding_divides_weights_and_leaves_arithmetic_alone():
    machine = Machine(1e12, 1e30, FREE, FREE, ranks_per_node=8)
    assert expert_parallel_step(MLP, 8, 64, 8, machine).compute == pytest.approx(
        expert_parallel_step(MLP, 8, 64, 1, machine).compute
    )
    slow_memory = Machine(1e30, 1e9, FREE, FREE, ranks_per_node=8)
    costs = [expert_parallel_step(MLP, 8, 64, ranks, slow_memory).optimizer for ranks in (1, 8)]
    assert costs[0] == pytest.approx(8 * costs[1])


def test_values_that_leave_the_node_take_the_slower_link():
    machine = Machine(1.0, 1.0, Link(1e9, 0.0), Link(1e6, 0.0), ranks_per_node=4)
    assert all_to_all_seconds(4e6, 4, machine) == pytest.approx(3e6 / 1e9)
    assert all_to_all_seconds(8e6, 8, machine) == pytest.approx(3e6 / 1e9 + 4e6 / 1e6)
    assert all_reduce_seconds(4e6, 4, machine) == pytest.approx(6e6 / 1e9)
    assert all_reduce_seconds(4e6, 8, machine) == pytest.approx(6e6 / 1e9 + 1e6 / 1e6)
    assert all_reduce_seconds(4e6, 2, machine, stride=4) == pytest.approx(4e6 / 1e6)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="expert_ranks=3 must divide 8 ranks and 64 experts"):
        expert_parallel_step(MLP, 8, 8, 3, H100_CLUSTER)
