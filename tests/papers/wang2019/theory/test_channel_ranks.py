"""The rank of networks whose channels are masked: for all inputs alike, or for each input its own way."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.papers.wang2019.theory.channel_ranks import (
    ChannelNetwork,
    MatrixRank,
    blind_pair,
    confused,
    matricise,
    measure_channel_ranks,
    narrow,
    numerical_rank,
    one_sided_rank,
    printed_rank,
    random_channel_network,
    tensor_rank,
)
from moesaic.papers.wang2019.theory.mask_collisions import (
    coin_collision,
    coin_confusion,
    coin_masks,
    subset_collision,
    subset_masks,
)


def decomposition(network: ChannelNetwork, gates: tuple[Tensor, ...]) -> Tensor:
    """A by the recursion on tensors, as the module's first lines write it."""
    level = [list(network.weights[0][i]) for i in range(network.patches)]  # [place][channel]
    for gate, weight in zip(gates, network.weights[1:], strict=True):
        following: list[list[Tensor]] = []
        for j, mix in enumerate(weight):
            pairs = [
                gate[a] * torch.tensordot(level[2 * j][a], level[2 * j + 1][a], dims=0) for a in range(mix.shape[1])
            ]
            following.append([sum((w * pair for w, pair in zip(row, pairs, strict=True)), pairs[0] * 0) for row in mix])
        level = following
    return level[0][0]


def rank(network: ChannelNetwork, gates: tuple[Tensor, ...] | None = None) -> int:
    """The rank, which no small change of the tolerance would change."""
    found = numerical_rank(matricise(network.tensor(gates)))
    assert found.kept > 1e-10
    assert found.dropped < 1e-14
    return found.rank


def near(probability: float, draws: int) -> Any:
    return pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / draws))


@pytest.mark.parametrize(("widths", "features"), [((3,), 4), ((3, 2), 3), ((2, 3, 2), 2)])
def test_the_network_computes_the_hierarchical_decomposition(widths: tuple[int, ...], features: int):
    network = random_channel_network(widths, features, seed=0)
    gates = tuple(torch.rand(width, generator=torch.Generator().manual_seed(1)).double() for width in widths)
    tensor = network.tensor(gates)
    assert torch.allclose(tensor, decomposition(network, gates), rtol=1e-12, atol=1e-12)
    ones = tuple(torch.ones(width) for width in widths)
    assert torch.allclose(network.tensor(), decomposition(network, ones), rtol=1e-12, atol=1e-12)


