"""δ, δ'-closeness and l*, by formula and on data."""

import math

import pytest
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.papers.chowdhury2023.data.mnist_mosaics import digit_mosaics
from moesaic.papers.chowdhury2023.data.synthetic_patterns import PatternPatches
from moesaic.papers.chowdhury2023.theory.pattern_separation import measure_separation, separation


def unit(values: list[float]) -> Tensor:
    vector = torch.tensor(values, dtype=torch.float64)
    return vector / vector.norm()


O_1, O_0 = unit([1, 0, 0, 0]), unit([0.5, math.sqrt(0.75), 0, 0])  # δ_d = 0.5, δ' = 0.25
NEAR_1 = unit([0.8, -0.1, 0.2, 0.1])
NEAR_0 = unit([-0.2, 0.5, 0.4, 0.2])
FAR = unit([0, 0, 1, 0])


def known() -> tuple[Tensor, Tensor, Tensor]:
    """Four samples of four patches: (closer to o_1, closer to o_0) are (2, 1), (0, 2), (1, 0), (0, 0)."""
    patches = torch.stack(
        [
            torch.stack([O_1, NEAR_1, NEAR_1, NEAR_0]),
            torch.stack([FAR, O_1, NEAR_0, NEAR_0]),
            torch.stack([NEAR_1, FAR, FAR, O_0]),
            torch.stack([O_0, FAR, FAR, FAR]),
        ]
    )
    scale = torch.tensor([1.0, 3.0, 0.5, 10.0]).double()[:, None, None]
    return patches * scale, torch.tensor([1, 1, 0, 0]), torch.tensor([0, 1, 3, 0])


def test_delta_is_equation_9():
    assert separation(0.0, 0.0) == 1
    assert separation(-0.8, 0.3) == pytest.approx(1 / (1 - 0.64))
    assert separation(0.1, 0.3) == pytest.approx(1 / (1 - 0.09))
    assert separation([0.1, -0.5, 0.2], 0.3) == pytest.approx(1 / (1 - 0.25))


def test_constants_are_found_whatever_the_length_of_patches():
    found = measure_separation(*known())
    torch.testing.assert_close(found.patterns, torch.stack([O_0, O_1]))
    torch.testing.assert_close(found.alignment, torch.ones(2).double())
    assert found.delta_d == pytest.approx(0.5)
    inner = [abs(float(o @ q)) for o in (O_0, O_1) for q in (NEAR_1, NEAR_0, FAR)]
    assert found.delta_r == pytest.approx(max(inner))
    assert found.delta == pytest.approx(separation(0.5, max(inner)))


def test_closeness_counts_patches_on_either_side_and_on_one():
    (close,) = measure_separation(*known()).closeness
    assert close.pair == (0, 1)
    assert close.delta_prime == pytest.approx(0.25)
    assert close.share == (pytest.approx(3 / 12), pytest.approx(3 / 12))
    assert close.l_star == 4  # 2 + 1 in the first sample
    assert close.one_sided == (3, 3)
    assert close.quantiles[0.5] == (2, 1, 1)  # counts are 3, 2, 1, 0 and 1, 2, 0, 0 and 2, 0, 1, 0
    assert close.quantiles[1.0] == (4, 3, 3)
    assert measure_separation(*known()).l_star == 4


def test_a_pattern_that_points_away_counts_by_its_size():
    away = unit([-0.9, -0.1, 0.3, 0])
    patches = torch.stack([torch.stack([O_1, away]), torch.stack([O_0, FAR])])
    found = measure_separation(patches, torch.tensor([1, 0]), torch.tensor([0, 0]))
    assert found.delta_r == pytest.approx(-float(O_1 @ away))
    assert found.delta_r_quantiles[0.5] == pytest.approx(0)


def test_a_larger_threshold_finds_fewer_patches_close():
    lead = float((O_1 - O_0) @ NEAR_1)
    just_above, just_below = (lead + 1e-6) / 0.5, (lead - 1e-6) / 0.5
    assert measure_separation(*known(), closeness=just_above).closeness[0].share[1] == 0
    assert measure_separation(*known(), closeness=just_below).closeness[0].share[1] > 0


def test_the_discriminative_patch_itself_is_never_counted():
    patches = torch.stack([O_1, FAR])[None].repeat(3, 1, 1)
    other = torch.stack([FAR, O_0])[None].repeat(3, 1, 1)
    labels, places = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    found = measure_separation(torch.cat([patches, other]), labels, places)
    assert found.l_star == 1
    assert found.delta_r == pytest.approx(0)


