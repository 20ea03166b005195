"""Training on images: `fit`, recipes, callbacks, checkpoints, comparisons and export."""

from moesaic.training.backbone_features import add_features
from moesaic.training.callbacks import Callback
from moesaic.training.checkpoint import Checkpoint, load_checkpoint, load_weights
from moesaic.training.compare import Grid, compare
from moesaic.training.comparison_result import Comparison, read_comparison
from moesaic.training.distillation import Distillation
from moesaic.training.export import export, load_exported
from moesaic.training.fit import Diverged, Epoch, FitResult, GatesClosed, evaluate, fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.global_batch_layers import sync_batch_norm
from moesaic.training.normalized_gd import NormalizedGD
from moesaic.training.predict import Prediction, SelectedPatches, predict
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe
from moesaic.training.result_cache import CachedResult, ResultCache
from moesaic.training.trackers import Tracker, create_tracker
from moesaic.training.trained_network import TrainedNetwork, load

__all__ = [
    "OPTIMIZER_DEFAULTS",
    "CachedResult",
    "Callback",
    "Checkpoint",
    "Comparison",
    "Distillation",
    "Diverged",
    "Epoch",
    "FitResult",
    "GateRecipe",
    "GatesClosed",
    "Grid",
    "NoProgress",
    "NormalizedGD",
    "Prediction",
    "Progress",
    "Recipe",
    "ResultCache",
    "SelectedPatches",
    "Tracker",
    "TrainedNetwork",
    "add_features",
    "compare",
    "create_tracker",
    "evaluate",
    "export",
    "fit",
    "load",
    "load_checkpoint",
    "load_exported",
    "load_weights",
    "predict",
    "read_comparison",
    "sync_batch_norm",
]
