import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from moesaic.routing import SampleRouter


def random_router(*args, **kwargs) -> SampleRouter:
    router = SampleRouter(*args, **kwargs)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    return router


@given(p=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 4), E=st.integers(1, 5), bias=st.booleans())
def test_the_score_of_an_image_is_a_convolution_at_stride_p_summed_over_positions(p, rows, columns, E, bias):
    router = random_router(3, E, p, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 3, rows * p, columns * p, dtype=torch.float64)
    torch.testing.assert_close(router(x), F.conv2d(x, router.weight, router.bias, stride=p).sum((2, 3)))


@pytest.mark.parametrize("bias", [False, True])
def test_the_score_of_patches_is_the_sum_of_their_scores(bias):
    router = random_router(5, 4, bias=bias, dtype=torch.float64)
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(router(x), F.linear(x, router.weight, router.bias).sum(1))
    torch.testing.assert_close(router(x[:, 0]), F.linear(x[:, 0], router.weight, router.bias))


def test_weights_are_initialised_to_zero_without_a_bias_by_default():
    router = SampleRouter(5, 4, bias=True)
    assert [tensor.count_nonzero().item() for tensor in router.parameters()] == [0, 0]
    assert SampleRouter(5, 4).bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_for_every_dtype_of_samples(dtype):
    router = random_router(5, 4).to(dtype)
    x = torch.randn(3, 2, 5, dtype=dtype)
    exact = F.linear(x.double(), router.weight.double()).sum(1)
    with torch.autocast("cpu", torch.bfloat16):
        scores = router(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


def test_scores_are_batch_and_memory_format_invariant():
    router = random_router(3, 5, 4)
    x = torch.randn(7, 3, 16, 16)
    scores = router(x)
    assert torch.equal(scores, torch.cat([router(image[None]) for image in x]))
    assert torch.equal(scores, router(x.contiguous(memory_format=torch.channels_last)))


@pytest.mark.parametrize(
    ("router", "x", "error", "says"),
    [
        (SampleRouter(5, 2), torch.zeros(3, 4), ValueError, r"patches \(B, P, 5\) or vectors \(B, 5\), got \(3, 4\)"),
        (SampleRouter(5, 2), torch.zeros(3, 5, 8, 8), ValueError, r"for images \(B, C, H, W\) set patch_size"),
        (SampleRouter(5, 2), torch.zeros(3, 5).long(), TypeError, "takes floating-point samples, got torch.int64"),
        (SampleRouter(3, 2, 4), torch.zeros(1, 3, 6, 6), ValueError, "6×6 map is not divisible into 4×4 patches"),
    ],
)
def test_samples_of_wrong_shape_or_dtype_are_refused(router, x, error, says):
    with pytest.raises(error, match=says):
        router(x)


@pytest.mark.parametrize("options", [{"dim": 0, "experts": 2}, {"dim": 2, "experts": 2, "patch_size": 0}])
def test_invalid_arguments_are_refused(options):
    with pytest.raises(ValueError, match="it must be at least 1"):
        SampleRouter(**options)