def test_the_nearest_pattern_is_a_real_patch():
    generator = torch.Generator().manual_seed(0)
    patches = torch.rand(20, 3, 5, generator=generator)
    labels, places = torch.arange(20) % 2, torch.arange(20) % 3
    found = measure_separation(patches, labels, places, patterns="nearest")
    own = torch.nn.functional.normalize(patches[torch.arange(20), places].double(), dim=1)
    for s in (0, 1):
        mine = own[labels == s]
        mean = mine.mean(0)
        torch.testing.assert_close(found.patterns[s], mine[(mine @ mean).argmax()])
    assert not torch.allclose(found.patterns, measure_separation(patches, labels, places).patterns)


def test_of_more_classes_every_pair_is_measured_and_l_star_is_of_the_trained_pairs():
    o = torch.eye(5).double()[:4]
    near_2 = unit([0, -0.1, 1, -0.1, 1])  # closer to o_2 than to any other class
    filler = torch.eye(5).double()[4]
    patches = torch.stack([torch.stack([o[s], near_2 if s == 0 else filler, filler]) for s in range(4)])
    found = measure_separation(patches, torch.arange(4), torch.zeros(4).long())
    assert [close.pair for close in found.closeness] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    by_pair = {close.pair: close.one_sided for close in found.closeness}
    assert by_pair[0, 1] == (1, 1)
    assert by_pair[0, 2] == (1, 2)
    assert by_pair[2, 3] == (2, 1)
    assert found.l_star == 2
    assert found.delta_d == pytest.approx(0)


def test_a_pattern_among_the_irrelevant_patches_makes_delta_infinite():
    patches = torch.stack([torch.stack([O_1, O_1]), torch.stack([O_0, FAR])])
    found = measure_separation(patches, torch.tensor([1, 0]), torch.tensor([0, 0]))
    assert found.delta == pytest.approx(math.inf) or found.delta > 1e12


def test_on_digits_the_maximum_is_far_above_the_quantiles():
    mosaics = digit_mosaics(200, split="train", seed=0)
    found = measure_separation(mosaics.patches, mosaics.labels, mosaics.discriminative)
    assert 0 < found.delta_d < 0.5
    assert found.delta_r_quantiles[0.5] < found.delta_r_quantiles[0.99] < found.delta_r < 1
    assert (found.alignment > 0.5).all()
    (close,) = found.closeness
    assert close.quantiles[0.5][0] < close.l_star <= 16
    assert max(close.one_sided) <= close.l_star


def test_bad_input_is_refused():
    patches, labels, places = known()
    with pytest.raises(ValueError, match=r"samples \(B, N, D\)"):
        measure_separation(patches[0], labels, places)
    with pytest.raises(ValueError, match="labels have shape"):
        measure_separation(patches, labels[:2], places)
    with pytest.raises(ValueError, match="counted from 0"):
        measure_separation(patches, labels + 1, places)
    with pytest.raises(ValueError, match="counted from 0"):
        measure_separation(patches, 2 * labels - 1, places)
    with pytest.raises(TypeError, match=r"labels\.long\(\)"):
        measure_separation(patches, labels.double(), places)
    with pytest.raises(ValueError, match="patches 0 to 3"):
        measure_separation(patches, labels, places + 1)
    with pytest.raises(ValueError, match="δ' > 0 fails"):
        measure_separation(patches, labels, places, closeness=0)
    with pytest.raises(ValueError, match="'mean' or 'nearest'"):
        measure_separation(patches, labels, places, patterns="median")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="N ≥ 2 fails"):
        measure_separation(patches[:, :1], labels, 0 * places)
    with pytest.raises(ValueError, match="class 0 average to 0"):
        measure_separation(patches * labels[:, None, None], labels, places)


def test_the_synthetic_distribution_has_the_constants_it_was_asked_for():
    source = PatternPatches(patches=8, dim=32, delta_d=0.2, delta_r=0.6, close=2)
    data = source.draw(keyed_random.keys(0, [0]), samples=200, split="train")
    found = measure_separation(data.patches[0], data.labels[0], data.discriminative[0])
    assert found.delta_d == pytest.approx(0.2, abs=1e-6)
    assert found.delta_r <= 0.6
    assert found.l_star == source.l_star == 3
    assert max(found.closeness[0].one_sided) <= 3
