"""The examples run, and give what they say they give."""

import math
import runpy
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_where_patches_go_draws_a_picture_and_tells_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "where_patches_go.py"))
    numbers = example["main"](["--epochs", "1", "--out", str(tmp_path / "new" / "folder")])

    assert all(math.isfinite(value) and 0 <= value <= 1 for value in numbers.values()), numbers
    # two patches of sixteen, and the router: 16 patches of 4·4·32 values times its kernels, padded to 16 columns
    dense = 16 * 16 * 32 * 64 * 3 * 3
    assert numbers["multiply_adds"] == pytest.approx(2 / 16 + 16 * (4 * 4 * 32) * 16 / dense)

    picture = tmp_path / "new" / "folder" / "where_patches_go.png"
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100
