"""Sets of the hub, with a stand-in for ``datasets``: which columns and splits are taken, and what fails."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from moesaic.data.decoded_cache import DecodedCache
from moesaic.data.hub import load_hub, open_hub
from moesaic.data.load import load_images


@dataclass(frozen=True)
class Image:
    decode: bool = True


@dataclass(frozen=True)
class ClassLabel:
    names: Sequence[str]


@dataclass(frozen=True)
class Value:
    dtype: str


@dataclass(frozen=True)
class Split:
    """As much of ``datasets.Dataset`` as is used; images that are decoded are not for us."""

    features: Mapping[str, Any]
    values: Mapping[str, list[Any]]
    _fingerprint: str = "f"

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return self.values[key]
        assert not any(getattr(feature, "decode", False) for feature in self.features.values())
        return {name: values[key] for name, values in self.values.items()}

    def select_columns(self, names: list[str]) -> "Split":
        kept = {name: self.features[name] for name in names}
        return replace(self, features=kept, values={name: self.values[name] for name in names})

    def cast_column(self, name: str, feature: Any) -> "Split":
        return replace(self, features={**self.features, name: feature})


@dataclass
class Hub:
    """What the hub has, and what it was asked for."""

    splits: dict[str, Split] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def load_dataset(self, name: str, config: str | None = None) -> dict[str, Split]:
        self.asked.append((name, config))
        if not self.splits:
            raise RuntimeError("there is no such set")
        return self.splits


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    package, hub = ModuleType("datasets"), Hub()
    for name, value in {"Image": Image, "ClassLabel": ClassLabel, "load_dataset": hub.load_dataset}.items():
        setattr(package, name, value)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return hub


@pytest.fixture
def load(hub: Hub, tmp_path: Path) -> Callable[..., Any]:
    return lambda seed=0: load_hub("hub:owner/name", 8, DecodedCache(tmp_path / "cache"), seed)


def stored(shade: int) -> dict[str, Any]:
    file = io.BytesIO()
    Pillow.new("RGB", (8, 8), (shade, 0, 0)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": f"{shade}.png"}


def split(labels: Sequence[Any], feature: Any = ClassLabel(("cat", "dog")), start: int = 0) -> Split:
    """Images whose red value is their index."""
    images = [stored(start + place) for place in range(len(labels))]
    return Split({"image": Image(), "label": feature}, {"image": images, "label": list(labels)})


def reds(pixels: torch.Tensor) -> list[int]:
    return pixels[:, 0, 0, 0].tolist()


def test_images_and_labels_come_as_they_are_stored(hub: Hub, load: Callable[..., Any]):
    hub.splits = {"train": split([1, 0, 1]), "test": split([0, 1], start=100)}
    parts = load()
    assert hub.asked == [("owner/name", None)]
    assert (parts.class_names, parts.cluster_names) == (("cat", "dog"), ("cat", "dog"))
    assert (reds(parts.train.pixels), parts.train.labels.tolist()) == ([0, 1, 2], [1, 0, 1])
    assert (reds(parts.test.pixels), parts.test.labels.tolist()) == ([100, 101], [0, 1])


def test_a_configuration_is_passed_on(hub: Hub):
    hub.splits = {"train": split([1, 0])}
    open_hub("hub:owner/name:small")
    assert hub.asked == [("owner/name", "small")]


def test_images_may_lie_in_files(hub: Hub, load: Callable[..., Any], tmp_path: Path):
    train = split([0, 1, 1])
    kept = tmp_path / "kept.png"
    kept.write_bytes(train.values["image"][0]["bytes"])
    train.values["image"][0] = {"bytes": None, "path": str(kept)}
    hub.splits = {"train": train, "test": split([0, 1])}
    assert reds(load().train.pixels) == [0, 1, 2]


def test_images_that_cannot_be_read_are_skipped_and_reported(hub: Hub, load: Callable[..., Any], tmp_path: Path):
    train = split([0, 1, 0, 1, 0])
    broken = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": str(tmp_path / "gone.png")}, None]
    train.values["image"][2:] = broken
    hub.splits = {"train": train, "test": split([0, 1])}
    parts = load()
    assert (reds(parts.train.pixels), parts.train.labels.tolist()) == ([0, 1], [0, 1])
    assert [Path(each.path).name for each in parts.skipped] == ["2", "3", "4"]
    assert [each.reason.split(" ")[0:3] for each in parts.skipped] == [
        ["is", "not", "an"],
        ["cannot", "be", "read"],
        ["has", "no", "image"],
    ]


def test_a_class_of_which_no_image_can_be_read_is_an_error(hub: Hub, load: Callable[..., Any]):
    train = split([0, 1, 0])
    train.values["image"][1] = {"bytes": b"no image", "path": None}
    hub.splits = {"train": train, "test": split([0, 1])}
    with pytest.raises(
        ValueError, match=r"the class 'dog' has no training image; 1 could not be read.*train/1 is not an"
    ):
        load()


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ({"validation": [0], "test": [1, 1]}, 2),
        ({"validation": [0]}, 1),
        ({"validation": [0], "test": [-1, -1]}, 1),  # a competition keeps its test labels to itself
        ({"validation": [0], "test": [None, 1]}, 1),  # one of two has a label
        ({"unsupervised": [0, 1, 1], "val": [0, 1, 1, 1]}, 4),
    ],
)
def test_the_test_split_is_taken_where_it_has_labels_else_the_one_for_validation(
    hub: Hub, load: Callable[..., Any], others: dict[str, list[int]], taken: int
):
    hub.splits = {"train": split([1, 0, 1])} | {name: split(labels) for name, labels in others.items()}
    parts = load()
    assert len(parts.train) == 3
    assert len(parts.test) == taken


@pytest.mark.parametrize("name", ["train", "all"])
def test_a_fifth_of_each_class_is_held_out_of_the_only_split(hub: Hub, load: Callable[..., Any], name: str):
    hub.splits = {name: split([0, 1] * 10)}
    first, again, other = load(), load(), load(seed=1)
    assert first.train.labels.bincount().tolist() == [8, 8]
    assert first.test.labels.bincount().tolist() == [2, 2]
    assert sorted(reds(first.train.pixels) + reds(first.test.pixels)) == list(range(20))
    assert reds(first.test.pixels) == reds(again.test.pixels) != reds(other.test.pixels)


def test_names_in_place_of_numbers_are_classes_in_order(hub: Hub, load: Callable[..., Any]):
    hub.splits = {"train": split(["pear", "fig", "pear"], Value("string")), "test": split(["fig"], Value("string"))}
    parts = load()
    assert parts.class_names == ("fig", "pear")
    assert parts.train.labels.tolist() == [1, 0, 1]
    hub.splits["test"] = split(["apple"], Value("string"))
    with pytest.raises(ValueError, match="test has the class 'apple', which has no training images"):
        load()


def test_classes_that_no_image_has_are_left_out(hub: Hub, load: Callable[..., Any]):
    names = ClassLabel(("ant", "bee", "cow", "doe"))
    hub.splits = {"train": split([3, 1, 3], names), "test": split([1], names)}
    parts = load()
    assert parts.class_names == ("bee", "doe")
    assert (parts.train.labels.tolist(), parts.test.labels.tolist()) == ([1, 0, 1], [0])


def test_of_several_labels_the_one_that_is_called_so_is_taken(hub: Hub):
    names, values = ClassLabel(("a", "b")), split([0, 1])
    both = {"image": Image(), "coarse": names, "label": ClassLabel(("x", "y"))}
    hub.splits = {"train": Split(both, {**values.values, "coarse": [0, 0]})}
    assert open_hub("hub:owner/name").class_names == ("x", "y")
    neither = {"image": Image(), "coarse": names, "fine": names}
    hub.splits = {"train": Split(neither, {"image": [], "coarse": [], "fine": []})}
    with pytest.raises(ValueError, match=r"1 Image and 2 ClassLabels among its columns image \(Image\), coarse"):
        open_hub("hub:owner/name")


def test_what_has_no_images_is_refused_with_its_columns(hub: Hub):
    hub.splits = {"train": Split({"text": Value("string"), "label": ClassLabel(("a",))}, {"text": [], "label": []})}
    with pytest.raises(ValueError, match=r"no Image and 1 ClassLabel among its columns text \(Value\), label"):
        open_hub("hub:owner/name")


def test_splits_of_which_none_is_to_train_on_are_listed(hub: Hub):
    hub.splits = {"a": split([0, 1]), "b": split([0, 1])}
    with pytest.raises(ValueError, match="has the splits a, b, none of which is named train"):
        open_hub("hub:owner/name")


def test_a_dataset_with_one_class_is_refused(hub: Hub, load: Callable[..., Any]):
    hub.splits = {"train": split([1, 1]), "test": split([1])}
    with pytest.raises(ValueError, match="has only the class dog"):
        load()


def test_labels_that_are_all_missing_are_reported(hub: Hub):
    hub.splits = {"train": split([-1, -1])}
    with pytest.raises(ValueError, match="none of the 2 images of train has a label"):
        open_hub("hub:owner/name")


def test_what_the_hub_says_is_passed_on(hub: Hub):
    with pytest.raises(ValueError, match="hub:owner/name: datasets could not load it: there is no such set"):
        open_hub("hub:owner/name")


@pytest.mark.parametrize("source", ["hub:", "hub:owner/", "hub:a/b/c"])
def test_a_name_that_the_hub_cannot_have_is_reported_before_asking(hub: Hub, source: str):
    with pytest.raises(ValueError, match="name a dataset of the hub as hub:owner/name"):
        open_hub(source)
    assert not hub.asked


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'moesaic\[hub\]'"):
        load_images("hub:owner/name", cache_dir=tmp_path)


def test_load_images_makes_a_task_of_it(hub: Hub, tmp_path: Path):
    hub.splits = {"train": split([0, 1] * 3), "test": split([0, 1])}
    dataset = load_images("hub:owner/name", size=16, cache_dir=tmp_path)
    assert dataset.name == "hub:owner/name"
    assert tuple(dataset.train.pixels.shape) == (6, 3, 16, 16)


def test_a_changed_set_is_decoded_again(hub: Hub, load: Callable[..., Any]):
    hub.splits = {"train": split([0, 1]), "test": split([0, 1])}
    before = load()
    hub.splits = {"train": replace(split([0, 1], start=50), _fingerprint="g"), "test": split([0, 1])}
    assert (reds(before.train.pixels), reds(load().train.pixels)) == ([0, 1], [50, 51])
