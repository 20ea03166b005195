"""The script that draws examples of the papers' datasets, on made-up files."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cifar_files import write_cifar10
from PIL import Image

from moesaic.data.decoded_cache import DecodedCache
from moesaic.papers.chen2022.data.rotated_cifar import crop_and_resize, rotate

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location("dataset_examples", DOCS / "dataset_examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_cifar10(tmp_path / "data")
    plants = tmp_path / "data" / "plants"
    plants.mkdir()
    for grey in (50, 200):
        Image.new("RGB", (40, 40), (grey, grey, grey)).save(plants / f"{grey}.png")
    return tmp_path / "data"


def shown(figure) -> list[np.ndarray]:
    return [np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes]


def test_figures_show_the_steps_and_the_datasets(script, data_dir, tmp_path):
    images = script.cifar10(data_dir, DecodedCache(tmp_path / "cache"), images_per_file=20)
    steps = shown(script.figure_6(images))
    assert len(steps) == 4 * 4
    first = images.pixels[:1]
    np.testing.assert_array_equal(steps[0], first[0].permute(1, 2, 0))
    assert steps[1].shape == (24, 24, 3)
    np.testing.assert_array_equal(steps[6], crop_and_resize(rotate(first))[0].permute(1, 2, 0))
    assert steps[7].astype(float).std() < steps[6].astype(float).std()
    examples = shown(script.figure_13(images))
    assert [each.shape for each in examples] == [(32, 32, 3)] * 6
    background = (examples[2] == 50) | (examples[2] == 200)
    assert background.all(axis=2).sum() >= 32 * 32 - 16 * 16
