"""Ranks of the discriminative patch, and the shares that follow from them."""

import pytest
import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.theory.proper_routing import discriminative_ranks, proper_routing, routed_share


def drawn(T: int = 3, B: int = 40, N: int = 6, E: int = 4, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (T, B, N, E), generator=generator).float()  # many ties
    labels = torch.randint(0, classes, (T, B), generator=generator)
    places = torch.randint(0, N, (T, B), generator=generator)
    return scores, labels, places


def test_a_patch_is_in_the_stable_top_l_if_its_rank_is_below_l():
    scores, _, places = drawn()
    ranks = discriminative_ranks(scores, places)
    order = scores.argsort(dim=-2, descending=True, stable=True)
    for top in range(1, scores.shape[-2] + 1):
        chosen = (order[..., :top, :] == places[..., None, None]).any(-2)
        assert torch.equal(chosen, ranks < top)


def test_a_nan_score_ranks_last():
    scores = torch.tensor([[[torch.nan], [1.0], [2.0]]])
    assert discriminative_ranks(scores, torch.tensor([0])).item() == 2


def test_routed_share_is_the_share_of_a_class_within_the_top_of_its_own_router():
    scores, labels, places = drawn()
    shares = routed_share(scores, labels, places)
    assert shares.shape == (3, 4, 6)
    ranks = discriminative_ranks(scores, places)
    for t in range(3):
        for s in range(4):
            for top in range(1, 7):
                mine = ranks[t, labels[t] == s, s]
                assert shares[t, s, top - 1].item() == pytest.approx((mine < top).float().mean().item())


def test_the_best_expert_of_a_class_is_the_one_with_rank_0_most_often():
    scores, labels, places = drawn(E=7)
    found = proper_routing(scores, labels, places)
    ranks = discriminative_ranks(scores, places)
    for t in range(3):
        for s in range(4):
            mine = ranks[t, labels[t] == s]
            first = (mine == 0).float().mean(0)
            best = int(first.argmax())
            assert found.expert[t, s].item() == best
            assert found.largest_gate[t, s].item() == pytest.approx(first[best].item())
            torch.testing.assert_close(found.by_expert[t, s], first)
            for top in range(1, 7):
                assert found.within[t, s, top - 1].item() == pytest.approx((mine[:, best] < top).float().mean().item())


def test_trials_are_as_if_alone_and_may_share_labels():
    scores, labels, places = drawn()
    together = proper_routing(scores, labels[0], places[0])
    alone = proper_routing(scores[2], labels[0], places[0])
    assert torch.equal(together.expert[2], alone.expert)
    torch.testing.assert_close(together.within[2], alone.within)


def test_a_class_without_samples_has_no_share():
    scores, _, places = drawn(T=1)
    found = proper_routing(scores, torch.zeros(1, 40).long(), places, classes=2)
    assert found.largest_gate[0, 1].isnan()
    assert not found.largest_gate[0, 0].isnan()
    assert routed_share(scores, torch.zeros(1, 40).long(), places)[0, 1].isnan().all()


def test_bad_input_is_refused():
    scores, labels, places = drawn()
    with pytest.raises(ValueError, match="patches 0 to 5"):
        discriminative_ranks(scores, places + 1)
    with pytest.raises(ValueError, match=r"give \(3, 40\)"):
        discriminative_ranks(scores, places[:, :5])
    with pytest.raises(ValueError, match="4 classes"):
        routed_share(scores, labels + 1, places)
    with pytest.raises(TypeError, match=r"labels\.long\(\)"):
        routed_share(scores, labels.float(), places)
    with pytest.raises(ValueError, match="samples, patches, experts"):
        discriminative_ranks(scores[0, 0], places[0, 0])
