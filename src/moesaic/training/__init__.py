"""Training: many small networks at once, and results that are kept."""

from moesaic.training.cells import Cells, Kept
from moesaic.training.images import ImageEpoch, ImageSchedule, ImageTest, embed_images, evaluate_images, train_images
from moesaic.training.mixtures import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.training.normalized_gd import NormalizedGD
from moesaic.training.progress import Progress, Silent
from moesaic.training.trials import Schedule, Trained, Watch, accuracy, train_trials

__all__ = [
    "Cells",
    "ImageEpoch",
    "ImageSchedule",
    "ImageTest",
    "Kept",
    "MixtureSchedule",
    "NormalizedGD",
    "Progress",
    "Schedule",
    "Silent",
    "Trained",
    "TrainedMixtures",
    "Watch",
    "accuracy",
    "embed_images",
    "evaluate_images",
    "train_images",
    "train_mixtures",
    "train_trials",
]
