"""Randomness by key: independent of company and of device, and random."""

import math

import pytest
import torch

from moesaic import keyed_random


@pytest.mark.parametrize("company", [[3], [3, 4], list(range(50)), [9, 3, 1]])
def test_a_trial_draws_the_same_in_any_company(company: list[int]):
    me = company.index(3)
    alone, together = keyed_random.keys(5, [3]), keyed_random.keys(5, company)
    assert torch.equal(keyed_random.normal(alone, "a", 4, 5)[0], keyed_random.normal(together, "a", 4, 5)[me])
    assert torch.equal(keyed_random.permutations(alone, 7, 11)[0], keyed_random.permutations(together, 7, 11)[me])


def test_a_longer_draw_starts_like_a_shorter_one():
    keys = keyed_random.keys(0, range(3))
    assert torch.equal(keyed_random.bits(keys, "a", 10), keyed_random.bits(keys, "a", 100)[:, :10])


def test_seeds_trials_and_streams_differ():
    several = [keyed_random.keys(seed, [trial]) for seed in range(20) for trial in range(20)]
    numbers = torch.cat([keyed_random.bits(key, stream, 5) for key in several for stream in ("a", "b", 0, 1)]).flatten()
    assert numbers.unique().numel() == numbers.numel()


def test_a_stream_may_be_a_tensor():
    keys = keyed_random.keys(0, range(3))
    assert torch.equal(keyed_random.bits(keys, torch.tensor(4), 6), keyed_random.bits(keys, 4, 6))
    each = keyed_random.bits(keys, torch.tensor([4, 5, 6]), 6)
    assert torch.equal(each[1], keyed_random.bits(keys, 5, 6)[1])


def test_uniform_and_normal_have_their_moments():
    keys = keyed_random.keys(1, range(50))
    u, z = keyed_random.uniform(keys, "u", 4000), keyed_random.normal(keys, "z", 4000)
    n = u.numel()
    assert u.dtype == z.dtype == torch.float64
    assert 0 < u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)


def test_neighbours_are_not_correlated():
    keys = keyed_random.keys(1, range(200))
    z = keyed_random.normal(keys, "z", 200)
    limit = 5 / math.sqrt(z.numel())
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < limit
    assert abs((z[1:] * z[:-1]).mean()) < limit
    assert abs((z * keyed_random.normal(keys, "y", 200)).mean()) < limit


def test_every_bit_is_fair():
    numbers = keyed_random.bits(keyed_random.keys(2, range(100)), "b", 1000).flatten()
    ones = torch.stack([(numbers >> place) & 1 for place in range(64)]).double().mean(dim=1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(numbers.numel())


def test_integers_cover_their_range_evenly():
    drawn = keyed_random.integers(keyed_random.keys(0, range(10)), "i", 7, 7000)
    counts = drawn.flatten().bincount()
    assert len(counts) == 7
    assert (counts - 10_000).abs().max() < 5 * math.sqrt(10_000)


def test_permutations_are_permutations_and_uniform():
    orders = keyed_random.permutations(keyed_random.keys(0, range(6000)), "p", 3)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(3).expand(6000, 3))
    counts = (orders @ torch.tensor([9, 3, 1])).unique(return_counts=True)[1]
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 5 * math.sqrt(1000)


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (1 << 63, ValueError), (0.5, TypeError), (True, TypeError)]
)
def test_bad_seeds_are_refused(seed: object, error: type[Exception]):
    with pytest.raises(error, match=f"seed={seed}"):
        keyed_random.keys(seed, [0])  # type: ignore[arg-type]


@pytest.mark.parametrize("trials", [[0.5], [True], [0, "1"], torch.tensor([0.5]), torch.tensor(3)])
def test_trials_that_are_no_numbers_are_refused(trials: object):
    with pytest.raises(TypeError, match=r"keys: trial"):
        keyed_random.keys(0, trials)  # type: ignore[arg-type]
    assert torch.equal(keyed_random.keys(0, torch.tensor([2, 5])), keyed_random.keys(0, [2, 5]))


def test_no_range_to_draw_from():
    with pytest.raises(ValueError, match="high=0"):
        keyed_random.integers(keyed_random.keys(0, [0]), "i", 0, 3)


@pytest.mark.gpu
def test_devices_agree():
    keys = keyed_random.keys(3, range(10))
    assert torch.equal(
        keyed_random.permutations(keys.cuda(), "p", 100).cpu(), keyed_random.permutations(keys, "p", 100)
    )
    torch.testing.assert_close(keyed_random.normal(keys.cuda(), "n", 100).cpu(), keyed_random.normal(keys, "n", 100))


def test_coarse_numbers_are_uniform_and_go_by_trial():
    drawn = keyed_random.coarse_uniform(keyed_random.keys(0, range(50)), "noise", 1000)
    assert drawn.dtype == torch.float32
    assert 0 < float(drawn.min()) < 1e-4
    assert 1 - 1e-4 < float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=5 * 0.2887 / 50_000**0.5)
    assert float(drawn.var()) == pytest.approx(1 / 12, rel=0.02)
    thirds = drawn[:, :999].reshape(-1, 3)
    assert torch.corrcoef(thirds.T).triu(1).abs().max() < 0.03
    assert torch.equal(keyed_random.coarse_uniform(keyed_random.keys(0, [7]), "noise", 1000)[0], drawn[7])
    assert torch.equal(
        keyed_random.coarse_uniform(keyed_random.keys(0, [7]), "noise", 10, 100)[0], drawn[7].view(10, 100)
    )


def test_the_largest_seed_is_accepted():
    assert keyed_random.keys((1 << 63) - 1, [0]).shape == (1,)
