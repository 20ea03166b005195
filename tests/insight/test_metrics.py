"""The metrics say what their formulas say, on routings drawn at random and on routings written by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.insight import (
    agreement,
    coverage,
    dead_experts,
    dispatch_entropy,
    load_share,
    overlap,
    routing_entropy,
    summary,
    utilisation,
)
from moesaic.routing import TokenChoice
from moesaic.routing_record import UNASSIGNED, Chooser, Routing

CHOOSERS: tuple[Chooser, ...] = ("expert", "unit", "soft")


def units_choose(index: list[list[list[int]]], experts: int) -> Routing:
    """Unit n of image b goes to the experts ``index[b][n]``."""
    index_BNK = torch.tensor(index)
    scores_BNE = torch.zeros(*index_BNK.shape[:2], experts)
    return Routing("patch", scores_BNE, index_BNK, (index_BNK != UNASSIGNED).float(), "unit")


def experts_choose(index: list[list[list[int]]], units: int) -> Routing:
    """Expert e of image b takes the units ``index[b][e]``."""
    index_BEL = torch.tensor(index)
    B, E, _ = index_BEL.shape
    return Routing("patch", torch.zeros(B, units, E), index_BEL, (index_BEL != UNASSIGNED).float(), "expert")


def softly(scores_BNES: Tensor) -> Routing:
    gate_BNES = scores_BNES.flatten(2).softmax(2).view_as(scores_BNES)
    return Routing("patch", scores_BNES, None, gate_BNES, "soft", dispatch=scores_BNES.softmax(1))


def nothing(chooser: Chooser) -> Routing:
    """A batch of 0 with four units and three experts."""
    if chooser == "soft":
        return softly(torch.zeros(0, 4, 3, 2))
    index = torch.zeros((0, 3, 2) if chooser == "expert" else (0, 4, 2), dtype=torch.long)
    return Routing("patch", torch.zeros(0, 4, 3), index, torch.zeros(index.shape), chooser)


@st.composite
def routings(draw: st.DrawFn, choosers: tuple[Chooser, ...] = CHOOSERS) -> Routing:
    """Random choices, of which none, some or all are dropped."""
    chooser = draw(st.sampled_from(choosers))
    B, N, E = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if chooser == "soft":
        return softly(3 * torch.randn(B, N, E, draw(st.integers(1, 2)), generator=generator))
    scores_BNE = 3 * torch.randn(B, N, E, generator=generator)
    faced = scores_BNE.mT if chooser == "expert" else scores_BNE
    index = faced.topk(draw(st.integers(1, faced.shape[2]))).indices
    dropped = torch.rand(index.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    gate = torch.rand(index.shape, generator=generator).masked_fill(dropped, 0.0)
    return Routing("patch", scores_BNE, index.masked_fill(dropped, UNASSIGNED), gate, chooser)


def with_experts_in_order(routing: Routing, order: Tensor) -> Routing:
    """The same routing with the experts renamed: the new expert i is the old ``order[i]``."""
    scores = routing.scores[:, :, order]
    if routing.index is None:
        return softly(scores)
    if routing.chooser == "expert":
        return replace(routing, scores=scores, index=routing.index[:, order], gate=routing.gate[:, order])
    new_name = torch.cat([order.argsort(), torch.tensor([UNASSIGNED])])  # -1 is the last, and stays
    return replace(routing, scores=scores, index=new_name[routing.index])


def images_of(routing: Routing, rows: Tensor) -> Routing:
    return replace(
        routing,
        scores=routing.scores[rows],
        index=None if routing.index is None else routing.index[rows],
        gate=routing.gate[rows],
        dispatch=None if routing.dispatch is None else routing.dispatch[rows],
    )


def numbers(routing: Routing, clusters: Tensor) -> list[float]:
    return [
        utilisation(routing),
        routing_entropy(routing),
        routing_entropy(routing, normalised=True),
        dispatch_entropy(routing, clusters),
        coverage(routing),
    ]


# Every metric


@given(routings(), st.randoms(use_true_random=False))
def test_renaming_the_experts_renames_what_is_said_of_each_and_changes_nothing_else(routing, random):
    order = torch.tensor(random.sample(range(routing.experts), routing.experts))
    renamed = with_experts_in_order(routing, order)
    clusters = torch.arange(routing.batch) % 2
    assert numbers(renamed, clusters) == pytest.approx(numbers(routing, clusters), abs=1e-5)
    torch.testing.assert_close(load_share(renamed), load_share(routing)[order])
    torch.testing.assert_close(overlap(renamed), overlap(routing)[order][:, order])
    discriminative = torch.zeros(routing.batch, dtype=torch.long)
    torch.testing.assert_close(
        agreement(renamed, discriminative).hit_rate, agreement(routing, discriminative).hit_rate[order]
    )


@given(routings(), st.randoms(use_true_random=False))
def test_the_order_of_the_images_does_not_matter(routing, random):
    order = torch.tensor(random.sample(range(routing.batch), routing.batch))
    shuffled = images_of(routing, order)
    clusters = torch.arange(routing.batch) % 2
    assert numbers(shuffled, clusters[order]) == pytest.approx(numbers(routing, clusters), abs=1e-5)
    torch.testing.assert_close(load_share(shuffled), load_share(routing))
    torch.testing.assert_close(overlap(shuffled), overlap(routing))


@given(routings())
def test_every_number_stays_within_its_bounds(routing):
    E = routing.experts
    share_E = load_share(routing)
    worked = bool(routing.load.sum() > 0)
    assert float(share_E.sum()) == pytest.approx(float(worked))
    assert (1 / E - 1e-6 <= utilisation(routing) <= 1) if worked else utilisation(routing) == 0
    options = {"expert": routing.units, "unit": E, "soft": routing.scores[0, 0].numel()}[routing.chooser]
    assert 0 <= routing_entropy(routing) <= math.log(options)
    assert 0 <= routing_entropy(routing, normalised=True) <= 1
    assert 0 <= dispatch_entropy(routing, range(routing.batch)) <= math.log(routing.batch) + 1e-9
    assert 0 <= coverage(routing) <= 1
    overlap_EE = overlap(routing)
    assert overlap_EE.diagonal().tolist() == [1.0] * E
    assert ((overlap_EE >= 0) & (overlap_EE <= 1)).all()
    torch.testing.assert_close(overlap_EE, overlap_EE.T)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_batch_of_0_gives_zeros(chooser):
    routing = nothing(chooser)
    none = torch.zeros(0, dtype=torch.long)
    assert numbers(routing, none) == [0.0] * 5
    assert load_share(routing).tolist() == [0.0, 0.0, 0.0]
    assert dead_experts(routing) == []
    assert overlap(routing).tolist() == torch.eye(3).tolist()
    found = agreement(routing, none)
    assert (found.images, found.reached) == (0, 0.0)
    assert found.hit_rate.tolist() == found.chance.tolist() == found.precision.tolist() == [0.0, 0.0, 0.0]
    assert "0 images" in str(summary(routing))


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_metrics_leave_the_autograd_graph_alone(chooser):
    scores = torch.randn(2, 4, 3, 2 if chooser == "soft" else 1, requires_grad=True)
    routing = softly(scores)
    if chooser != "soft":
        index = torch.zeros((2, 3, 1) if chooser == "expert" else (2, 4, 1), dtype=torch.long)
        routing = Routing("patch", scores[..., 0], index, scores.mean() * torch.ones(index.shape), chooser)
    assert not load_share(routing).requires_grad
    assert not overlap(routing).requires_grad
    assert math.isfinite(sum(numbers(routing, torch.tensor([0, 1]))))


# Load


def test_load_shares_count_units_and_not_gates():
    routing = units_choose([[[0], [0], [1], [UNASSIGNED]]], experts=3)
    routing = replace(routing, gate=torch.tensor([[[0.1], [0.1], [0.9], [0.0]]]))
    torch.testing.assert_close(load_share(routing), torch.tensor([2 / 3, 1 / 3, 0.0]))


def test_soft_load_is_the_total_weight():
    scores = torch.tensor([[[[0.0], [math.log(3.0)]]]])  # one unit gives a quarter to expert 0, the rest to expert 1
    torch.testing.assert_close(load_share(softly(scores)), torch.tensor([0.25, 0.75]))


def test_experts_below_the_threshold_are_dead():
    loads = [100, 9, 1, 0]
    routing = units_choose([[[e] for e, load in enumerate(loads) for _ in range(load)]], experts=4)
    # the equal share is 27.5 of 110 units
    assert dead_experts(routing, threshold=0.01) == [3]
    assert dead_experts(routing, threshold=0.1) == [2, 3]
    assert dead_experts(routing, threshold=0.5) == [1, 2, 3]


@given(st.integers(1, 60))
def test_experts_with_equal_loads_are_never_dead(experts):
    routing = units_choose([[[e] for e in range(experts)]], experts)
    assert dead_experts(routing, threshold=1.0) == []
    assert utilisation(routing) == pytest.approx(1.0)


def test_all_experts_are_dead_when_every_unit_was_dropped():
    assert dead_experts(units_choose([[[UNASSIGNED], [UNASSIGNED]]], experts=3)) == [0, 1, 2]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.5, math.nan])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold=.* use a number above 0 and at most 1"):
        dead_experts(nothing("unit"), threshold=threshold)


@given(st.integers(1, 6), st.integers(1, 6))
def test_utilisation_is_the_share_of_experts_that_share_the_work(working, idle):
    routing = units_choose([[[e] for e in range(working)]], working + idle)
    assert utilisation(routing) == pytest.approx(working / (working + idle))


# Entropies


@pytest.mark.parametrize(
    ("routing", "highest"),
    [
        (experts_choose([[[0], [1]]], units=5), math.log(5)),
        (units_choose([[[0], [1]]], experts=3), math.log(3)),
        (softly(torch.zeros(1, 5, 3, 2)), math.log(6)),
    ],
    ids=CHOOSERS,
)
def test_equal_scores_have_the_highest_entropy(routing, highest):
    assert routing_entropy(routing) == pytest.approx(highest)
    assert routing_entropy(routing, normalised=True) == pytest.approx(1.0)


def test_certain_choices_have_no_entropy_even_where_scores_are_minus_infinity():
    scores = torch.full((1, 3, 3), -math.inf)
    scores[0, range(3), range(3)] = 0.0
    for routing in (experts_choose([[[0], [1], [2]]], units=3), units_choose([[[0], [1], [2]]], experts=3)):
        assert routing_entropy(replace(routing, scores=scores)) == 0.0


def test_entropy_is_taken_along_the_axis_of_the_choice():
    scores = torch.zeros(1, 2, 2)
    scores[0, :, 0] = 50.0  # each unit knows its expert, no expert knows its unit
    units, experts = units_choose([[[0], [0]]], experts=2), experts_choose([[[0], [0]]], units=2)
    assert routing_entropy(replace(units, scores=scores)) == pytest.approx(0.0, abs=1e-6)
    assert routing_entropy(replace(experts, scores=scores)) == pytest.approx(math.log(2))


def test_one_option_is_a_certain_choice():
    assert routing_entropy(units_choose([[[0], [0]]], experts=1), normalised=True) == 0.0


@pytest.mark.parametrize("normalised", [False, True])
def test_nan_scores_are_not_hidden(normalised):
    routing = replace(units_choose([[[0], [1]]], experts=2), scores=torch.full((1, 2, 2), math.nan))
    assert math.isnan(routing_entropy(routing, normalised=normalised))


def equation_6_1(work_BNE: np.ndarray, label_BN: np.ndarray) -> float:
    """Chen et al. 2022, eq. 6.1, sum by sum."""
    total = work_BNE.sum()
    entropy = 0.0
    for m in range(work_BNE.shape[2]):
        n_m = work_BNE[:, :, m].sum()
        if n_m == 0:
            continue
        for k in set(label_BN.flatten().tolist()):
            n_km = work_BNE[:, :, m][label_BN == k].sum()
            if n_km > 0:
                entropy -= n_m / total * (n_km / n_m) * np.log(n_km / n_m)
    return entropy


@given(routings(), st.booleans(), st.integers(0, 2**31))
def test_dispatch_entropy_is_equation_6_1(routing, labels_of_units, seed):
    shape = (routing.batch, routing.units) if labels_of_units else (routing.batch,)
    clusters = np.random.default_rng(seed).integers(-2, 2, shape) * 10**12  # labels may be any integers
    label_BN = clusters if labels_of_units else np.repeat(clusters[:, None], routing.units, 1)
    work_BNE = (routing.weights if routing.chooser == "soft" else routing.mask).double().numpy()
    assert dispatch_entropy(routing, clusters) == pytest.approx(equation_6_1(work_BNE, label_BN), abs=1e-6)


def test_dispatch_entropy_is_0_when_each_expert_has_one_cluster_and_log_k_when_all_are_mixed():
    pure = units_choose([[[0], [0]], [[1], [1]], [[2], [2]]], experts=4)
    assert dispatch_entropy(pure, [5, 5, -3]) == 0.0
    mixed = units_choose([[[0], [1]], [[0], [1]], [[0], [1]]], experts=2)
    assert dispatch_entropy(mixed, [5, 1, -3]) == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("clusters", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.long), ValueError, r"shape \(3,\); give \(2,\).* or \(2, 4\)"),
        (torch.zeros(2, 3, dtype=torch.long), ValueError, r"shape \(2, 3\); give \(2,\).* or \(2, 4\)"),
        (torch.zeros(2), TypeError, r"float32; labels are integers: use clusters.long\(\)"),
    ],
)
def test_clusters_that_do_not_fit_are_refused(clusters, error, message):
    with pytest.raises(error, match=message):
        dispatch_entropy(units_choose([[[0]] * 4] * 2, experts=2), clusters)


# Coverage and overlap


@given(routings(choosers=("expert", "unit")))
def test_coverage_counts_each_unit_once(routing):
    covered = {(b, n) for b, n, _ in routing.mask.nonzero().tolist()}
    assert coverage(routing) == pytest.approx(len(covered) / (routing.batch * routing.units))


def test_coverage_leaves_padding_out():
    scores, mask = torch.zeros(1, 4, 2), torch.tensor([[True, True, False, False]])
    assert coverage(TokenChoice(1, 2).choose(scores, mask=mask)) == 1


@given(routings(choosers=("expert", "unit")))
def test_overlap_is_the_mean_jaccard_index_of_the_sets_of_units(routing):
    sets = [[set(works_N.nonzero().flatten().tolist()) for works_N in mask_NE.T] for mask_NE in routing.mask]
    for e in range(routing.experts):
        for f in set(range(routing.experts)) - {e}:
            indices = [len(s[e] & s[f]) / len(s[e] | s[f]) for s in sets if s[e] | s[f]]
            expected = sum(indices) / len(indices) if indices else 0.0
            assert float(overlap(routing)[e, f]) == pytest.approx(expected)


def test_soft_routing_covers_everything_and_overlaps_fully():
    routing = softly(torch.randn(2, 4, 3, 1))
    assert coverage(routing) == 1.0
    assert overlap(routing).tolist() == torch.ones(3, 3).tolist()


def test_overlap_is_exact_under_autocast():
    # 515 shared units of 1029: bfloat16 would make 516 of 1028
    index = [[list(range(772)), list(range(257, 1029))]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = overlap(experts_choose(index, units=1029))
    assert float(found[0, 1]) == pytest.approx(515 / 1029)


# Agreement


def test_agreement_tells_who_found_the_discriminative_patches():
    routing = experts_choose([[[0, 1], [2, 3]], [[1, 2], [0, 3]], [[0, 1], [0, 2]]], units=4)
    found = agreement(routing, torch.tensor([0, 1, 3]))
    assert found.images == 3
    assert found.reached == pytest.approx(2 / 3)
    torch.testing.assert_close(found.hit_rate, torch.tensor([2 / 3, 0.0]))
    torch.testing.assert_close(found.precision, torch.tensor([1 / 3, 0.0]))
    torch.testing.assert_close(found.chance, torch.tensor([0.5, 0.5]))


@given(routings(), st.integers(0, 2**31))
def test_one_patch_may_be_named_or_marked(routing, seed):
    index_B = torch.randint(routing.units, (routing.batch,), generator=torch.Generator().manual_seed(seed))
    named, marked = agreement(routing, index_B), agreement(routing, torch.eye(routing.units).bool()[index_B])
    assert (named.images, named.reached) == (marked.images, marked.reached)
    torch.testing.assert_close(named.hit_rate, marked.hit_rate)
    torch.testing.assert_close(named.precision, marked.precision)


def test_images_without_a_discriminative_patch_are_left_out():
    routing = experts_choose([[[0]], [[1]], [[2]]], units=3)
    marks = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    found = agreement(routing, marks)
    assert (found.images, found.reached, found.precision.tolist()) == (2, 0.5, [0.5])


@given(st.integers(1, 7), st.data())
def test_chance_is_the_hit_rate_averaged_over_all_choices_of_that_size(units, data):
    taken, marked = data.draw(st.integers(0, units)), data.draw(st.integers(1, units))
    choices = [[n for n in range(units) if bits >> n & 1] for bits in range(2**units)]
    choices = [choice for choice in choices if len(choice) == taken]
    hits = sum(any(n < marked for n in choice) for choice in choices)
    padded = [*range(taken), *[UNASSIGNED] * (units - taken)]
    marks = (torch.arange(units) < marked)[None]
    found = agreement(experts_choose([[padded]], units), marks)
    assert float(found.chance) == pytest.approx(hits / len(choices), abs=1e-6)


@pytest.mark.parametrize(
    ("discriminative", "error", "message"),
    [
        (torch.tensor([0, 4]), ValueError, "from 0 to 4; an image has the patches 0 to 3"),
        (torch.tensor([-1, 0]), ValueError, "from -1 to 0; an image has the patches 0 to 3"),
        (torch.tensor([0, 1, 2]), ValueError, r"shape \(3,\); give integers of shape \(2,\)"),
        (torch.zeros(4, 2, dtype=torch.bool), ValueError, r"shape \(4, 2\); .* booleans of shape \(2, 4\)"),
        (torch.zeros(2, 4), TypeError, r"float32 of shape \(2, 4\); .* booleans of shape \(2, 4\)"),
        (torch.zeros(2, 4, dtype=torch.long), TypeError, "booleans"),
        (torch.zeros(2, dtype=torch.bool), TypeError, "integers"),
    ],
)
def test_discriminative_patches_that_do_not_fit_are_refused(discriminative, error, message):
    with pytest.raises(error, match=message):
        agreement(experts_choose([[[0]], [[1]]], units=4), discriminative)


# Summary


def test_the_summary_gathers_the_metrics_and_names_the_dead():
    routing = units_choose([[[0], [0], [1], [1]], [[0], [1], [0], [1]]], experts=3)
    found = summary(routing)
    assert found.load_share == (0.5, 0.5, 0.0)
    assert found.dead_experts == (2,)
    assert found.utilisation == pytest.approx(2 / 3)
    assert (found.coverage, found.overlap, found.routing_entropy) == (1.0, 0.0, pytest.approx(1.0))
    assert "2 images × 4 patches, 3 experts; patches choose" in str(found)
    assert "dead experts     2\n" in str(found)
