"""Patterns: δ_d, δ_r, the balls and l* are what was asked for, in every patch that is drawn."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from moesaic import keyed_random
from moesaic.data import Split
from moesaic.papers.chowdhury2023.data.synthetic_patterns import PatternPatches
from moesaic.papers.engine.trial_datasets import PatchSource, TrialData

SPLITS: tuple[Split, ...] = ("train", "test")
ROUNDING = 1e-6  # of float32

KINDS = (
    PatternPatches(patches=5, dim=16),
    PatternPatches(patches=6, dim=20, delta_d=-0.7, delta_r=0.9, close=2),
    PatternPatches(patches=6, dim=20, delta_d=0.95, delta_r=0.1, close=5, pattern_sets=4, seed=3),
    PatternPatches(patches=4, dim=12, classes=4, delta_d=-0.3, delta_r=0.8, pattern_sets=8, close=1),
    PatternPatches(patches=4, dim=7, classes=3, delta_d=0.5, delta_r=0.5, pattern_sets=4, close=2, diameter=0.1),
    PatternPatches(patches=3, dim=3, delta_d=0.0, delta_r=0.0, pattern_sets=1, diameter=0.0),
    PatternPatches(patches=3, dim=5, delta_d=-0.9, delta_r=0.3, pattern_sets=3, diameter=0.6),
)
kinds = pytest.mark.parametrize("source", KINDS, ids=str)


def drawn(source: PatternPatches, trials: int = 3, each: int = 10, split: Split = "train", seed: int = 0) -> TrialData:
    return source.draw(keyed_random.keys(seed, range(trials)), each * source.classes, split)


def irrelevant(source: PatternPatches, data: TrialData) -> Tensor:
    """(T, B, N − 1, D) float64."""
    around = torch.arange(source.patches) != data.discriminative[..., None]
    return data.patches[around].view(*data.labels.shape, source.patches - 1, -1).double()


def leaning(source: PatternPatches, patches: Tensor) -> Tensor:
    """Which patches are δ'-closer to one class pattern than to another."""
    products = patches @ source.class_patterns.double().T
    return products.amax(-1) - products.amin(-1) > (1 - source.delta_d) / 2


def check(source: PatternPatches, data: TrialData) -> None:
    others, class_patterns = irrelevant(source, data), source.class_patterns.double()
    assert (data.pool.double().norm(dim=1) - 1).abs().max() < ROUNDING
    inner = class_patterns @ class_patterns.T
    assert (inner - inner.diag().diag() - source.delta_d * (1 - torch.eye(source.classes))).abs().max() < ROUNDING
    slack = 0 if source.delta_r > source.ball_diameter / 2 + 2 * ROUNDING else ROUNDING
    assert (others @ class_patterns.T).abs().max() <= source.delta_r + slack
    distance = torch.cdist(others.flatten(0, 2), source.centres.double())
    assert distance.amin(1).max() <= source.ball_diameter / 2 + ROUNDING
    assert (leaning(source, others).sum(2) == source.close).all()


def test_it_is_a_source_of_patches():
    source: PatchSource = PatternPatches(patches=9, dim=21, classes=3)
    assert (source.classes, source.patches, source.dim) == (3, 9, 21)


@kinds
@pytest.mark.parametrize("split", SPLITS)
def test_every_patch_keeps_the_promises(source: PatternPatches, split: Split):
    check(source, drawn(source, split=split))


@st.composite
def possible(draw: st.DrawFn) -> PatternPatches:
    """Distributions that exist, built from the inequalities that `PatternPatches` checks."""
    patches, classes = draw(st.integers(2, 6)), draw(st.integers(2, 4))
    close = draw(st.integers(0, patches - 1))
    if close == 0:
        sets = draw(st.integers(1, 7))
    elif close == patches - 1:
        sets = classes * draw(st.integers(1, 2))
    else:
        sets = draw(st.integers(classes + 1, 7))
    dim = classes + sets + draw(st.integers(0, 2))
    least, share = -1 / (classes - 1), 1 - 1 / classes
    delta_d = least + draw(st.floats(0.001, 0.999)) * (1 - least)
    apart = 1 - delta_d
    needed = (share * apart / 2 + 1e-4) if close else 0.0
    delta_r = needed + draw(st.floats(0, 1)) * (0.999 - needed)
    radii = [delta_r, 0.3]  # centres lie 0.6 apart or more
    if close < patches - 1:
        radii.append(math.sqrt(apart / 8))
    if close:
        sway = math.sqrt(2 * apart)
        radii.append((delta_r / share - apart / 2 - 1e-5) / (1 / share + sway))
        radii.append((0.9 * math.sqrt(apart / share) - apart / 2 - 1e-5) / sway)
    widest = 2 * min(radii) * (1 - 1e-9)
    usual = math.sqrt((1 - delta_r**2) / (dim * sets**2))
    diameter = None if usual < widest and draw(st.booleans()) else draw(st.floats(0, 1)) * widest
    seed = draw(st.integers(0, 99))
    return PatternPatches(patches, dim, delta_d, delta_r, sets, classes, close, diameter, seed)


