"""A comparison that was never run: accuracies as given, and networks that learn by halves."""

from collections.abc import Sequence

from moesaic.training.comparison_result import ComparedModel, Comparison, CurvePoint, Run

NAMES = ("cnn", "pmoe", "third")
TESTS = 12


def comparison(
    samples: Sequence[int],
    *accuracies: Sequence[Sequence[float]],
    guessing: float = 40.0,
    groups: Sequence[str] = (),
    data: str = "faces",
    notes: Sequence[str] = (),
) -> Comparison:
    """Of one table of accuracies (sizes, trials) for each model; each group is 5 points worse than the one before."""
    trials = len(accuracies[0][0])
    runs = [
        Run(
            NAMES[i],
            size,
            trial,
            value,
            tuple(value - 5 * g for g in range(len(groups))),
            curve(i, size, value),
            "",
            9.0,
        )
        for i, table in enumerate(accuracies)
        for size, row in zip(samples, table, strict=True)
        for trial, value in enumerate(row)
    ]
    return Comparison(
        data=data,
        digest="0123",
        classes=("smiling", "not smiling"),
        groups=tuple(groups),
        pool=2000,
        tested=500,
        guessing=guessing,
        models=tuple(ComparedModel(NAMES[i], 1000 - i, 5_000_000 - i, 10.0 * i) for i in range(len(accuracies))),
        samples=tuple(samples),
        trials=trials,
        seed=0,
        recipe={"epochs": TESTS, "batch_size": 32, "lr": 0.1, "milestones": [0.5, 0.75], "ema_decay": None},
        machine="a processor, 2 cores, CPU",
        runs=tuple(runs),
        notes=tuple(notes),
    )


def curve(model: int, size: int, end: float) -> tuple[CurvePoint, ...]:
    """From 30 points below towards the end, by half of the way that is left at each test; the last test is there."""
    return tuple(
        CurvePoint(size * test, end if test == TESTS else end - 30 * 0.5**test, (2.0 - 0.5 * model) * test)
        for test in range(1, TESTS + 1)
    )
