"""A made-up outcome of a run, of the size and shape of a real one."""

import math

from moesaic.ledger import Blocks, Chart, Fidelity, Finding, Panel, Series

__all__ = ["CHARTS", "FINDINGS", "finding"]

SAMPLES = (100.0, 200.0, 300.0, 400.0, 500.0, 700.0, 1000.0)
RULE = (
    "The curves of mean test accuracy over trials are interpolated, the samples each needs for 95 % are read off, "
    "and the ratio is bootstrapped over trials. Holds if the interval's upper end is at most 70; fails if its lower "
    "end is above 100; partly otherwise."
)


def finding(
    id: str = "samples",
    fidelity: Fidelity = "print",
    *,
    where: str = "Figure 4",
    statement: str = "Joint-training pMoE reaches 95 % test accuracy with 60 % of the samples that the CNN needs",
    published: float | str | None = 60.0,
    measured: float | None = 52.04,
    interval: tuple[float, float] | None = (48.31, 57.92),
    verdict: str = "holds",
    rule: str = RULE,
) -> Finding:
    return Finding(
        id, "chowdhury2023", where, statement, fidelity, "quick", published, measured, interval, rule, verdict, 12.3
    )


def both(
    id: str, where: str, statement: str, published: float | str | None, *measured: tuple[float, float, float, str]
) -> list[Finding]:
    fidelities: tuple[Fidelity, ...] = ("print", "released", "best")
    return [
        finding(
            id,
            fidelity,
            where=where,
            statement=statement,
            published=published,
            measured=value,
            interval=(low, high),
            verdict=verdict,
        )
        for fidelity, (value, low, high, verdict) in zip(fidelities, measured, strict=False)
    ]


FINDINGS: tuple[Finding, ...] = (
    *both(
        "samples",
        "Figure 4",
        "Joint-training pMoE reaches 95 % test accuracy with 60 % of the samples that the CNN needs",
        60.0,
        (52.04, 48.31, 57.92, "holds"),
        (31.2, 25.0, 38.4, "holds"),
        (18.6, 15.2, 22.3, "holds"),
    ),
    *both(
        "separate-beats-cnn",
        "Figure 4",
        "Separate-training pMoE is more accurate than the CNN with the same 300 training samples (points of accuracy)",
        "above",
        (2.31, 0.4, 4.2, "partly: at 300 samples, not at 1000"),
        (13.3, 11.9, 14.7, "holds"),
    ),
    *both(
        "phase",
        "Figure 5",
        "The samples that separate-training pMoE needs grow with a power of l",
        "a power of l",
        (1.84, 1.2, 2.6, "holds"),
        (0.1, -0.9, 1.1, "fails"),
    ),
    *(
        finding(
            "experts",
            fidelity,
            where="Figure 6",
            statement="Test accuracy of joint training rises with the number of experts k once Assumption 4.4 holds",
            published=None,
            measured=None,
            interval=None,
            verdict="not run here: needs --preset full",
        )
        for fidelity in ("print", "released")
    ),
    finding(
        "router-300",
        where="Figure 8",
        statement="A router trained on 300 samples has the discriminative patch among its top 4 for 95 % of test data",
        published=95.0,
        measured=96.1,
        interval=(94.9, math.inf),
    ),
)


def curves(shift: float, best: bool) -> tuple[Series, ...]:
    def curve(label: str, role: str, top: float, slow: float, spread: float) -> Series:
        y = tuple(top - (top - 55) * math.exp(-x / slow) for x in SAMPLES)
        return Series(label, role, SAMPLES, y, tuple(spread * math.exp(-x / 500) for x in SAMPLES))

    lines = [
        curve("CNN, 40 neurons", "cnn", 96.5 + shift, 260, 2.5),
        curve("separate training, k = 2, l = 2", "separate", 98 + shift, 180, 3.5),
        curve("joint training, k = 8, l = 6", "joint", 98.7, 140, 1.8),
    ]
    return (*lines, curve("our settings", "best", 99.2, 80, 1.2)) if best else tuple(lines)


PATCHES, NEEDED = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0), (100.0, 200.0, 300.0, 400.0, 500.0)


def success(scale: float) -> Blocks:
    rows = (tuple(1 / (1 + math.exp((40 * scale * l - n) / 40)) for l in PATCHES) for n in NEEDED)
    return Blocks(PATCHES, NEEDED, tuple(tuple(round(20 * share) / 20 for share in row) for row in rows))


CHARTS: tuple[Chart, ...] = (
    Chart(
        "figure-4",
        "chowdhury2023",
        "Figure 4",
        "Test accuracy against training samples",
        "A network that routes patches to experts needs fewer labelled samples than a plain convolutional network of "
        "the same size. Means of five trials; bars show one standard deviation.",
        (
            Panel("as printed", "training samples", "test accuracy (%)", curves(0, True), level=95.0),
            Panel("as released", "training samples", "test accuracy (%)", curves(-3, True), level=95.0),
        ),
    ),
    Chart(
        "figure-5",
        "chowdhury2023",
        "Figure 5",
        "How many samples separate training needs as l grows",
        "Each block is 20 trials. White: all reach zero test error; black: none does. The border moves up with l.",
        (
            Panel("as printed", "patches per expert l", "training samples", blocks=success(1)),
            Panel("as released", "patches per expert l", "training samples", blocks=success(0.8)),
        ),
    ),
    Chart(
        "figure-8",
        "chowdhury2023",
        "Figure 8",
        "How often the router finds the patch that matters",
        "The share of test samples whose discriminative digit is among the l patches the router ranks highest.",
        (
            Panel(
                "as printed",
                "training samples",
                "properly routed (%)",
                tuple(
                    Series(f"l = {l}", f"l={l}", SAMPLES, tuple(100 - (60 / l) * math.exp(-x / 250) for x in SAMPLES))
                    for l in (1, 2, 4)
                ),
                level=95.0,
            ),
        ),
    ),
)
