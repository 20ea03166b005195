"""CelebA (Liu et al. 2015): photographs of faces with 40 attributes, and three classification datasets of them.

Files as distributed: ``img_align_celeba.zip`` (or the folder ``img_align_celeba``), ``list_attr_celeba.txt``
and ``list_eval_partition.txt``, which assigns faces to training, validation and test. The datasets of
Chowdhury et al. 2023, Section 5.2, classify smiling faces; validation faces are not used.

The authors' code loads prepared arrays. It only shows how training samples are drawn: 47.5 %, 2.5 %, 2.5 %
and 47.5 % of the four groups smiling × hair for ``celeba-spurious``, and equally many of the four classes for
``celeba-4class``. The groups here have the same shares and are as large as CelebA allows. Neither the code nor
the paper describes the test faces, except that ``celeba-4class`` has 2 000. Here its test split is balanced
like the training split, and that of ``celeba-spurious`` has all test faces with exactly one of the two hair
colours, in CelebA's own shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic import keyed_random
from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import open_source
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.splits import Split
from moesaic.validated_json import InvalidFile, read_bytes

__all__ = [
    "FOUR_CLASSES",
    "HAIR_GROUPS",
    "SMILING",
    "CelebA",
    "Faces",
    "celeba_four_classes",
    "celeba_smiling",
    "celeba_spurious",
    "find_celeba",
    "four_classes",
    "read_celeba",
    "smiling",
    "spurious",
]

SMILING = ("not smiling", "smiling")
HAIR_GROUPS = tuple(f"{smile}, {hair} hair" for smile in SMILING for hair in ("black", "blond"))
"""The clusters of ``celeba-spurious``."""
FOUR_CLASSES = tuple(f"{smile}, {glasses}" for smile in SMILING for glasses in ("no eyeglasses", "eyeglasses"))

_DEFAULT_SIZE = 64
"""Default image size in pixels: that of the paper."""
_FOLDERS = (".", "celeba", "CelebA")
_IMAGES = "img_align_celeba"
_ATTRIBUTES = "list_attr_celeba.txt"
_PARTITION = "list_eval_partition.txt"
_SOURCE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_PARTITIONS: dict[Split, int] = {"train": 0, "test": 2}  # 1: validation
_USED_ATTRIBUTES = ("Smiling", "Black_Hair", "Blond_Hair", "Eyeglasses")


@dataclass(frozen=True, eq=False)
class CelebA:
    """The available faces, training faces first; made by `read_celeba`."""

    images: Path
    """The zip file or folder."""
    files: tuple[str, ...]
    """Path of each face in the folder or zip file."""
    training: int
    """Number of training faces; the others are test faces."""
    attributes: Mapping[str, NDArray[np.bool_]]
    """For each attribute, whether a face has it: Smiling, Black_Hair, Blond_Hair and Eyeglasses."""
    absent: int
    """Number of listed faces whose file is missing."""

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: NDArray[np.int64]) -> CelebA:
        """The faces at ``rows``, which are ascending."""
        files = tuple(self.files[int(row)] for row in rows)
        attributes = {name: has[rows] for name, has in self.attributes.items()}
        return replace(self, files=files, training=int((rows < self.training).sum()), attributes=attributes)

    def rows(self, split: Split) -> NDArray[np.int64]:
        """Indices of the faces of a split."""
        ends = (0, self.training) if split == "train" else (self.training, len(self))
        return np.arange(*ends)


@dataclass(frozen=True, eq=False)
class Faces:
    """The faces of a split of a dataset."""

    rows: NDArray[np.int64]
    """Indices into `CelebA.files`, ascending."""
    labels: NDArray[np.int64]
    clusters: NDArray[np.int64]


def celeba_smiling(data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """``celeba-smiling``: smiling or not; all faces of CelebA's training and test split."""
    return _load("celeba-smiling", smiling, SMILING, SMILING, data_dir, size, cache)


