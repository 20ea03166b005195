"""Training on images: `fit`, recipes, callbacks, checkpoints, comparisons and export."""

from moesaic.training.checkpoint import Checkpoint, load_checkpoint, load_weights
from moesaic.training.compare import Grid, compare
from moesaic.training.comparison_result import Comparison, read_comparison
from moesaic.training.export import export, load_exported
from moesaic.training.fit import Diverged, Epoch, Fit, GatesClosed, evaluate, fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.optim import NormalizedGD
from moesaic.training.progress import Progress, Silent
from moesaic.training.recipe import USUAL, Recipe
from moesaic.training.result_cache import Cells, Kept
from moesaic.training.trackers import Tracker, tracker_of

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
    "Kept",
    "NormalizedGD",
    "Progress",
    "Recipe",
    "Silent",
    "Tracker",
    "compare",
    "evaluate",
    "export",
    "fit",
    "load_checkpoint",
    "load_exported",
    "load_weights",
    "read_comparison",
    "tracker_of",
]
