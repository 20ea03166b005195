"""Made-up findings and charts, of the size and shape of real ones: of one paper, and of two."""

import math
import random

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.glossary import GLOSSARY
from moesaic.papers.engine.findings import Finding, Source
from moesaic.report.chart import Blocks, Chart, Counts, Group, Panel, Points, Regions, Series

__all__ = ["CHARTS", "FINDINGS", "PAPERS", "SECOND_CHARTS", "SECOND_FINDINGS", "finding"]

PAPERS = (
    Source("chowdhury2023", "Patch-level Routing in Mixture-of-Experts", "Mosaics of sixteen digits; one decides."),
    Source(
        "chen2022",
        "Towards Understanding Mixture of Experts in Deep Learning",
        "Samples come in four clusters, each with its own way to tell the class. A router sends every sample to one "
        "of eight experts.",
        GLOSSARY,
    ),
)

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
    paper: str = "chowdhury2023",
) -> Finding:
    return Finding(id, paper, where, statement, fidelity, "quick", published, measured, interval, rule, verdict, 12.3)


def both(
    id: str,
    where: str,
    statement: str,
    published: float | str | None,
    *measured: tuple[float, float, float, str],
    paper: str = "chowdhury2023",
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
            paper=paper,
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
            verdict="not run here: needs --preset short",
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


SECOND_FINDINGS: tuple[Finding, ...] = (
    *both(
        "samples",  # as the first paper names one of its own
        "Table 1",
        "Nonlinear MoE reaches 99.46 % test accuracy in setting 1, and the single model only 79.48 %",
        99.46,
        (99.61, 99.4, 99.8, "holds"),
        (99.39, 99.1, 99.7, "holds"),
        paper="chen2022",
    ),
    *both(
        "regions",
        "Figure 1",
        "After training, the router sends every cluster to experts of its own",
        None,
        (4.0, 3.6, 4.4, "holds"),
        paper="chen2022",
    ),
    *both(
        "inner-products",
        "Figure 4",
        "Each nonlinear expert picks up one feature signal",
        "one each",
        (0.97, 0.9, 1.0, "holds"),
        (0.8, 0.6, 1.0, "partly: in most experts"),
        paper="chen2022",
    ),
    finding(
        "entropy-low",
        where="Table 4",
        statement="The dispatch entropy of nonlinear MoE falls to 0.098",
        published=0.098,
        measured=1.2,
        interval=(1.1, 1.3),
        verdict="fails",
        paper="chen2022",
    ),
)


def plane(trained: bool, nonlinear: bool) -> Points:
    """Four clusters of two classes each; untrained routers send samples anywhere."""
    rng = random.Random(0)
    places: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i in range(400):
        cluster, sign = i % 4, rng.choice((-1, 1))
        x = (cluster % 2 - 0.5) * 6 + sign * 0.9 + rng.gauss(0, 0.5)
        y = (cluster // 2 - 0.5) * 6 + sign * 0.4 + rng.gauss(0, 0.6)
        expert = cluster if trained and nonlinear else (cluster // 2 * 2) if trained else rng.randrange(4)
        places.setdefault((expert, sign), []).append((x, y))
    groups = tuple(
        Group(
            f"expert {expert + 1}",
            f"expert-{expert + 1}",
            tuple(x for x, _ in found),
            tuple(y for _, y in found),
            "+" if sign > 0 else "-",
            "class +1" if sign > 0 else "class −1",
        )
        for (expert, sign), found in sorted(places.items())
    )
    middles = tuple(-6 + i * 12 / 59 for i in range(60))
    values = tuple(
        tuple((x > 0) + 2 * (y > 0) if trained and nonlinear else 2 * (y > 0) if trained else 0 for x in middles)
        for y in middles
    )
    scores = tuple(tuple(abs(x) - 3 if x > 0 else 3 - abs(x) for x in middles) for _ in middles)
    return Points(groups, Regions(middles, middles, tuple(f"expert-{i}" for i in range(1, 5)), values, scores))


def growth(expert: int, nonlinear: bool) -> tuple[Series, ...]:
    steps = tuple(float(step) for step in range(0, 501, 10))
    return tuple(
        Series(
            f"feature signal {signal}",
            f"signal-{signal}",
            steps,
            tuple(
                (0.02 + (signal == expert % 4 + 1 or not nonlinear) * signal / 4) * (1 - math.exp(-step / 120))
                for step in steps
            ),
            tuple(0.03 for _ in steps),
        )
        for signal in range(1, 5)
    )


def dispatched(trained: bool) -> Counts:
    clusters, experts = tuple(f"cluster {i}" for i in range(1, 5)), tuple(str(i) for i in range(1, 9))
    even = tuple(tuple(float(500 + 7 * ((3 * c + e) % 5)) for e in range(8)) for c in range(4))
    own = {0: {5: 3971.0}, 1: {2: 4005.0, 5: 4.0}, 2: {7: 2711.0, 5: 1304.0, 0: 26.0}, 3: {1: 3979.0}}
    specialised = tuple(tuple(own[c].get(e, 0.0) for e in range(8)) for c in range(4))
    return Counts(clusters, experts, specialised if trained else even)


SECOND_CHARTS: tuple[Chart, ...] = (
    Chart(
        "figure-1",
        "chen2022",
        "Figure 1",
        "Which expert gets which samples?",
        "Samples laid out by t-SNE. Colours tell the expert that a sample goes to. After training, nonlinear experts "
        "have a cluster each; linear ones share them.",
        tuple(
            Panel(title, "", "", points=plane(trained, nonlinear))
            for nonlinear in (True, False)
            for trained, title in ((False, "at initialisation"), (True, "after training"))
        ),
        columns=2,
        row_titles=("nonlinear experts", "linear experts"),
    ),
    Chart(
        "figure-4",
        "chen2022",
        "Figure 4",
        "What do the experts learn?",
        "The inner product of an expert's weights with each of the four feature signals. One line that rises: the "
        "expert has picked one signal. Mean and standard deviation over trials.",
        tuple(Panel(f"expert {i + 1}", "iteration", "inner product", growth(i, True)) for i in range(8)),
        columns=4,
    ),
    Chart(
        "table-4",
        "chen2022",
        "Table 4",
        "Which cluster goes to which expert?",
        "How many test samples of each cluster the router sends to each expert; the darker, the more of the cluster.",
        (
            Panel("at initialisation", "expert", "", counts=dispatched(False)),
            Panel("after training", "expert", "", counts=dispatched(True)),
        ),
        columns=1,
    ),
    Chart(
        "table-1",
        "chen2022",
        "Table 1",
        "How accurate do they become?",
        "Test accuracy against training iterations, which double from point to point.",
        (
            Panel(
                "setting 1",
                "iterations",
                "test accuracy (%)",
                (
                    Series("nonlinear MoE", "moe", (125, 250, 500, 1000, 2000), (72.0, 85.0, 97.0, 99.4, 99.6)),
                    Series("single model", "single", (125, 250, 500, 1000, 2000), (60.0, 72.0, 78.0, 79.5, 79.0)),
                ),
                log_x=True,
            ),
        ),
    ),
)
