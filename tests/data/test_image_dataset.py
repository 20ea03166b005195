"""Tasks on images: what a batch is made of, and which images a subset has."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.data.augment import train_transform
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize, RandomFlipCrop
from moesaic.data.splits import stratified_order
from moesaic.papers.chen2022.data.rotated_cifar import (
    CIFAR10_NORMALIZE,
    FLIP_AND_CROP,
    cifar10_dataset,
    cifar10_rotate_task,
    crop_and_resize,
    rotate,
)

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cifar")
    for number, name in enumerate(NAMES):
        rows = np.random.default_rng(number).integers(256, size=(3, 3073), dtype=np.uint8)
        rows[:, 0] = number
        rows.tofile(made / name)
    return made


def pixels(count: int = 4) -> torch.Tensor:
    return torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_rotate_has_every_image_upright_and_rotated_with_its_class_as_cluster(folder):
    dataset = cifar10_rotate_task(folder, images_per_file=3)
    plain = cifar10_dataset(folder, images_per_file=3)
    assert dataset.train.labels.tolist() == [0] * 15 + [1] * 15
    assert torch.equal(dataset.train.pixels[:15], crop_and_resize(plain.train.pixels))
    assert torch.equal(dataset.train.pixels[15:], crop_and_resize(rotate(plain.train.pixels)))
    assert torch.equal(dataset.train.clusters, plain.train.labels.repeat(2))
    assert (dataset.num_classes, len(dataset.test)) == (2, 6)


def test_cifar_itself_has_its_classes_as_labels(folder):
    dataset = cifar10_dataset(folder, images_per_file=3)
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert torch.equal(
        dataset.eval_transform(dataset.test.pixels, torch.ones(3, 3)), CIFAR10_NORMALIZE(dataset.test.pixels)
    )


def test_test_images_are_blurred_by_default_and_not_when_asked(folder):
    blurred, sharp = cifar10_rotate_task(folder, images_per_file=3), cifar10_rotate_task(folder, False, 3)
    rand = torch.full((6, 3), 0.5)
    assert torch.equal(sharp.eval_transform(sharp.test.pixels, rand), CIFAR10_NORMALIZE(sharp.test.pixels))
    assert blurred.eval_transform(blurred.test.pixels, rand).std() < 0.8 * CIFAR10_NORMALIZE(sharp.test.pixels).std()
    assert torch.equal(
        blurred.eval_transform(blurred.test.pixels, rand), sharp.train_transform(sharp.test.pixels, rand)
    )


def test_a_larger_random_number_blurs_more(folder):
    dataset = cifar10_rotate_task(folder, images_per_file=3)
    less, more = (dataset.train_transform(dataset.test.pixels, torch.full((6, 3), rand)).std() for rand in (0.0, 1.0))
    assert more < less


def test_normalised_images_have_mean_0_and_variance_1_where_cifar_has_its_own():
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = pixels()
    assert torch.allclose(CIFAR10_NORMALIZE(x), (x / 255 - mean[:, None, None]) / std[:, None, None], atol=1e-6)


def test_a_low_random_number_flips():
    x = pixels()
    middle = torch.full((4, 3), 0.5)
    mirrored, same = middle.clone(), middle.clone()
    mirrored[:, 0], same[:, 0] = 0.1, 0.9
    assert torch.equal(FLIP_AND_CROP(x, same), CIFAR10_NORMALIZE(x))
    assert torch.equal(FLIP_AND_CROP(x, mirrored), CIFAR10_NORMALIZE(x).flip(3))


@pytest.mark.parametrize(("rand", "down", "right"), [((0.0, 1.0), -4, 4), ((0.99, 0.45), 4, 0), ((0.56, 0.34), 1, -1)])
def test_crops_move_by_up_to_four_pixels_over_black(rand, down, right):
    x = pixels(1)
    found = FLIP_AND_CROP(x, torch.tensor([[1.0, *rand]]))
    black = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    black[..., 4:36, 4:36] = x
    assert torch.equal(found, CIFAR10_NORMALIZE(black[..., 4 + down : 36 + down, 4 + right : 36 + right]))


def test_crops_are_spread_evenly_over_the_nine_offsets():
    rand = torch.stack([torch.ones(900), (torch.arange(900) + 0.5) / 900, torch.full((900,), 0.5)], dim=1)
    column = torch.zeros(900, 3, 32, 32, dtype=torch.uint8)
    column[:, :, 16] = 255
    rows = FLIP_AND_CROP(column, rand)[:, 0, :, 0].argmax(1)
    assert torch.bincount(rows).tolist()[12:] == [100] * 9


def test_tasks_on_cifar_name_their_classes_and_tell_how_they_scale(folder):
    plain, turned, sharp = (
        cifar10_dataset(folder, 3),
        cifar10_rotate_task(folder, True, 3),
        cifar10_rotate_task(folder, False, 3),
    )
    assert plain.class_names == plain.cluster_names
    assert (plain.num_classes, turned.class_names) == (10, ("upright", "turned"))
    assert turned.normalize is None
    for dataset in (plain, sharp):
        assert dataset.normalize is not None
        assert torch.equal(
            dataset.normalize(dataset.test.pixels),
            dataset.eval_transform(dataset.test.pixels, torch.zeros(len(dataset.test), 3)),
        )


def test_a_scale_does_the_same_in_both_memory_formats_and_is_plain_data():
    scale = Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    x = pixels()
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(scale(x), scale(last))
    assert scale(last).is_contiguous(memory_format=torch.channels_last)
    again = {name: tuple(numbers) for name, numbers in json.loads(json.dumps(asdict(scale))).items()}
    assert Normalize(**again) == scale


def test_scaling_leaves_the_bytes_alone():
    x = pixels()
    before = x.clone()
    Normalize((0.5,) * 3, (0.2,) * 3)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), (0.1, 0.2), r"mean=\(0.5,\), std=\(0.1, 0.2\); each must have one number for every channel"),
        ((), (), "each must have one number"),
        ((0.5,), (0.0,), r"std=\(0.0,\); each must be above 0"),
    ],
)
def test_an_invalid_normalization_is_refused(mean, std, message):
    with pytest.raises(ValueError, match=message):
        Normalize(mean, std)


def test_images_of_other_channels_are_refused():
    with pytest.raises(ValueError, match=r"of 1 channels, got \(4, 3, 32, 32\)"):
        Normalize((0.5,), (0.1,))(pixels())


def test_an_augment_is_nothing_or_mirroring_or_mirroring_and_shifts_by_an_eighth():
    scale, x = Normalize((0.0,) * 3, (1.0,) * 3), pixels(1)
    low, corner = torch.tensor([[0.1, 0.5, 0.5]]), torch.tensor([[0.9, 0.0, 0.0]])
    plain, flip, both = (train_transform(augment, scale, 32) for augment in ("none", "flip", "flip-crop"))
    assert torch.equal(plain(x, low), scale(x))
    assert torch.equal(flip(x, low), scale(x).flip(3))
    assert torch.equal(flip(x, corner), scale(x))
    assert torch.equal(both(x, low), scale(x).flip(3))
    assert torch.equal(both(x, corner)[..., 4:, 4:], scale(x)[..., :28, :28])
    assert not both(x, corner)[..., :4, :].any()
    assert train_transform("flip-crop", scale, 64).padding == 8
    with pytest.raises(ValueError, match=r"augment='flipp' is unknown; .*did you mean 'flip'"):
        train_transform("flipp", scale, 64)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 9, 12), (1, 8, 8)])
def test_a_batch_is_what_a_plain_loop_makes_of_it(memory_format, channels, height, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (60, channels, height, width), generator=generator).to(torch.uint8)
    rand = torch.rand(60, 3, generator=generator)
    scale = Normalize((0.3,) * channels, (0.2,) * channels)
    found = RandomFlipCrop(scale, flip=True, padding=3)(x.contiguous(memory_format=memory_format), rand)
    for image, (mirror, down, right), varied in zip(x, rand.tolist(), found, strict=True):
        black = torch.zeros(channels, height + 6, width + 6, dtype=torch.uint8)
        black[:, 3:-3, 3:-3] = image
        top, left = int(7 * down), int(7 * right)
        crop = black[:, top : top + height, left : left + width]
        assert torch.equal(varied, scale((crop.flip(2) if mirror <= 0.5 else crop)[None])[0])


def test_no_images_are_no_trouble():
    none = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    assert (
        RandomFlipCrop(Normalize((0.0,) * 3, (1.0,) * 3), flip=True, padding=1)(none, torch.zeros(0, 3)).shape
        == none.shape
    )


def test_a_batch_does_not_depend_on_the_memory_format():
    transform = RandomFlipCrop(Normalize((0.1,) * 3, (0.2,) * 3), flip=True, padding=5)
    x, rand = pixels(20), torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(transform(x, rand), transform(x.contiguous(memory_format=torch.channels_last), rand))


def labelled(labels: torch.Tensor, clusters: torch.Tensor | None = None) -> LabelledImages:
    """Images whose one pixel is their number."""
    numbers = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    return LabelledImages(numbers.contiguous(), labels, labels if clusters is None else clusters)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_are_taken_in_the_order_asked_for(memory_format):
    images = labelled(torch.arange(9) % 3)
    images = LabelledImages(images.pixels.contiguous(memory_format=memory_format), images.labels, images.clusters)
    some = images.take(torch.tensor([7, 0, 4]))
    assert some.pixels[:, 2, 1, 1].tolist() == [7, 0, 4]
    assert some.labels.tolist() == some.clusters.tolist() == [1, 0, 1]
    assert some.pixels.is_contiguous(memory_format=memory_format)
    assert len(images.take(torch.tensor([], dtype=torch.int64))) == 0


def test_images_that_follow_each_other_are_taken_without_a_copy():
    images = labelled(torch.arange(9) % 3)
    part = images.take(torch.arange(3, 7))
    assert part.pixels[:, 0, 0, 0].tolist() == [3, 4, 5, 6]
    assert part.pixels.data_ptr() == images.pixels[3].data_ptr()


def a_task(labels: torch.Tensor, clusters: torch.Tensor | None = None, names: int = 3) -> ImageDataset:
    scale = Normalize((0.0,) * 3, (1.0,) * 3)
    images = labelled(labels, clusters)
    return ImageDataset(images, images, tuple("abc"[:names]), ("x", "y"), scale, scale, name="letters", digest="1234")


def numbers(dataset: ImageDataset) -> set[int]:
    return set(dataset.train.pixels[:, 0, 0, 0].tolist())


def test_a_subset_has_the_classes_in_their_shares():
    dataset = a_task(torch.tensor([0] * 120 + [1] * 60 + [2] * 20))
    for samples, shares in ((10, [6, 3, 1]), (50, [30, 15, 5]), (100, [60, 30, 10])):
        assert dataset.subset(samples, seed=3).train.labels.bincount().tolist() == shares


def test_the_classes_of_a_subset_differ_by_no_more_than_one_where_they_are_equal():
    dataset = a_task(torch.arange(201) % 3)
    for samples in (3, 4, 5, 50, 151):
        counts = dataset.subset(samples, seed=1).train.labels.bincount()
        assert counts.max() - counts.min() <= 1


def test_fewer_images_are_among_more():
    dataset = a_task(torch.tensor([0] * 131 + [1] * 62 + [2] * 7))
    parts = [numbers(dataset.subset(samples, seed=5)) for samples in (3, 10, 11, 40, 100, 199, 200)]
    assert all(less < more for less, more in pairwise(parts))


def test_every_class_has_an_image_however_rare_it_is():
    dataset = a_task(torch.tensor([0] * 198 + [1] + [2]))
    assert dataset.subset(3, seed=0).train.labels.sort().values.tolist() == [0, 1, 2]


def test_within_a_class_the_clusters_keep_their_shares():
    labels = torch.arange(200) // 100
    clusters = (torch.arange(200) % 20 == 0) ^ labels.bool()  # 95 % of class 0 in cluster 0, of class 1 in cluster 1
    dataset = a_task(labels, clusters.long(), names=2)
    for seed in range(5):
        drawn = dataset.subset(80, seed).train
        assert drawn.labels.bincount().tolist() == [40, 40]
        assert (2 * drawn.labels + drawn.clusters).bincount().tolist() == [38, 2, 2, 38]


def test_the_seed_decides_a_subset_and_its_digest():
    dataset = a_task(torch.arange(200) % 3)
    first, again, other = (dataset.subset(50, seed) for seed in (1, 1, 2))
    assert numbers(first) == numbers(again) != numbers(other)
    assert first.digest == again.digest
    assert len({dataset.digest, first.digest, other.digest, dataset.subset(51, 1).digest}) == 4
    assert first.test is dataset.test
    assert (first.name, first.class_names) == ("letters", ("a", "b", "c"))


def test_all_images_are_no_other_task():
    dataset = a_task(torch.arange(200) % 3)
    assert dataset.subset(200, seed=4).digest == dataset.digest
    assert numbers(dataset.subset(200, seed=4)) == numbers(dataset)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (201, "samples=201, but there are 200 training images in letters; use at most samples=200, or add images"),
        (2, "samples=2 is less than one image for each of the 3 classes; use samples=3 or more"),
        (0, "samples=0; it must be at least 1"),
    ],
)
def test_a_subset_that_cannot_be_is_refused(samples, message):
    with pytest.raises(ValueError, match=rf"^subset: {message}$"):
        a_task(torch.arange(200) % 3).subset(samples, seed=0)


def test_orders_start_with_one_image_of_every_class_and_have_every_image_once():
    labels = torch.tensor([0] * 50 + [1] * 3 + [2] * 2)
    order = stratified_order(labels, labels, seed=0)
    assert labels[order[:3]].sort().values.tolist() == [0, 1, 2]
    assert order.sort().values.tolist() == list(range(55))


def test_a_task_moves_with_all_it_knows():
    dataset = a_task(torch.arange(9) % 3).to("cpu")
    assert (dataset.name, dataset.digest, dataset.num_classes) == ("letters", "1234", 3)


@pytest.mark.gpu
def test_a_batch_on_the_gpu_is_that_on_the_cpu():
    transform = RandomFlipCrop(Normalize((0.1,) * 3, (0.2,) * 3), flip=True, padding=5)
    x, rand = pixels(20), torch.rand(20, 3)
    assert torch.allclose(transform(x.cuda(), rand.cuda()).cpu(), transform(x, rand), atol=1e-6)
