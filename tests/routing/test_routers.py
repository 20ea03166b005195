import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import moesaic
from moesaic.routing import Router
from moesaic.routing.router import sample_noise
from moesaic.routing_record import UNASSIGNED


@given(p=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 4), E=st.integers(1, 4))
def test_a_score_is_the_kernel_applied_at_stride_p(p, rows, columns, E):
    router = moesaic.ExpertChoice(3, E, 1, p, dtype=torch.float64)
    x = torch.randn(2, 3, rows * p, columns * p, dtype=torch.float64)
    expected = F.conv2d(x, router.weight, stride=p).flatten(2).transpose(1, 2)
    torch.testing.assert_close(router.scores(x), expected)


@pytest.mark.parametrize(("channels", "p"), [(64, 4), (400, 1)])
def test_scores_start_small_however_large_a_patch_is(channels, p):
    weight = moesaic.ExpertChoice(channels, 64, 1, p).weight
    assert weight.std().item() * (channels * p * p) ** 0.5 == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_whatever_the_map_is(dtype):
    router = moesaic.ExpertChoice(3, 2, 1).to(dtype)
    assert router(torch.randn(1, 3, 4, 4, dtype=dtype)).scores.dtype == torch.float32


class TestExpertChoice:
    scores = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]]])

    def test_softmax_selected_sums_to_one_over_the_selected_patches(self):
        routing = moesaic.ExpertChoice(1, 2, 2).choose(self.scores)
        assert routing.index.tolist() == [[[0, 1], [2, 0]]]
        torch.testing.assert_close(routing.gate[0, 0], torch.tensor([2.0, 1.0]).softmax(0))

    def test_softmax_all_is_the_softmax_over_all_patches(self):
        routing = moesaic.ExpertChoice(1, 2, 2, gate="softmax_all").choose(self.scores)
        torch.testing.assert_close(routing.gate[0, 0], torch.tensor([2.0, 1.0, 0.0]).softmax(0)[:2])

    def test_gate_one_is_one_and_gives_the_router_no_gradient(self):
        routing = moesaic.ExpertChoice(1, 2, 2, gate="one").choose(self.scores.clone().requires_grad_())
        assert (routing.gate == 1).all()
        assert not routing.gate.requires_grad

    def test_too_many_patches_per_expert_are_refused_with_the_limit(self):
        with pytest.raises(
            ValueError, match=r"patches_per_expert=5, but a 2×2 grid has only 4 patches; take at most 4"
        ):
            moesaic.ExpertChoice(3, 2, 5, patch_size=2)(torch.randn(1, 3, 4, 4))


