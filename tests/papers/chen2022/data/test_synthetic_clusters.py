"""Clusters: every sample is put together as Definition 3.1 says, and drawn with its probabilities."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from moesaic import keyed_random
from moesaic.data import Split
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches, ClusterSetting

SETTINGS: tuple[ClusterSetting, ...] = (1, 2, 3, 4, 7, "figure 1")
TENSORS = ("patches", "labels", "clusters", "noise_clusters", "signs", "strengths", "places")


def drawn(source: ClusterPatches, trials: int = 2, samples: int = 50, split: Split = "train") -> ClusterData:
    return source.draw(keyed_random.keys(0, range(trials)), samples, split)


def at(data: ClusterData, place: Tensor) -> Tensor:
    """(T, B, …, D): the patches on these places."""
    return data.patches.gather(2, place.flatten(2)[..., None].expand(-1, -1, -1, data.patches.shape[-1]))


def check(source: ClusterPatches, data: ClusterData) -> None:
    """The three signals are what was drawn for them, and nothing else is on their places."""
    y = 2 * data.labels - 1
    v, c = source.features, source.centres
    signals = [y[..., None] * v[data.clusters], c[data.clusters], data.signs[..., None] * v[data.noise_clusters]]
    torch.testing.assert_close(at(data, data.places), torch.stack(signals, 2) * data.strengths[..., None])
    assert (data.clusters != data.noise_clusters).all()
    for which in (data.clusters, data.noise_clusters):
        assert which.min() >= 0
        assert which.max() < source.clusters
    assert (data.places.sort().values.diff() > 0).all()
    for i, (low, high) in enumerate((source.alpha, source.beta, source.gamma)):
        slack = 1e-6 * high
        assert ((data.strengths[..., i] >= low - slack) & (data.strengths[..., i] <= high + slack)).all()


def same(one: ClusterData, other: ClusterData) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def part(data: ClusterData, trials: slice) -> ClusterData:
    return ClusterData(**{name: getattr(data, name)[trials] for name in TENSORS})


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_sample_of_every_setting_is_put_together_as_defined(which: ClusterSetting, split: Split):
    source = ClusterPatches.setting(which)
    data = drawn(source, split=split)
    assert data.patches.shape == (2, 50, 4, 50)
    assert data.patches.dtype == torch.float32
    assert len(data) == 2
    check(source, data)


@given(
    clusters=st.integers(2, 5),
    patches=st.integers(3, 7),
    spare=st.integers(0, 3),
    low=st.floats(0.01, 5),
    length=st.floats(0, 5),
    sigma_p=st.floats(0, 3),
    seed=st.integers(0, 99),
)
def test_whatever_the_knobs_samples_are_put_together_as_defined(
    clusters: int, patches: int, spare: int, low: float, length: float, sigma_p: float, seed: int
):
    interval = (low, low + length)
    source = ClusterPatches(
        clusters=clusters,
        patches=patches,
        dim=2 * clusters + spare,
        alpha=interval,
        gamma=interval,
        sigma_p=sigma_p,
        seed=seed,
    )
    check(source, drawn(source, samples=7))


def test_the_settings_are_those_of_the_paper():
    found = {which: ClusterPatches.setting(which) for which in SETTINGS}
    assert all((s.clusters, s.patches, s.dim, s.beta) == (4, 4, 50, (1, 2)) for s in found.values())
    assert {which: (s.alpha, s.gamma, s.sigma_p) for which, s in found.items()} == {
        1: ((0.5, 2), (0.5, 3), 1),
        2: ((0.5, 2), (0.5, 3), 2),
        3: ((0.5, 2), (0.5, 2), 1),
        4: ((0.5, 2), (0.5, 2), 2),
        7: ((1, 2), (1, 2), 1),
        "figure 1": ((0.5, 2), (1, 2), 1),
    }


@pytest.mark.parametrize("source", [ClusterPatches(), ClusterPatches(clusters=7, dim=14, seed=5)], ids=str)
def test_features_and_centres_are_orthonormal(source: ClusterPatches):
    basis = torch.cat([source.features, source.centres]).double()
    assert (basis @ basis.T - torch.eye(2 * source.clusters)).abs().max() < 1e-6


def test_a_seed_is_a_distribution():
    first, again, other = (ClusterPatches(seed=seed).features for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)


@pytest.fixture(scope="module")
def many() -> ClusterData:
    return drawn(ClusterPatches.setting(1), trials=4, samples=10_000)


def share(found: Tensor, expected: float) -> None:
    """As often as expected, up to five standard deviations of 40 000 draws."""
    assert found.float().mean().item() == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 40_000) ** 0.5)


def test_all_pairs_of_clusters_and_all_signs_are_equally_frequent_and_independent(many: ClusterData):
    for k in range(4):
        for other in range(4):
            pair = (many.clusters == k) & (many.noise_clusters == other)
            share(pair, 0 if k == other else 1 / 12)
            for label, sign in ((0, -1), (0, 1), (1, -1), (1, 1)):
                share(pair & (many.labels == label) & (many.signs == sign), 0 if k == other else 1 / 48)


def test_labels_and_clusters_are_drawn_not_dealt_out(many: ClusterData):
    assert many.labels.sum(1).diff().any()
    assert (many.clusters == 0).sum(1).diff().any()


def test_signals_lie_on_all_places_alike(many: ClusterData):
    for one in range(4):
        for two in range(4):
            share((many.places[..., 0] == one) & (many.places[..., 2] == two), 0 if one == two else 1 / 12)


def test_strengths_are_uniform_on_their_intervals_and_independent(many: ClusterData):
    source = ClusterPatches.setting(1)
    intervals = torch.tensor([source.alpha, source.beta, source.gamma])
    unit = ((many.strengths - intervals[:, 0]) / (intervals[:, 1] - intervals[:, 0])).flatten(0, 1)
    grid = torch.linspace(0.1, 0.9, 9)
    for i in range(3):
        for value in grid:
            share(unit[:, i] <= value, value.item())
    together = torch.cat([unit, many.labels.view(-1, 1), many.clusters.view(-1, 1)], 1)
    assert (torch.corrcoef(together.T) - torch.eye(5)).abs().max() < 5 / 200


def test_noise_has_the_variance_asked_for_and_no_direction():
    source = ClusterPatches(patches=5, dim=10, sigma_p=2.0)
    data = drawn(source, trials=4, samples=5_000)
    taken = (torch.arange(5) == data.places[..., None]).any(-2)
    noise = data.patches[~taken].double()
    assert noise.shape == (4 * 5_000 * 2, 10)
    assert (noise.mean(0).abs() < 5 * (0.4 / len(noise)) ** 0.5).all()
    assert (noise.T.cov() - 0.4 * torch.eye(10)).abs().max() < 5 * 0.4 * (2 / len(noise)) ** 0.5
    kurtosis = (noise**4).mean() / (noise**2).mean() ** 2
    assert kurtosis.item() == pytest.approx(3, abs=0.06)
    first, second = noise.view(-1, 2, 10).unbind(1)
    assert ((first * second).mean(0).abs() < 5 * 0.4 / len(first) ** 0.5).all()


def test_without_noise_the_other_patches_are_blank():
    data = drawn(ClusterPatches(patches=6, sigma_p=0.0))
    assert ((data.patches.norm(dim=-1) > 0).sum(-1) == 3).all()


def test_three_patches_leave_no_noise():
    data = drawn(ClusterPatches(patches=3))
    assert (data.patches.norm(dim=-1) >= 0.499).all()


def test_a_trial_gets_the_same_alone_among_others_and_again():
    source = ClusterPatches.setting(2)
    together = drawn(source, trials=5)
    assert same(together, drawn(source, trials=5))
    alone = source.draw(keyed_random.keys(0, [3]), 50, "train")
    assert same(alone, part(together, slice(3, 4)))


def test_blocks_bound_the_memory_and_not_what_is_drawn(monkeypatch: pytest.MonkeyPatch):
    source = ClusterPatches(dim=8)
    whole = drawn(source, trials=5)
    monkeypatch.setattr("moesaic.papers.engine.trial_datasets._BLOCK", 2 * 50 * 4 * 8)  # two trials at a time, then one
    assert same(whole, drawn(source, trials=5))


@pytest.mark.parametrize("name", TENSORS)
def test_trials_and_splits_are_different_in_everything(name: str):
    source = ClusterPatches.setting(1)
    train, test = getattr(drawn(source), name), getattr(drawn(source, split="test"), name)
    assert not torch.equal(train[0], train[1])
    assert not torch.equal(train[0], test[0])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"clusters": 1}, "clusters=1, but clusters ≥ 2"),
        ({"patches": 2}, "patches=2, but patches ≥ 3"),
        ({"dim": 7}, r"dim=7, but dim ≥ 2·clusters = 8"),
        ({"alpha": (0.0, 1.0)}, r"alpha=\(0.0, 1.0\), but 0 < low"),
        ({"beta": (2.0, 1.0)}, r"beta=\(2.0, 1.0\), but low ≤ high < ∞"),
        ({"gamma": (1.0, float("inf"))}, r"gamma=\(1.0, inf\), but low ≤ high < ∞"),
        ({"gamma": (float("nan"), 1.0)}, "but 0 < low"),
        ({"sigma_p": -1.0}, "sigma_p=-1.0, but 0 ≤ sigma_p"),
        ({"sigma_p": float("nan")}, "sigma_p=nan, but 0 ≤ sigma_p"),
    ],
)
def test_knobs_that_make_no_distribution_are_refused_with_the_inequality_that_fails(
    knobs: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        ClusterPatches(**knobs)


def test_what_is_no_interval_no_setting_and_no_draw_is_refused():
    interval: Any = 1.5
    which: Any = 5
    split: Any = "valid"
    with pytest.raises(TypeError, match=r"alpha=1.5; give its interval as a pair \(low, high\)"):
        ClusterPatches(alpha=interval)
    with pytest.raises(ValueError, match="setting=5 is unknown; use 1, 2, 3, 4, 7 or 'figure 1'"):
        ClusterPatches.setting(which)
    with pytest.raises(ValueError, match="samples=0; it must be at least 1"):
        drawn(ClusterPatches(), samples=0)
    with pytest.raises(ValueError, match="split='valid' is unknown"):
        drawn(ClusterPatches(), split=split)
