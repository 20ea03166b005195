"""timm for tests: skipped where it is not installed."""

import importlib
import importlib.util
import sys

import pytest
import torch

OPERATORS: list[torch.library.Library] = []


@pytest.fixture(scope="session")
def timm():
    """timm, which imports torchvision, whose compiled operators do not load beside every build of torch."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    try:
        return importlib.import_module("timm")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
    OPERATORS.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        OPERATORS[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm")
