"""Data sets and distributions of the papers."""

from moesaic.data.cifar import CIFAR10_CLASSES, Cifar10, load_cifar10
from moesaic.data.clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.data.digit_patches import DigitPatches
from moesaic.data.digits import DIGIT_SIZE, Digits, load_digits
from moesaic.data.embeddings import Embeddings, embed_sentences
from moesaic.data.image_sets import IMAGE_SETS, load_images
from moesaic.data.image_tasks import ImageTask, LabelledImages, Scale, Skipped, cifar10_rotate_task, cifar10_task
from moesaic.data.mosaics import DigitMosaics, digit_mosaics
from moesaic.data.patterns import PatternPatches
from moesaic.data.sentences import SOURCES, Sentences, SentenceSource, load_sentences, read_sentences
from moesaic.data.trials import PatchSource, Split, TrialData

__all__ = [
    "CIFAR10_CLASSES",
    "DIGIT_SIZE",
    "IMAGE_SETS",
    "SOURCES",
    "Cifar10",
    "ClusterData",
    "ClusterPatches",
    "ClusterSetting",
    "DigitMosaics",
    "DigitPatches",
    "Digits",
    "Embeddings",
    "ImageTask",
    "LabelledImages",
    "PatchSource",
    "PatternPatches",
    "Scale",
    "SentenceSource",
    "Sentences",
    "Skipped",
    "Split",
    "TrialData",
    "cifar10_rotate_task",
    "cifar10_task",
    "digit_mosaics",
    "embed_sentences",
    "load_cifar10",
    "load_digits",
    "load_images",
    "load_sentences",
    "read_sentences",
]
