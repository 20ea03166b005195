"""The experiments of Chowdhury et al. 2023, Section 5.2 and Appendix A, as cells: on which images, how many, how long.

The authors train 50 epochs on up to 50 000 images, five times. Here runs see at most `SEEN` images, so that all of
them fit on one GPU in twenty minutes: few samples get the 50 epochs, more samples fewer, and the number of steps
stays the same from then on. Both networks of a comparison train equally, and on the same images within a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.fidelity import Fidelity
from moesaic.papers.chowdhury2023.image_cells import Arm, StepCell, StepResult, WideCell, WideResult
from moesaic.papers.engine import claims
from moesaic.training.recipe import Recipe

__all__ = ["COMPARED", "EPOCHS", "FIGURES", "SEEN", "SETTLED", "TRIALS", "Figure", "epochs", "plan", "recipe"]

EPOCHS = 50
"""Of the authors' code, and of runs here where `SEEN` allows them."""
TRIALS = (5, 3)
"""On smiling faces and on vehicles as in the paper; of the other figures."""
SETTLED = 1250
"""From so many samples on, runs have 450 steps or more, and BatchNorm with Keras' momentum has averages to rely on."""


@dataclass(frozen=True)
class Figure:
    """One of the paper's figures: accuracy against samples on one task."""

    where: str
    about: str
    """The task in a few words."""
    side: int
    """Of its images."""
    paper_sizes: str
    """Numbers of samples in the authors' code."""
    sizes: Mapping[Fidelity, tuple[int, ...]]
    """Numbers of samples here."""
    trials: int = TRIALS[1]
    more_for_wrn: Mapping[Fidelity, tuple[int, ...]] = field(default_factory=dict[Fidelity, tuple[int, ...]])
    """Numbers of samples that WRN alone is tried with: how many does it need for what WRN-pMoE reaches with fewer?"""


SEEN = {64: 128_000, 32: 100_000}
"""How many images a run sees at most, by the side of the images: 1 000 and 780 steps."""

FIGURES: Mapping[str, Figure] = {
    "celeba-smiling": Figure(
        "Figure 10",
        "faces: smiling or not",
        64,
        "2 000 to 10 000",
        {"released": (1000, 2000, 4000), "best": (250, 1000, 4000)},
        TRIALS[0],
        more_for_wrn={"released": (8000,)},
    ),
    "celeba-spurious": Figure(
        "Figure 11",
        "faces: smiling or not, where in training hair nearly tells",
        64,
        "5 000 to 25 000",
        {"released": (3000,)},
    ),
    "celeba-4class": Figure(
        "Figure 12",
        "faces: smiling × eyeglasses",
        64,
        "4 000 to 16 000",
        {"released": (1250, 5000)},
    ),
    "cifar10": Figure(
        "Figure 14",
        "CIFAR-10",
        32,
        "10 000 to 50 000",
        {"released": (4000, 8000)},
    ),
    "cifar10-noise": Figure(
        "Figure 15",
        "CIFAR-10, small on a photograph of a plant",
        32,
        "10 000 to 50 000",
        {"released": (4000, 8000)},
    ),
    "cifar-vehicles": Figure(
        "Figure 16",
        "a vehicle among three animals",
        32,
        "4 000 to 20 000",
        {"released": (1000, 2000, 4000), "best": (4000,), "print": (4000,)},
        TRIALS[0],
    ),
}
"""By the name of the task."""


COMPARED: Mapping[str, tuple[int, ...]] = {"celeba-smiling": (1000, 4000), "cifar-vehicles": (4000,)}
"""Where our network is compared with the released one."""


_ROUTERS = 1e-4
"""The learning rate of routers in our recipe: `Recipe`'s own, said here because results depend on it."""


def epochs(samples: int, side: int) -> int:
    """How long a run on so many samples is.

    >>> [epochs(samples, side=64) for samples in (250, 1000, 4000, 8000)]
    [50, 50, 32, 16]
    """
    return max(min(EPOCHS, SEEN[side] // samples), 1)


def recipe(fidelity: Fidelity, samples: int, side: int, arm: Arm) -> Recipe:
    """The authors' recipe, for the network as printed too, since print names none; ours for ours."""
    long = epochs(samples, side)
    if fidelity == "best":
        return Recipe(long, router_rate=_ROUTERS if arm == "pmoe" else None)
    return Recipe(long, 128, "sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", warmup=0.0)


def plan(preset: str, fidelity: Fidelity) -> claims.Plan[WideResult | StepResult]:
    """The cells there are, by name: task, network, samples, trial."""
    if preset != "full":
        return {}
    cells: dict[str, WideCell | StepCell] = {}
    for task, figure in FIGURES.items():
        for samples in figure.sizes.get(fidelity, ()):
            cells |= _runs("wide", task, ("wrn", "pmoe"), fidelity, samples)
        for samples in figure.more_for_wrn.get(fidelity, ()):
            cells |= _runs("wide", task, ("wrn",), fidelity, samples)
    if fidelity == "released":
        cells["wide-step/both/64"] = StepCell(fidelity)
    if fidelity == "best":  # what ours is compared with
        for task, sizes in COMPARED.items():
            for samples in sizes:
                cells |= _runs("wide-released", task, ("pmoe",), "released", samples)
    return cells


def _runs(
    start: str, task: str, arms: tuple[Arm, ...], fidelity: Fidelity, samples: int
) -> dict[str, WideCell | StepCell]:
    side = FIGURES[task].side
    ours = fidelity == "best"
    return {
        f"{start}/{task}/{arm}/{samples}/{trial}": WideCell(
            task,
            arm,
            fidelity,
            samples,
            trial,
            recipe(fidelity, samples, side, arm),
            scale="standard" if ours else "unit",
            augment="flip" if ours else "none",
        )
        for trial in range(FIGURES[task].trials)
        for arm in arms
    }
