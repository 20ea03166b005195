"""Training: many small networks at once."""

from moesaic.training.trials import Progress, Schedule, Silent, Trained, accuracy, train_trials

__all__ = ["Progress", "Schedule", "Silent", "Trained", "accuracy", "train_trials"]