def celeba_spurious(data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """``celeba-spurious``: smiling or not, correlated with the hair colour in the training split only."""
    return _load("celeba-spurious", partial(spurious, seed=seed), SMILING, HAIR_GROUPS, data_dir, size, cache)


def celeba_four_classes(data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """``celeba-4class``: smiling × eyeglasses, with balanced classes."""
    return _load("celeba-4class", partial(four_classes, seed=seed), FOUR_CLASSES, FOUR_CLASSES, data_dir, size, cache)


def _load(
    name: str,
    choose: Callable[[CelebA, Split], Faces],
    class_names: tuple[str, ...],
    cluster_names: tuple[str, ...],
    data_dir: Path | None,
    size: int | None,
    cache: DecodedCache,
) -> ImageSplits:
    """Decodes all faces once for all three datasets; faces that cannot be decoded are not sampled."""
    if data_dir is None:
        raise InvalidFile(f"{name}: CelebA is read from files; give the folder with its files (--data-dir)")
    celeba = read_celeba(data_dir)
    if celeba.absent:
        everyone = len(celeba) + celeba.absent
        cache.log(
            f"{name}: {celeba.images} has {len(celeba)} of the {everyone} faces on CelebA's lists; these are used"
        )
    with open_source(celeba.images) as source:
        decoded = decode_images(source, celeba.files, size or _DEFAULT_SIZE, cache)
    good = celeba.take(decoded.rows.numpy())
    if not 0 < good.training < len(good):
        raise InvalidFile(
            f"{name}: of the faces in {celeba.images} only {good.training} for training and "
            f"{len(good) - good.training} for testing can be read (the first that cannot: {decoded.skipped[0].path} "
            f"{decoded.skipped[0].reason}); get them again from {_SOURCE}"
        )

    def part(split: Split) -> LabelledImages:
        faces = choose(good, split)
        everyone = torch.zeros(len(good), dtype=torch.int64)
        picked = LabelledImages(decoded.pixels, everyone, everyone).take(torch.from_numpy(faces.rows))
        return LabelledImages(picked.pixels, torch.from_numpy(faces.labels), torch.from_numpy(faces.clusters))

    return ImageSplits(part("train"), part("test"), class_names, cluster_names, decoded.skipped)


def find_celeba(data_dir: str | Path) -> tuple[Path, Path, Path]:
    """Paths of images, attributes and partition; the error lists the expected files."""
    base = Path(data_dir).resolve()
    alternatives = ((f"{_IMAGES}.zip", _IMAGES), (_ATTRIBUTES,), (_PARTITION,))
    missing: list[str] = []
    for folder in (base / name for name in _FOLDERS):
        paths = [next((folder / name for name in names if (folder / name).exists()), None) for names in alternatives]
        images, attributes, partition = paths
        if images and attributes and partition:
            return images, attributes, partition
        absent = [" or ".join(names) for names, path in zip(alternatives, paths, strict=True) if path is None]
        if not missing or len(absent) < len(alternatives):  # one folder without any of the files is enough
            missing.append(f"{', '.join(absent)} in {folder}")
    raise FileNotFoundError(
        f"celeba: CelebA is not in data_dir={str(data_dir)!r} nor in celeba below it: there is no "
        f"{'; no '.join(missing)}; get the aligned and cropped images and both lists from {_SOURCE}"
    )


def read_celeba(data_dir: str | Path) -> CelebA:
    r"""Reads CelebA's lists under ``data_dir`` and finds the available faces; no image is decoded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "list_attr_celeba.txt").write_text(
    ...         "2\nBlack_Hair Blond_Hair Eyeglasses Smiling\n1.jpg 1 -1 -1 1\n2.jpg -1 1 1 -1\n"
    ...     )
    ...     _ = Path(folder, "list_eval_partition.txt").write_text("1.jpg 0\n2.jpg 2\n")
    ...     Path(folder, "img_align_celeba").mkdir()
    ...     for name in ("1.jpg", "2.jpg"):
    ...         _ = Path(folder, "img_align_celeba", name).write_bytes(b"")
    ...     celeba = read_celeba(folder)
    >>> celeba.files, celeba.training, celeba.attributes["Smiling"].tolist()
    (('1.jpg', '2.jpg'), 1, [True, False])
    """
    images, attribute_list, partition_list = find_celeba(data_dir)
    known = _files(images)
    partition = _partition(partition_list)
    attributes = _attributes(attribute_list)
    unlisted = next((face for face in attributes if face not in partition), None)
    if unlisted is not None:
        raise InvalidFile(
            f"{partition_list}: does not list {unlisted}, which is in {attribute_list.name}; "
            f"get both lists again from {_SOURCE}"
        )
    parts = [[face for face in attributes if partition[face] == _PARTITIONS[split]] for split in ("train", "test")]
    train, test = ([face for face in part if face in known] for part in parts)
    if not train or not test:
        raise InvalidFile(
            f"{images}: has {len(train)} of the {len(parts[0])} faces for training and {len(test)} of the "
            f"{len(parts[1])} for testing on CelebA's lists; get img_align_celeba.zip again from {_SOURCE}"
        )
    faces = train + test
    table = np.array([attributes[face] for face in faces])
    return CelebA(
        images,
        tuple(known[face] for face in faces),
        len(train),
        {name: table[:, column] for column, name in enumerate(_USED_ATTRIBUTES)},
        sum(map(len, parts)) - len(faces),
    )


def smiling(celeba: CelebA, split: Split) -> Faces:
    """All faces of the split; the label is whether the face smiles."""
    rows = celeba.rows(split)
    labels = celeba.attributes["Smiling"][rows].astype(np.int64)
    return Faces(rows, labels, labels)


def spurious(celeba: CelebA, split: Split, seed: int) -> Faces:
    """Smiling, where 95 % of smiling training faces have black hair and 95 % of the others have blond hair.

    Clusters are `HAIR_GROUPS`. Faces with neither hair colour, or with both, are not used. The training split is the
    largest with these shares and balanced labels, drawn by seed; the test split has all faces.
    """
    groups = _groups(celeba, split, "Blond_Hair", (celeba.attributes["Black_Hair"] ^ celeba.attributes["Blond_Hair"]))
    if split == "train":
        groups = _draw(groups, (1, 19, 19, 1), HAIR_GROUPS, "celeba-spurious", split, seed)
    rows, clusters = _join(groups)
    return Faces(rows, clusters // 2, clusters)


def four_classes(celeba: CelebA, split: Split, seed: int) -> Faces:
    """Smiling × eyeglasses (`FOUR_CLASSES`), balanced to the size of the rarest class, drawn by seed."""
    groups = _groups(celeba, split, "Eyeglasses", np.ones(len(celeba), dtype=np.bool_))
    rows, labels = _join(_draw(groups, (1, 1, 1, 1), FOUR_CLASSES, "celeba-4class", split, seed))
    return Faces(rows, labels, labels)


def _groups(celeba: CelebA, split: Split, other: str, among: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Rows of the four groups: not smiling and smiling, each without and with the other attribute."""
    rows = celeba.rows(split)
    rows = rows[among[rows]]
    group = 2 * celeba.attributes["Smiling"][rows] + celeba.attributes[other][rows]
    return [rows[group == number] for number in range(4)]


def _draw(
    groups: Sequence[NDArray[np.int64]], parts: Sequence[int], names: Sequence[str], task: str, split: Split, seed: int
) -> list[NDArray[np.int64]]:
    """The largest sample of all groups in the ratio ``parts``."""
    unit = min(len(group) // part for group, part in zip(groups, parts, strict=True))
    if not unit:
        counts = ", ".join(f"{name}: {len(group)}" for name, group in zip(names, groups, strict=True))
        raise InvalidFile(
            f"{task}: the {split} faces cannot be taken in the ratio {':'.join(map(str, parts))} ({counts}); "
            "give more of CelebA's faces"
        )
    key = keyed_random.keys(seed, [0])
    orders = [
        keyed_random.permutations(key, f"{task} {split} {number}", len(group))[0].numpy()
        for number, group in enumerate(groups)
    ]
    return [group[order[: unit * part]] for group, order, part in zip(groups, orders, parts, strict=True)]


def _join(groups: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of all groups, ascending, and the group of each row."""
    rows = np.concatenate(groups)
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = rows.argsort()
    return rows[order], numbers[order]


def _files(images: Path) -> dict[str, str]:
    """Path of each image in the folder or zip file, by file name."""
    with open_source(images) as source:
        return {entry.name.rpartition("/")[2]: entry.name for entry in source.entries() if entry.name.endswith(".jpg")}


def _attributes(path: Path) -> dict[str, list[bool]]:
    """The used attributes of each face."""
    lines = _lines(path)
    announced, names = (lines[0].strip(), lines[1].split()) if len(lines) > 1 else ("", [])
    absent = [name for name in _USED_ATTRIBUTES if name not in names]
    if not announced.isdecimal() or absent:
        raise InvalidFile(
            f"{path}: is not CelebA's list of attributes: it starts with a count and a line of names, among which "
            f"must be {', '.join(_USED_ATTRIBUTES)}; get it again from {_SOURCE}"
        )
    rows = [line.split() for line in lines[2:] if line.strip()]
    if len(rows) != int(announced):
        raise InvalidFile(f"{path}: announces {announced} faces, {len(rows)} follow; get it again from {_SOURCE}")
    columns = [1 + names.index(name) for name in _USED_ATTRIBUTES]
    value = {"1": True, "-1": False}
    faces: dict[str, list[bool]] = {}
    for number, row in enumerate(rows, start=3):
        if len(row) != 1 + len(names) or any(row[column] not in value for column in columns):
            raise InvalidFile(
                f"{path}: line {number} has {len(row)} columns, expected a file name and {len(names)} times 1 or -1; "
                f"get it again from {_SOURCE}"
            )
        faces[row[0]] = [value[row[column]] for column in columns]
    return faces


def _partition(path: Path) -> dict[str, int]:
    parts: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        row = line.split()
        if len(row) != 2 or row[1] not in ("0", "1", "2"):
            raise InvalidFile(
                f"{path}: line {number} is {line[:40]!r}, expected a file name and 0 (training), 1 (validation) or "
                f"2 (testing); get it again from {_SOURCE}"
            )
        parts[row[0]] = int(row[1])
    return parts


def _lines(path: Path) -> list[str]:
    try:
        return read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as damage:
        raise InvalidFile(f"{path}: is not text ({damage}); get it again from {_SOURCE}") from damage
