"""The script that measures the host's time for a step, without its GPU kernels."""

import importlib.util

import pytest
import torch
from benchmark_scripts import loaded_script
from torch.nn import functional as F


def test_it_asks_for_triton_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_time.py"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with loaded_script("host_time") as script, pytest.raises(SystemExit):
        script.main()
    assert "pip install triton" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"stride": (1, 1), "padding": (1, 1)}])
def test_its_convolution_has_shapes_and_dtypes_of_torchs(options):
    x, weight, bias = torch.zeros(2, 3, 9, 9), torch.zeros(5, 3, 3, 3, requires_grad=True), torch.zeros(5)
    with loaded_script("host_time") as script:
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found, expected = script.conv2d(x, weight, bias, **options), F.conv2d(x, weight, bias, **options)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            (grad,) = torch.autograd.grad(found.sum(), weight)
            assert grad.shape == weight.shape