@given(source=possible())
def test_every_possible_distribution_keeps_the_promises(source: PatternPatches):
    check(source, drawn(source, trials=2, each=3))


@given(
    patches=st.integers(2, 6),
    classes=st.integers(2, 4),
    sets=st.integers(1, 7),
    apart=st.floats(0.001, 0.999),
    delta_r=st.floats(0, 0.999),
    close=st.integers(0, 5),
    wide=st.none() | st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_whatever_is_not_refused_keeps_the_promises(
    patches: int, classes: int, sets: int, apart: float, delta_r: float, close: int, wide: float | None, seed: int
):
    least = -1 / (classes - 1)
    try:
        source = PatternPatches(
            patches=patches,
            dim=classes + sets + seed % 3,
            delta_d=least + apart * (1 - least),
            delta_r=delta_r,
            pattern_sets=sets,
            classes=classes,
            close=close,
            diameter=None if wide is None else 2 * wide * delta_r,
            seed=seed,
        )
    except ValueError:
        return
    check(source, drawn(source, trials=2, each=3))


@kinds
def test_the_class_pattern_lies_on_its_place_and_nowhere_else(source: PatternPatches):
    data = drawn(source)
    there = data.patches.gather(2, data.discriminative[..., None, None].expand(-1, -1, 1, source.dim))[:, :, 0]
    assert torch.equal(there, source.class_patterns[data.labels])
    assert ((data.index < source.classes).sum(2) == 1).all()
    assert data.pool.dtype == torch.float32
    assert len(data.pool) == source.classes + data.index.numel() - data.labels.numel()


@kinds
def test_no_patch_is_drawn_twice(source: PatternPatches):
    data = drawn(source)
    assert data.index[data.index >= source.classes].unique().numel() == len(data.pool) - source.classes
    if source.ball_diameter:
        assert len(data.pool.unique(dim=0)) == len(data.pool)


@kinds
def test_the_sets_are_disjoint_and_all_of_them_are_used(source: PatternPatches):
    if source.pattern_sets > 1:
        assert torch.pdist(source.centres).min() > source.ball_diameter
    distance = torch.cdist(irrelevant(source, drawn(source, each=40)).flatten(0, 2), source.centres.double())
    assert (distance.argmin(1).bincount(minlength=source.pattern_sets) > 0).all()


def test_balls_are_filled_up_to_their_diameter():
    source = PatternPatches(patches=2, dim=3, delta_r=0.5, pattern_sets=1, diameter=0.4)
    points = irrelevant(source, drawn(source, trials=1, each=500)).flatten(0, 2)
    radii = torch.cdist(points, source.centres.double())[:, 0]
    assert torch.pdist(points).max() > 0.38
    assert torch.pdist(points).max() <= 0.4 + ROUNDING
    assert abs((radii < 0.2 * math.sqrt(0.5)).double().mean() - 0.5) < 0.06  # a cap's points, evenly dense


def test_the_default_diameter_is_the_papers():
    source = PatternPatches(dim=50, delta_r=0.6, pattern_sets=4)
    assert source.ball_diameter == pytest.approx(math.sqrt((1 - 0.36) / (50 * 16)))
    assert PatternPatches(diameter=0.01).ball_diameter == 0.01


@pytest.mark.parametrize(("close", "pattern_sets"), [(1, 3), (1, 8), (3, 8), (7, 8), (6, 5)])
def test_sets_lean_to_all_classes_alike(close: int, pattern_sets: int):
    source = PatternPatches(patches=8, pattern_sets=pattern_sets, close=close)
    counts = [(source.leans == lean).sum() for lean in (-1, 0, 1)]
    assert counts[1] == counts[2] > 0
    assert (counts[0] > 0) == (close < 7)
    products = source.centres @ source.class_patterns.T
    assert torch.equal(products.argmax(1)[source.leans >= 0], source.leans[source.leans >= 0])


def test_leaning_patches_lie_anywhere_and_lean_to_either_class_whatever_the_label():
    source = PatternPatches(patches=5, dim=16, close=1, delta_r=0.8)
    data = drawn(source, trials=4, each=500)
    others, difference = irrelevant(source, data), source.class_patterns[1] - source.class_patterns[0]
    for label in (0, 1):
        mine = others[data.labels == label]
        lean = leaning(source, mine)
        assert (lean.double().mean(0) - 1 / 4).abs().max() < 0.05  # the deviation is 0.01
        assert abs((mine[lean] @ difference.double() > 0).double().mean() - 1 / 2) < 0.06


def test_patterns_that_lean_do_so_more_than_the_class_pattern_where_delta_r_allows():
    """So that l* is sharp: a router along o_1 − o_2 that takes fewer patches misses o_1."""
    source = PatternPatches(delta_d=0.3, delta_r=0.6, close=3)
    lean = (source.centres @ (source.class_patterns[1] - source.class_patterns[0])).abs()[source.leans >= 0]
    assert (lean > 1 - source.delta_d).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_every_trial_has_as_many_samples_of_each_class_in_an_order_of_its_own(classes: int):
    labels = drawn(PatternPatches(patches=2, dim=16, classes=classes), trials=10).labels
    assert all((labels == label).sum(1).eq(10).all() for label in range(classes))
    assert len(labels.unique(dim=0)) == 10


def test_the_class_pattern_may_lie_anywhere():
    data = drawn(PatternPatches(patches=8, dim=10), trials=10, each=200)
    for label in (0, 1):
        places = data.discriminative[data.labels == label].bincount(minlength=8)
        assert places.min() > 190  # 250 are expected on each of the 8 places, with a deviation of 15
        assert places.max() < 310


@pytest.mark.parametrize("company", [[3], [2, 3, 4], list(range(40)), [9, 3]])
@kinds
def test_a_trial_gets_the_same_samples_in_any_company(source: PatternPatches, company: list[int], monkeypatch: Any):
    monkeypatch.setattr(
        "moesaic.papers.engine.trial_datasets._BLOCK", 2_000
    )  # several blocks of trials, of several sizes
    samples, me = 4 * source.classes, company.index(3)
    alone = source.draw(keyed_random.keys(7, [3]), samples, "train")
    together = source.draw(keyed_random.keys(7, company), samples, "train")
    assert torch.equal(alone.patches[0], together.patches[me])
    assert torch.equal(alone.labels[0], together.labels[me])
    assert torch.equal(alone.discriminative[0], together.discriminative[me])


def test_trials_seeds_and_splits_draw_different_samples_from_one_distribution():
    source = PatternPatches(patches=4, dim=12, seed=5)
    several = [drawn(source, split=split, seed=seed) for seed in (0, 1) for split in SPLITS]
    fresh = torch.cat([data.pool[2:] for data in several])
    assert len(fresh.unique(dim=0)) == len(fresh)
    for field in ("labels", "discriminative"):
        assert len(torch.cat([getattr(data, field) for data in several]).unique(dim=0)) == 12
    assert all(torch.equal(data.pool[:2], several[0].pool[:2]) for data in several)


def test_a_seed_gives_the_same_distribution_again_and_another_seed_another():
    one, again, other = (PatternPatches(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.class_patterns, again.class_patterns)
    assert torch.equal(one.centres, again.centres)
    assert not torch.allclose(one.class_patterns, other.class_patterns, atol=0.1)
    assert not torch.allclose(one.centres, other.centres, atol=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patches": 1}, r"patches=1 leaves no room .*; use 2 or more"),
        ({"classes": 1}, r"classes=1; there must be two at least"),
        ({"pattern_sets": 0}, r"pattern_sets=0; it must be at least 1"),
        ({"dim": 9}, r"dim=9, but dim ≥ classes \+ pattern_sets = 2 \+ 8: .*"),
        ({"delta_d": 1.0}, r"delta_d=1.0, but −1 < delta_d < 1: no 2 different unit vectors .*"),
        ({"delta_d": -1}, r"delta_d=-1, but −1 < delta_d < 1: .*"),
        ({"delta_d": math.nan}, r"delta_d=nan, but −1 < delta_d < 1: .*"),
        ({"delta_d": -0.5, "classes": 3}, r"delta_d=-0.5, but −1/\(classes − 1\) = −1/2 < delta_d < 1: .*"),
        ({"delta_r": 1}, r"delta_r=1, but 0 ≤ delta_r < 1: .*"),
        ({"delta_r": -0.1}, r"delta_r=-0.1, but 0 ≤ delta_r < 1: .*"),
        ({"close": -1}, r"close=-1, but 0 ≤ close ≤ patches − 1 = 15: .*"),
        ({"close": 16}, r"close=16, but 0 ≤ close ≤ patches − 1 = 15: .*"),
        ({"close": 15, "pattern_sets": 7}, r".*pattern_sets=7 is not divisible by classes=2, .*"),
        ({"close": 1, "pattern_sets": 2}, r"pattern_sets=2, but pattern_sets > classes = 2 for close=1: .*"),
        ({"diameter": -1.0}, r"diameter=-1.0; it must be 0 or more"),
        ({"diameter": math.inf}, r"diameter=inf; it must be 0 or more"),
        ({"diameter": 0.5, "delta_r": 0.2}, r".*diameter=0.5 .*diameter/2 ≤ delta_r fails.*use diameter=0.4 or less.*"),
        ({"delta_r": 0}, r".*, the default √.*, .*diameter/2 ≤ delta_r fails.*; use diameter=0, or a larger delta_r"),
        ({"diameter": 0.5, "delta_d": 0.9}, r".*lean to no class: √.* ≤ \(1 − delta_d\)/2 fails, .*diameter=0.2236 .*"),
        ({"close": 3, "delta_r": 0.2}, r"close=3 .*: 2·\(delta_r − diameter/2\) > \(1 − delta_d\)/2 \+ .* fails, .*"),
        ({"close": 3, "delta_r": 0.2, "classes": 3}, r"close=3 .* 3/2·\(delta_r − diameter/2\) > .* fails, .*"),
        ({"diameter": 0.63, "delta_r": 0.96, "close": 15}, r"balls of diameter=0.63 overlap: diameter < 0.6164, .*"),
    ],
)
def test_impossible_distributions_are_refused_with_the_inequality_that_fails(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"^PatternPatches: {message}$"):
        PatternPatches(**wrong)


def test_the_limits_that_errors_name_are_the_limits():
    PatternPatches(delta_r=0.2, diameter=0.4)
    PatternPatches(delta_r=0, diameter=0)
    PatternPatches(diameter=0.2236, delta_d=0.9)
    PatternPatches(classes=3, delta_d=-0.499)
    PatternPatches(dim=10)
    # δ' = 0.5 and a ball of no size: patterns lean where 2 δ_r > 0.5
    PatternPatches(close=3, delta_r=0.251, diameter=0)
    with pytest.raises(ValueError, match="close=3 needs"):
        PatternPatches(close=3, delta_r=0.25, diameter=0)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"samples": 7}, ValueError, r"samples=7 is not divisible by classes=2, so .* balanced; use 6 or 8"),
        ({"samples": 2.0}, TypeError, r"samples=2.0 is a float; it must be a whole number"),
        ({"split": "valid"}, ValueError, r"split='valid' is unknown; use 'train' or 'test'"),
        ({"keys": torch.tensor(3)}, ValueError, r"keys have the shape \(\) and are torch.int64; .*"),
    ],
)
def test_impossible_draws_are_refused(wrong: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"keys": keyed_random.keys(0, [0]), "samples": 4, "split": "train", **wrong}
    with pytest.raises(error, match=rf"^PatternPatches: {message}$"):
        PatternPatches().draw(**arguments)


@pytest.mark.gpu
def test_a_draw_on_the_gpu_is_that_on_the_cpu():
    source = PatternPatches(close=2)
    here, there = (source.draw(keyed_random.keys(0, range(9), device), 50, "train") for device in ("cpu", "cuda"))
    assert there.pool.device.type == "cuda"
    assert torch.allclose(here.pool, there.pool.cpu(), atol=1e-6)
    for field in ("index", "labels", "discriminative"):
        assert torch.equal(getattr(here, field), getattr(there, field).cpu())
