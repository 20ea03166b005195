import pytest
import torch

import moesaic
from moesaic.ops import PatchSpec
from moesaic.ops.patch.gather import Pixels


@pytest.mark.parametrize("context", ["map", "patch"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_contributions_land_where_they_do_when_a_compiler_looks(kernel, context, monkeypatch):
    torch.manual_seed(0)
    router = moesaic.ExpertChoice(4, 3, 2, patch_size=2)
    x = torch.randn(2, 4, 6, 8)
    pixels = Pixels.chosen(router(x), x, PatchSpec(2, "output", context, "concat"))
    landings = [(pixels.landing_on_map(kernel), pixels.landing_on_pixels(kernel))]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    landings.append((pixels.landing_on_map(kernel), pixels.landing_on_pixels(kernel)))
    for plain, compiled in zip(*landings, strict=True):
        assert torch.equal(plain.at_Rk, compiled.at_Rk)