class TestTokenChoice:
    def test_no_unit_is_dropped_without_a_capacity(self):
        routing = moesaic.TokenChoice(1, 4, 2).choose(torch.randn(3, 5, 4))
        assert int(routing.load.sum()) == 3 * 5 * 2
        assert (routing.index != UNASSIGNED).all()

    def test_softmax_all_gates_are_probabilities_over_all_experts(self):
        scores = torch.randn(3, 5, 4)
        routing = moesaic.TokenChoice(1, 4, 2).choose(scores)
        torch.testing.assert_close(routing.weights, scores.softmax(-1) * routing.mask)

    @pytest.mark.parametrize("noise", ["uniform", "gaussian", "gumbel"])
    def test_noise_changes_the_choice_in_training_only_and_never_the_gate(self, noise):
        scores = torch.zeros(4, 50, 3)
        router = moesaic.TokenChoice(1, 3, noise=noise)
        noisy, calm = router.train().choose(scores), router.eval().choose(scores)
        assert noisy.index.unique().numel() == 3
        assert (calm.index == 0).all()
        torch.testing.assert_close(noisy.gate, calm.gate)
        router.in_eval = True
        assert router.choose(scores).index.unique().numel() == 3

    @pytest.mark.parametrize("noise", ["uniform", "gaussian", "gumbel"])
    def test_noise_is_reproducible_from_its_seed(self, noise):
        scores = torch.zeros(4, 50, 3)
        chosen = [
            moesaic.TokenChoice(1, 3, noise=noise, generator=torch.Generator().manual_seed(seed)).choose(scores).index
            for seed in (1, 1, 2)
        ]
        assert torch.equal(chosen[0], chosen[1])
        assert not torch.equal(chosen[0], chosen[2])

    @pytest.mark.parametrize(
        ("noise", "mean", "std"), [("uniform", 0.5, 12**-0.5), ("gaussian", 0, 1 / 8), ("gumbel", 0.5772, 1.2825)]
    )
    def test_noise_has_the_named_distribution(self, noise, mean, std):
        drawn = sample_noise(noise, torch.zeros(100, 100, 8), torch.Generator().manual_seed(0))
        assert drawn.mean().item() == pytest.approx(mean, abs=0.01)
        assert drawn.std().item() == pytest.approx(std, rel=0.01)

    @pytest.mark.parametrize("noise", ["uniform", "gaussian", "gumbel"])
    def test_noise_is_added_to_the_scores_before_the_choice(self, noise):
        scores = torch.randn(4, 6, 5)
        seeded = torch.Generator().manual_seed(3)
        routing = moesaic.TokenChoice(1, 5, noise=noise, noise_scale=2.0, generator=seeded).choose(scores)
        noisy = scores + 2.0 * sample_noise(noise, scores, torch.Generator().manual_seed(3))
        assert routing.index.squeeze(-1).equal(noisy.argmax(-1))

    def test_noise_scale_multiplies_the_noise(self):
        scores = torch.tensor([0.0, 0.5]).expand(4, 50, 2)
        router = moesaic.TokenChoice(1, 2, noise="uniform", noise_scale=0.4)
        assert (router.choose(scores).index == 1).all()
        router.noise_scale = 5.0
        assert router.choose(scores).index.unique().numel() == 2

    @given(B=st.integers(0, 3), N=st.integers(1, 6), E=st.integers(1, 4), factor=st.sampled_from([0.3, 1.0, 2.0]))
    def test_no_expert_exceeds_its_capacity_and_units_are_dropped_at_full_experts_only(self, B, N, E, factor):
        K = min(2, E)
        router = moesaic.TokenChoice(1, E, K, capacity_factor=factor)
        scores = torch.randn(B, N, E)
        routing, dropless = router.choose(scores), moesaic.TokenChoice(1, E, K).choose(scores)
        capacity = router.capacity(B * N)
        assert torch.equal(routing.load, dropless.load.clamp_max(capacity))
        assert (routing.gate[routing.index == UNASSIGNED] == 0).all()

    def test_units_with_higher_probability_have_priority(self):
        scores = torch.tensor([[[1.0, 0.0], [4.0, 0.0]], [[3.0, 0.0], [2.0, 0.0]]])
        routing = moesaic.TokenChoice(1, 2, capacity_factor=1.0).choose(scores)
        assert routing.index.flatten().tolist() == [UNASSIGNED, 0, 0, UNASSIGNED]

    def test_first_choices_have_priority_over_second_choices(self):
        scores = torch.tensor([[[9.0, 8.0], [0.0, 0.1]]])
        routing = moesaic.TokenChoice(1, 2, 2, capacity_factor=0.5).choose(scores)
        assert routing.index[0].tolist() == [[0, UNASSIGNED], [1, UNASSIGNED]]

    def test_priority_depends_on_the_first_choice_only(self):
        # unit 1 is surer of its first choice, unit 0 of both together
        scores = torch.tensor([[[2.0, 1.9, 0.0, 0.0], [2.2, 0.1, 0.1, 0.1]]])
        routing = moesaic.TokenChoice(1, 4, 2, capacity_factor=0.9).choose(scores)
        gate = scores.softmax(-1).topk(2).values[0]
        assert gate[1, 0] > gate[0, 0]
        assert gate[0].sum() > gate[1].sum()
        assert routing.index[0, :, 0].tolist() == [UNASSIGNED, 0]

    @pytest.mark.parametrize("gate", ["one", "softmax_selected"])
    def test_priority_does_not_depend_on_the_kind_of_gate(self, gate):
        scores = torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[8.0, 0.0], [9.0, 0.0]]])
        routing = moesaic.TokenChoice(1, 2, gate=gate, capacity_factor=1.0).choose(scores)
        assert routing.index.flatten().tolist() == [UNASSIGNED, UNASSIGNED, 0, 0]

    def test_capacity_is_robust_to_floating_point_error(self):
        assert moesaic.TokenChoice(1, 10, capacity_factor=1.1).capacity(100) == 11

    def test_capacity_drops_no_unit_in_eval_by_default(self):
        router = moesaic.TokenChoice(1, 2, capacity_factor=0.5).eval()
        scores = torch.tensor([[[1.0, 0.0]] * 4])
        assert router.choose(scores).load.tolist() == [4, 0]
        router.in_eval = True
        assert router.choose(scores).load.tolist() == [1, 0]

    def test_invalid_top_k_and_capacity_are_refused(self):
        with pytest.raises(ValueError, match="top_k=5, but there are 4 experts; use 1 to 4"):
            moesaic.TokenChoice(1, 4, 5)
        with pytest.raises(ValueError, match="capacity_factor=0; it must be above 0, or None"):
            moesaic.TokenChoice(1, 4, capacity_factor=0)
        with pytest.raises(ValueError, match="capacity_factor=nan; it must be above 0"):
            moesaic.TokenChoice(1, 4, capacity_factor=float("nan"))
        with pytest.raises(TypeError, match=r"top_k=1.5 is a float; it must be a whole number"):
            moesaic.TokenChoice(1, 4, 1.5)


