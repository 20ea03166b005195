"""Dispatch tables count what the routing did, and say it in a few lines."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.insight import DispatchTable, dispatch_entropy, dispatch_table
from moesaic.routing_record import UNASSIGNED, Routing


def samples_choose(experts_of_samples: list[list[int]], experts: int) -> Routing:
    index = torch.tensor(experts_of_samples)[:, None]
    scores = torch.zeros(len(index), 1, experts)
    return Routing("sample", scores, index, (index != UNASSIGNED).float(), "unit")


@st.composite
def routings_and_clusters(draw: st.DrawFn) -> tuple[Routing, list[int]]:
    B, E, K = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    choice = draw(st.lists(st.integers(UNASSIGNED, E - 1), min_size=B, max_size=B))
    clusters = draw(st.lists(st.integers(0, K - 1), min_size=B, max_size=B))
    return samples_choose([[e] for e in choice], E), clusters


@given(routings_and_clusters())
def test_a_count_is_the_number_of_samples_of_the_cluster_at_the_expert(drawn):
    routing, clusters = drawn
    table = dispatch_table(routing, clusters, names=["a", "b", "c", "d"])
    choices = routing.index.flatten().tolist()
    for k in range(4):
        for e in range(routing.experts):
            assert table.counts[k][e] == sum((c, m) == (k, e) for c, m in zip(clusters, choices, strict=True))
    assert list(table.load) == routing.load.tolist()


@given(routings_and_clusters())
def test_the_entropy_is_that_of_dispatch_entropy_with_names_and_without(drawn):
    routing, clusters = drawn
    expected = dispatch_entropy(routing, clusters)
    assert dispatch_table(routing, clusters).entropy == pytest.approx(expected, abs=1e-12)
    assert dispatch_table(routing, clusters, names="abcd").entropy == pytest.approx(expected, abs=1e-12)


def test_one_cluster_an_expert_has_entropy_0_and_a_blind_router_that_of_the_clusters():
    apart = DispatchTable(("a", "b"), ((30, 0), (0, 10)))
    blind = DispatchTable(("a", "b"), ((15, 15), (5, 5)))
    assert apart.entropy == 0
    assert blind.entropy == pytest.approx(blind.cluster_entropy) == pytest.approx(apart.cluster_entropy)
    assert blind.cluster_entropy == pytest.approx(0.5623, abs=1e-4)


def test_units_of_an_image_carry_their_own_labels():
    index = torch.tensor([[[0], [1]], [[1], [1]]])
    routing = Routing("patch", torch.zeros(2, 2, 2), index, torch.ones(2, 2, 1), "unit")
    assert dispatch_table(routing, [[5, 7], [7, 5]]) == DispatchTable(("5", "7"), ((1, 1), (0, 2)))


def test_soft_routers_count_by_weight():
    gate = torch.tensor([[[[0.75], [0.25]]], [[[0.5], [0.5]]]])
    routing = Routing("patch", gate.clone(), None, gate, "soft", dispatch=torch.ones_like(gate))
    table = dispatch_table(routing, [0, 0])
    assert table.counts == ((1.25, 0.75),)
    assert "1.2" in str(table)


def test_a_cluster_prefers_the_expert_with_most_of_it_and_none_if_it_is_empty():
    table = dispatch_table(samples_choose([[1], [1], [0], [2]], 3), [0, 0, 0, 2], names=["a", "b", "c"])
    assert table.preferred == (1, None, 2)
    assert table.shares[0] == pytest.approx((1 / 3, 2 / 3, 0))
    assert table.shares[1] == (0, 0, 0)


def test_bool_clusters_are_two_clusters():
    table = dispatch_table(samples_choose([[0], [1]], 2), torch.tensor([True, False]), names=["no", "yes"])
    assert table.counts == ((0, 1), (1, 0))


def test_the_printed_columns_are_in_line():
    table = DispatchTable(("English", "fr"), ((1374, 31882), (23470, 13)))
    assert str(table).splitlines() == [
        "         expert 0   expert 1",
        "English      1374      31882*",
        "fr          23470*        13",
        "all         24844      31895",
        f"entropy {table.entropy:.3f} nats (0: one cluster an expert; {table.cluster_entropy:.3f}: all alike)",
    ]


def test_fields_are_plain_data():
    table = dispatch_table(samples_choose([[0], [1]], 2), torch.tensor([3, 4]))
    assert asdict(table) == {"clusters": ("3", "4"), "counts": ((1, 0), (0, 1))}
    assert all(type(count) is int for row in table.counts for count in row)


def test_nothing_routed_is_an_empty_table():
    nothing = Routing(
        "sample", torch.zeros(0, 1, 2), torch.zeros(0, 1, 1, dtype=torch.long), torch.zeros(0, 1, 1), "unit"
    )
    table = dispatch_table(nothing, torch.zeros(0, dtype=torch.long), names=["a"])
    assert (table.counts, table.entropy, table.preferred) == (((0, 0),), 0, (None,))
    assert dispatch_table(nothing, torch.zeros(0, dtype=torch.long)).entropy == 0


def test_numbers_on_a_plot_can_be_read_on_its_colours():
    figure = DispatchTable(("a$b", "c"), ((90, 10), (0, 50))).plot("before")
    (axes,) = figure.axes
    assert [(text.get_text(), text.get_color()) for text in axes.texts] == [
        ("90", "white"),
        ("10", "black"),
        ("0", "black"),
        ("50", "white"),
    ]
    figure.canvas.draw()


@pytest.mark.parametrize(
    ("clusters", "names", "message"),
    [
        ([0, 2], ["a", "b"], "clusters go from 0 to 2, and 2 names stand for 0 to 1"),
        ([-1, 0], ["a", "b"], "clusters go from -1 to 0"),
        ([0, 1, 0], None, r"dispatch_table: clusters have shape \(3,\); give \(2,\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(clusters, names, message):
    with pytest.raises(ValueError, match=message):
        dispatch_table(samples_choose([[0], [1]], 2), clusters, names)


def test_rows_that_do_not_fit_the_clusters_are_refused():
    with pytest.raises(ValueError, match=r"2 clusters, and rows of counts of the lengths \[2, 1\]"):
        DispatchTable(("a", "b"), ((1, 2), (3,)))
