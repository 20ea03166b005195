"""The modules of kernels whose memory the tests of kernels fill with NaN; runs without Triton as well."""

from importlib.util import find_spec

import pytest
from triton_cases import CHANNEL_CONV_KERNELS, GATED_NORM_KERNELS, MLP_KERNELS, PATCH_KERNELS


@pytest.mark.parametrize("name", sorted({*CHANNEL_CONV_KERNELS, *GATED_NORM_KERNELS, *MLP_KERNELS, *PATCH_KERNELS}))
def test_the_module_exists(name):
    assert find_spec(name) is not None