class TestSoftRouter:
    def test_dispatch_and_combine_weights_sum_to_one(self):
        routing = moesaic.SoftRouter(3, 4, 2, 2)(torch.randn(2, 3, 6, 6))
        torch.testing.assert_close(routing.dispatch.sum(1), torch.ones(2, 4, 2))
        torch.testing.assert_close(routing.gate.sum((2, 3)), torch.ones(2, 9))
        assert (routing.dispatch > 0).all()

    @pytest.mark.parametrize("autocast", [False, True])
    def test_a_score_is_the_cosine_of_patch_and_kernel_times_the_scale(self, autocast):
        router, x = moesaic.SoftRouter(3, 2, 2, 2), torch.randn(2, 3, 4, 4)
        with torch.no_grad():
            router.scale.fill_(5.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores = router(x).scores
        patch = x[1, :, 2:4, 0:2].flatten()  # patch 2 of image 1
        expected = [5 * F.cosine_similarity(patch, kernel.flatten(), 0) for kernel in router.weight]
        torch.testing.assert_close(scores[1, 2].flatten(), torch.stack(expected), rtol=1e-5, atol=1e-6)

    def test_a_black_image_has_uniform_weights(self):
        router = moesaic.SoftRouter(3, 2, 2, 2)
        x = torch.zeros(1, 3, 4, 4, requires_grad=True)
        routing = router(x)
        torch.testing.assert_close(routing.dispatch, torch.full((1, 4, 2, 2), 0.25))
        routing.gate.square().sum().backward()
        assert x.grad.isfinite().all()

    def test_scores_are_invariant_to_the_scale_of_the_image(self):
        router, x = moesaic.SoftRouter(3, 4, 2, 2), torch.randn(2, 3, 6, 6)
        assert router(x).scores.abs().max() <= 1
        torch.testing.assert_close(router(x).gate, router(7 * x).gate)


def test_unknown_options_are_refused_with_the_valid_ones():
    with pytest.raises(
        ValueError,
        match=r"ExpertChoice: gate='softmax' is unknown; use 'softmax_selected', 'softmax_all', ",
    ):
        moesaic.ExpertChoice(3, 2, 1, gate="softmax")
    with pytest.raises(
        ValueError, match=r"TokenChoice: noise='normal' is unknown; use 'uniform', 'gaussian', 'gumbel' or"
    ):
        moesaic.TokenChoice(3, 2, noise="normal")
    with pytest.raises(ValueError, match="TokenChoice: experts=0; it must be at least 1"):
        moesaic.TokenChoice(3, 0)
    with pytest.raises(TypeError, match=r"ExpertChoice: patch_size=2.0 is a float; it must be a whole number"):
        moesaic.ExpertChoice(3, 2, 1, patch_size=2.0)


@pytest.mark.parametrize("router", [moesaic.ExpertChoice(3, 2, 1, 4), moesaic.SoftRouter(3, 2, 1, 4)])
def test_maps_of_wrong_shape_or_dtype_are_refused(router):
    with pytest.raises(ValueError, match=r"a 6×6 map is not divisible into 4×4 patches; pad it to 8×8 or use"):
        router(torch.randn(1, 3, 6, 6))
    with pytest.raises(ValueError, match="in_channels=3, got a map of 5 channels"):
        router(torch.randn(1, 5, 8, 8))


def test_reset_parameters_resets_the_scale_of_a_soft_router():
    router = moesaic.SoftRouter(3, 2, device="meta").to_empty(device="cpu")
    router.reset_parameters(torch.Generator().manual_seed(0))
    assert router.scale == 1
    assert router.weight.abs().max() < 1


def test_a_router_that_does_not_implement_choose_is_refused():
    with pytest.raises(TypeError, match=r"Router does not implement choose"):
        Router(3, 2)(torch.randn(1, 3, 4, 4))
