"""Training: many small networks at once, and results that are kept."""

from moesaic.training.cells import Cells, Kept
from moesaic.training.normalized_gd import NormalizedGD
from moesaic.training.trials import Progress, Schedule, Silent, Trained, Watch, accuracy, train_trials

__all__ = [
    "Cells",
    "Kept",
    "NormalizedGD",
    "Progress",
    "Schedule",
    "Silent",
    "Trained",
    "Watch",
    "accuracy",
    "train_trials",
]
