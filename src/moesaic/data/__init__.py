"""Datasets of images: folders and archives, built-in sets, the hub; decoding, caching and transforms."""

from moesaic.data.builtin_datasets import DATASETS, register_dataset
from moesaic.data.cifar10 import CIFAR10_CLASSES, Cifar10, load_cifar10
from moesaic.data.file_sources import SkippedFile
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.data.load import load_images
from moesaic.data.mnist import DIGIT_SIZE, Digits, load_digits
from moesaic.data.splits import Split

__all__ = [
    "CIFAR10_CLASSES",
    "DATASETS",
    "DIGIT_SIZE",
    "Cifar10",
    "Digits",
    "ImageDataset",
    "LabelledImages",
    "Normalize",
    "SkippedFile",
    "Split",
    "load_cifar10",
    "load_digits",
    "load_images",
    "register_dataset",
]