def test_the_output_is_the_tensor_applied_to_products_of_features():
    network = random_channel_network((3, 2), 3, seed=2)
    f = torch.rand(7, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.einsum("abcd,na,nb,nc,nd->n", network.tensor(), f[:, 0], f[:, 1], f[:, 2], f[:, 3])
    assert torch.allclose(network.outputs(f), expected, rtol=1e-12, atol=1e-12)


def test_rows_are_odd_patches_and_columns_even_ones():
    tensor = torch.arange(81).view(3, 3, 3, 3)
    matrix = matricise(tensor)
    for a, b, c, d in itertools.product(range(3), repeat=4):
        assert matrix[3 * a + c, 3 * b + d] == tensor[a, b, c, d]


@pytest.mark.parametrize(
    ("widths", "features"),
    [((2,), 4), ((6,), 4), ((2, 2), 4), ((3, 3), 4), ((4, 4), 4), ((5, 5), 3), ((2, 2, 2), 3), ((3, 2, 2), 2)],
)
def test_a_dense_network_has_the_rank_of_the_formula(widths: tuple[int, ...], features: int):
    for seed in range(3):
        found = rank(random_channel_network(widths, features, seed=seed))
        assert found == tensor_rank(widths, features) == min(widths[0], features) ** (2 ** len(widths) // 2)


def test_only_the_first_layers_width_counts_where_print_speaks_of_the_width_between_layers():
    ranks = {widths: rank(random_channel_network(widths, 3, seed=0)) for widths in itertools.product((1, 2, 3), (1, 4))}
    assert ranks == {widths: widths[0] ** 2 for widths in ranks}
    deep = {widths: rank(random_channel_network(widths, 3, seed=0)) for widths in [(2, 1, 1), (2, 5, 1), (2, 5, 5)]}
    assert set(deep.values()) == {2**4}


def test_the_printed_exponent_is_twice_what_the_layers_reach():
    for n, layers in [(2, 1), (2, 2), (3, 2), (2, 3)]:
        found = rank(random_channel_network((n,) * layers, n, seed=0))
        assert found**2 == printed_rank(n, layers)


def test_for_few_channels_the_tensor_is_a_sum_of_as_many_products_as_its_rank():
    network = random_channel_network((2, 3), 3, seed=0)
    first, mix, last = network.weights
    total = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    products = list(itertools.product(range(2), repeat=2))
    for a, b in products:
        factor = (last[0, 0] * mix[0, :, a] * mix[1, :, b]).sum()
        total += factor * torch.einsum("i,j,k,l->ijkl", first[0, a], first[1, a], first[2, b], first[3, b])
    assert torch.allclose(total, network.tensor(), rtol=1e-12, atol=1e-12)
    assert len(products) == tensor_rank((2, 3), 3)


@pytest.mark.parametrize(
    ("widths", "opened", "features"),
    [((4, 4), (2, 2), 4), ((4, 4), (3, 1), 4), ((5, 3), (4, 2), 3), ((3, 3, 3), (2, 1, 2), 3)],
)
def test_a_static_mask_leaves_the_rank_of_the_open_channels(
    widths: tuple[int, ...], opened: tuple[int, ...], features: int
):
    network = random_channel_network(widths, features, seed=0)
    masks = subset_masks((), widths, opened, seed=1)
    assert rank(network, masks) == tensor_rank(opened, features) == min(opened[0], features) ** (2 ** len(widths) // 2)
    narrower = narrow(network, masks)
    assert narrower.widths == opened
    assert torch.allclose(narrower.tensor(), network.tensor(masks), rtol=1e-12, atol=1e-12)


def test_masks_of_the_inputs_own_restore_the_rank_and_more():
    found = measure_channel_ranks((3, 3), (2, 2), features=4, trials=10)
    assert set(found.dense.tolist()) == {9}
    assert set(found.static.tolist()) == {4}
    assert set(found.dynamic.tolist()) == {16}  # M^(N/2): as much as there is


@pytest.mark.parametrize(
    ("widths", "opened", "features"),
    [((4, 4), (1, 1), 4), ((3, 3), (1, 2), 5), ((2, 2, 2), (1, 1, 1), 2), ((3,), (2,), 7)],
)
def test_masks_of_the_inputs_own_restore_at_least_the_dense_rank(
    widths: tuple[int, ...], opened: tuple[int, ...], features: int
):
    found = measure_channel_ranks(widths, opened, features, trials=5, seed=1)
    assert (found.static == tensor_rank(opened, features)).all()
    assert (found.dynamic >= tensor_rank(widths, features)).all()


def test_masks_that_look_at_odd_patches_alone_do_not_restore_it_if_they_open_too_few():
    few = measure_channel_ranks((4, 4), (1, 4), features=5, trials=5)
    assert set(few.one_sided.tolist()) == {4} == {one_sided_rank((4, 4), (1, 4), 5)}
    assert (few.dense == 16).all()
    enough = measure_channel_ranks((4, 4), (2, 2), features=6, trials=5)
    assert set(enough.one_sided.tolist()) == {16} == {one_sided_rank((4, 4), (2, 2), 6)}
    deep = measure_channel_ranks((3, 2, 2), (2, 2, 1), features=3, trials=2)
    assert one_sided_rank((3, 2, 2), (2, 2, 1), 3) == 45 < tensor_rank((3, 2, 2), 3) == 81
    assert (deep.one_sided <= 45).all()
    assert (deep.one_sided > tensor_rank((2, 2, 1), 3)).all()


def test_the_bound_for_odd_patches_counts_words():
    for m, n, layers in itertools.product((1, 3, 4), (1, 2, 3), (1, 2, 3)):
        if n <= m:
            words = itertools.product(range(m), repeat=2 ** (layers - 1))
            count = sum(len(set(word)) <= n for word in words)
            assert one_sided_rank((m,) * layers, (n,) * layers, features=m) == count
    assert one_sided_rank((9, 9), (4, 4), features=3) == 9


def test_the_printed_probability_is_not_that_of_the_rank():
    network = random_channel_network((2,), 2, seed=0)
    restored = 0
    for choice in itertools.product((0, 1), repeat=4):
        masks = torch.eye(2)[torch.tensor(choice)].view(2, 2, 2)
        restored += rank(network, (masks,)) == tensor_rank((2,), 2)
    assert restored == 14
    assert restored / 16 > 1 - subset_collision((2,), (1,)) == 0.5


def test_a_pair_that_open_channels_do_not_see_is_told_apart_by_the_others():
    network = random_channel_network((4, 3), 5, seed=0)
    masks = subset_masks((), (4, 3), (2, 2), seed=0)
    x, other = blind_pair(narrow(network, masks), 50, seed=1)
    assert x.min() > 0
    assert other.min() > 0
    assert confused(network, x, other, masks).all()
    assert not confused(network, x, other).any()


def test_own_subsets_confuse_a_blind_pair_as_often_as_printed():
    widths, opened, draws = (4, 3), (2, 1), 20_000
    network = random_channel_network(widths, 5, seed=0)
    x, other = blind_pair(network, draws, seed=1)
    assert confused(network, x, other).all()
    gates, others = (subset_masks((draws,), widths, opened, seed=seed) for seed in (2, 3))
    found = confused(network, x, other, gates, others)
    same = [(gate == twin).all(-1) for gate, twin in zip(gates, others, strict=True)]
    assert torch.equal(found, same[0] & same[1])
    assert found.double().mean().item() == near(subset_collision(widths, opened), draws)


def test_own_coins_confuse_it_more_often_than_they_collide():
    widths, p, draws = (3, 2), (0.4, 0.5), 20_000
    network = random_channel_network(widths, 5, seed=0)
    x, other = blind_pair(network, draws, seed=1)
    gates, others = (coin_masks((draws,), widths, p, seed=seed) for seed in (2, 3))
    found = confused(network, x, other, gates, others).double().mean().item()
    assert found == near(coin_confusion(widths, p), draws)
    assert found > coin_collision(widths, p) + 0.05


def test_a_rank_says_how_clear_it_is():
    found = numerical_rank(torch.diag(torch.tensor([4.0, 2.0, 1e-20])))
    assert found.rank == 2
    assert found.kept == 0.5
    assert found.dropped == pytest.approx(2.5e-21)
    assert numerical_rank(torch.diag(torch.tensor([4.0, 2.0])), tolerance=0.6).rank == 1
    assert numerical_rank(torch.zeros(2, 3)) == MatrixRank(0, 0.0, 0.0)


def test_trials_are_those_of_their_seed():
    first, again = (measure_channel_ranks((2,), (1,), features=2, trials=12, seed=0) for _ in range(2))
    assert torch.equal(first.dynamic, again.dynamic)
    other = measure_channel_ranks((2,), (1,), features=2, trials=12, seed=1)
    assert not torch.equal(first.dynamic, other.dynamic)  # 1 or 2 by chance, as two masks choose from little


def test_bad_parameters_are_refused_with_the_condition_that_fails():
    network = random_channel_network((3, 2), 4, seed=0)
    with pytest.raises(ValueError, match="1 ≤ L fails"):
        random_channel_network((), 4, seed=0)
    with pytest.raises(ValueError, match="1 ≤ r_1 fails: r_1=0"):
        tensor_rank((3, 0), 4)
    with pytest.raises(ValueError, match="1 ≤ features fails"):
        tensor_rank((3, 3), 0)
    with pytest.raises(ValueError, match=r"1 ≤ n_l ≤ m_l fails: n_0=4, m_0=3"):
        measure_channel_ranks((3, 2), (4, 1), features=4)
    with pytest.raises(ValueError, match=r"M\^N ≤ 2²⁰ fails: M=6, N=8"):
        measure_channel_ranks((2, 2, 2), (1, 1, 1), features=6)
    with pytest.raises(ValueError, match="r_0 < M fails: r_0=3, M=3"):
        blind_pair(random_channel_network((3, 2), 3, seed=0), 5, seed=0)
    with pytest.raises(ValueError, match=r"inputs are \(5, 3, 4\); give \(…, 4, 4\)"):
        network.outputs(torch.ones(5, 3, 4))
    with pytest.raises(ValueError, match=r"gates for \(3,\) channels, the layers have \(3, 2\)"):
        network.tensor([torch.ones(3)])
    with pytest.raises(ValueError, match=r"gates \(7, 3\) for inputs \(5,\); give \(channels,\) .* or \(5, 3\)"):
        network.outputs(torch.ones(5, 4, 4), [torch.ones(7, 3), torch.ones(2)])
    with pytest.raises(ValueError, match=r"n_1=0, m_1=2; a layer without open channels"):
        narrow(network, [torch.ones(3), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"masks are \[\(3,\)\]"):
        narrow(network, [torch.ones(3)])
    with pytest.raises(ValueError, match="an even number of axes"):
        matricise(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match="use matricise"):
        numerical_rank(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match="NaN"):
        numerical_rank(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match="0 ≤ tolerance < 1 fails"):
        numerical_rank(torch.ones(2, 2), tolerance=1.0)


def test_rounding_errors_are_counted_by_the_longer_side():
    matrix = torch.zeros(2, 5, dtype=torch.float64)
    matrix[0, 0] = 1.0
    matrix[1, 1] = 3 * torch.finfo(torch.float64).eps
    assert numerical_rank(matrix).rank == numerical_rank(matrix.T).rank == 1
    matrix[1, 1] = 6 * torch.finfo(torch.float64).eps
    assert numerical_rank(matrix).rank == numerical_rank(matrix.T).rank == 2
