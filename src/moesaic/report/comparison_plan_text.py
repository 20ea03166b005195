"""The plan of a comparison in a few lines: what it will take, for each network, and what was left out."""

from __future__ import annotations

from moesaic.report.formatting import counted, duration, listed
from moesaic.training.comparison_plan import ComparisonPlan, ModelPlan

__all__ = ["describe_plan"]

_LONG = 3600.0
"""Seconds from which a way to a shorter comparison is pointed out."""


def describe_plan(plan: ComparisonPlan, minutes: float | None = None) -> list[str]:
    """Returns lines that say what a comparison will take; ``minutes`` is its budget."""
    grid, recipe = plan.grid, plan.recipe
    size = f"{len(plan.models)} networks × {counted(len(grid.samples), 'label count')} × {grid.trials} trials"
    longest = plan.most_seconds if minutes is None else min(plan.most_seconds, 60 * minutes)
    further = f", up to {grid.max_trials} while a comparison is undecided" if grid.max_trials != grid.trials else ""
    further = further if grid.max_trials is not None else ""
    if plan.finished == plan.runs and not plan.features and longest == 0:
        return [f"Nothing left to train: {size}, all {plan.runs} runs are finished"]
    least, most = _estimate(plan.seconds), _estimate(longest)
    takes = f"About {least}" if not further or least == most else f"From {least} to {most}"
    done = f"; {plan.finished} of {plan.runs} runs are finished" if plan.finished else ""
    long = "; --minutes 10 chooses what fits" if minutes is None and plan.seconds >= _LONG else ""
    where = "on this machine" if plan.workers == 1 else f"on this machine with {plan.workers} workers"
    lines = [f"{takes} {where}: {size}{further}{done}{long}"]
    lines.append(f"  {listed([f'{each:,}' for each in grid.samples])} labels, {counted(recipe.epochs, 'epoch')}")
    if plan.features:
        lines.append(f"  features of the images: {_estimate(plan.features)}, once for all runs")
    lines += [f"  {_model(model)}" for model in plan.models]
    if plan.left_out and minutes is not None:
        whole = -(-plan.full_seconds // 60) + 1
        lines.append(
            f"  --minutes {minutes:g} leaves out {listed(list(plan.left_out))}; --minutes {whole:.0f} would hold all"
        )
    return lines


def _estimate(seconds: float) -> str:
    return duration(max(seconds, 1.0))


def _model(model: ModelPlan) -> str:
    if model.step is None:
        return f"{model.name}: finished"
    step = f"{1000 * model.step:.0f} ms" if model.step < 1 else f"{model.step:.1f} s"
    return f"{model.name}: {_estimate(model.seconds)}; a step takes {step}"
