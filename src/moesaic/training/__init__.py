"""Training: on images, many small networks at once, and results that are kept."""

from moesaic.training.cells import Cells, Kept
from moesaic.training.checkpoints import Checkpoint, load_checkpoint, load_weights
from moesaic.training.compare import Grid, compare
from moesaic.training.comparison import Comparison, read_comparison
from moesaic.training.export import export, load_exported
from moesaic.training.fit import Diverged, Epoch, Fit, GatesClosed, evaluate, fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.images import ImageEpoch, ImageSchedule, ImageTest, embed_images, evaluate_images, train_images
from moesaic.training.mixtures import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.training.normalized_gd import NormalizedGD
from moesaic.training.progress import Progress, Silent
from moesaic.training.recipe import USUAL, Recipe
from moesaic.training.trackers import Tracker, tracker_of
from moesaic.training.trials import Schedule, Trained, Watch, accuracy, train_trials

__all__ = [
    "USUAL",
    "Cells",
    "Checkpoint",
    "Comparison",
    "Diverged",
    "Epoch",
    "Fit",
    "GateRecipe",
    "GatesClosed",
    "Grid",
    "ImageEpoch",
    "ImageSchedule",
    "ImageTest",
    "Kept",
    "MixtureSchedule",
    "NormalizedGD",
    "Progress",
    "Recipe",
    "Schedule",
    "Silent",
    "Tracker",
    "Trained",
    "TrainedMixtures",
    "Watch",
    "accuracy",
    "compare",
    "embed_images",
    "evaluate",
    "evaluate_images",
    "export",
    "fit",
    "load_checkpoint",
    "load_exported",
    "load_weights",
    "read_comparison",
    "tracker_of",
    "train_images",
    "train_mixtures",
    "train_trials",
]
