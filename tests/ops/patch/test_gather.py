import pytest
import torch

import moesaic
from moesaic.ops import PatchSpec
from moesaic.ops.patch.gather import RoutedPixels


@pytest.mark.parametrize("context", ["map", "patch"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_scatter_indices_are_the_same_under_a_compiler(kernel, context, monkeypatch):
    torch.manual_seed(0)
    router = moesaic.ExpertChoice(4, 3, 2, patch_size=2)
    x = torch.randn(2, 4, 6, 8)
    pixels = RoutedPixels.from_routing(router(x), x, PatchSpec(2, "output", context, "concat"))
    indices = [(pixels.scatter_to_map(kernel), pixels.scatter_to_pixels(kernel))]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    indices.append((pixels.scatter_to_map(kernel), pixels.scatter_to_pixels(kernel)))
    for plain, compiled in zip(*indices, strict=True):
        assert torch.equal(plain.row_Rk, compiled.row_Rk)
