"""Mixtures of Chen et al. 2022, ours against the released manner: milliseconds of one step of one network.

`trials.py` runs this. Both train the nonlinear mixture of setting 1 as released: 8 experts of 16 filters, 16 000
samples of four patches in 50 dimensions, all of them in every step; ten seeds, each with samples of its own. A
seed-step is one step of one network: routing noise, forward, gradients and updates. Left out on both sides: making
the data and the networks, and measuring accuracy. Neither knows the clusters.

The peer (`released_moe.py`) is a loop over the seeds. Both are timed with several settings of threads, and the best
of the one is compared with the best of the other. Two loops side by side, one on each core, are faster than the
released code is as it stands; they are in the table, too, with a ratio of their own.

Before that, both take a few steps from the same weights with the same noise, and must end with the same weights.
"""

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from measure import Timing, quartiles, synchronize
from released_moe import MaskedMixture, Training
from torch import Tensor

from moesaic import keyed_random
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches
from moesaic.papers.chen2022.trial_training import MixtureSchedule, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import Mixture, Mixtures
from moesaic.training import NoProgress

SOURCE, MODEL, RATES = ClusterPatches.setting(1), Mixture.of("released"), MixtureSchedule.of("released")
SAMPLES, SEEDS = 16_000, 10
TOLERANCE = 1e-9
"""Largest difference of two weights in float64, over the largest weight."""


def schedule(steps: int) -> MixtureSchedule:
    return MixtureSchedule(steps, RATES.learning_rate, RATES.router_learning_rate, norm=RATES.norm)


def largest_difference(samples: int = 2000, steps: int = 8) -> float:
    """Of the weights of two networks trained by both, from the same weights and with the same noise."""
    keys = keyed_random.keys(0, range(2))
    trained = train_mixtures(
        MODEL, SOURCE, trials=range(2), samples=samples, schedule=schedule(steps), dtype=torch.float64
    )
    worst = 0.0
    for trial, training in enumerate(peers(keys, samples, torch.float64)):
        for step in range(steps):
            training.step(
                keyed_random.coarse_uniform(keys[trial : trial + 1], step, MODEL.experts, samples)[0].T.double()
            )
        ours = (trained.mixtures.weights, trained.mixtures.bias, trained.mixtures.router)
        for mine, theirs in zip(ours, training.model.weights(), strict=True):
            assert mine is not None
            worst = max(worst, ((mine[trial] - theirs).abs().max() / theirs.abs().max()).item())
    return worst


def peers(keys: Tensor, samples: int, dtype: torch.dtype = torch.float32) -> list[Training]:
    """A network for each key, as ours begin."""
    start = Mixtures.initial(MODEL, keys, dim=SOURCE.dim, dtype=dtype)
    data = SOURCE.draw(keys, samples, "train")
    patches = data.patches.to(dtype) * MODEL.data_scale
    rates = RATES.learning_rate, RATES.router_learning_rate
    return [Training(MaskedMixture.like(start, t), patches[t], data.labels[t], *rates) for t in range(len(keys))]


def peer_times(trainings: list[Training], steps: int, threads: int, workers: int) -> list[float]:
    """Milliseconds of every seed-step after the first of each network: a loop over seeds, or a loop in each worker."""

    def loop(some: list[Training]) -> list[float]:
        torch.set_num_threads(threads)
        times: list[float] = []
        for training in some:
            for step in range(1 + steps):
                start = time.perf_counter()
                training.step()
                synchronize()
                if step:
                    times.append(1e3 * (time.perf_counter() - start) / workers)
        return times

    with restored_threads(), ThreadPoolExecutor(workers) as pool:
        return [each for part in pool.map(loop, [trainings[i::workers] for i in range(workers)]) for each in part]


class Stopwatch(NoProgress):
    """Notes when each step of ours is over, thread by thread."""

    def __init__(self) -> None:
        self.moments: dict[int, list[float]] = {}

    def advance(self, amount: int, note: str = "") -> None:
        synchronize()
        self.moments.setdefault(threading.get_ident(), []).append(time.perf_counter())


def our_times(seeds: int, samples: int, steps: int, threads: int, chunk: int, device: str) -> list[float]:
    """Milliseconds of every seed-step after the first two of each chunk."""
    watch = Stopwatch()
    steps += 2
    with restored_threads():
        torch.set_num_threads(threads)
        train_mixtures(
            MODEL,
            SOURCE,
            trials=range(seeds),
            samples=samples,
            schedule=schedule(steps),
            chunk=chunk,
            progress=watch,
            device=device,
        )
    times: list[float] = []
    for moments in watch.moments.values():
        for first in range(0, len(moments), steps):  # one chunk after the other
            some = moments[first + 1 : first + steps]
            times += [1e3 * (b - a) / (chunk * len(watch.moments)) for a, b in pairwise(some)]
    return times


class restored_threads:
    """Leaves torch with as many threads as before."""

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def compare(device: str, samples: int, seeds: int, steps: int, rounds: int) -> dict[str, Any]:
    """Rows for the table, and what else is worth keeping. All candidates come in turns, ``rounds`` times."""
    difference = largest_difference()
    if difference > TOLERANCE:
        raise SystemExit(f"the two do not compute the same: weights differ by {difference:.1e} of the largest")
    cores = torch.get_num_threads()
    trainings = peers(keyed_random.keys(0, range(seeds)), samples)
    for training in trainings:
        training.model.to(device)
        training.x, training.labels = training.x.to(device), training.labels.to(device)
    candidates: dict[str, Callable[[], list[float]]] = {}
    few = max(2, -(-20 // seeds))  # steps of each network of the peer: in all 20 at least, even in one round
    for threads in sorted({1, cores}):
        named = f"released manner, {threads} thread{'s' * (threads > 1)}"
        candidates[named] = lambda threads=threads: peer_times(trainings, few, threads, 1)
    if cores > 1 and device == "cpu":
        candidates[f"released manner, a loop on each of {cores} cores"] = lambda: peer_times(trainings, few, 1, cores)
    for threads, chunk in sorted({(1, 1), (cores, 1), (cores, seeds)} if device == "cpu" else {(cores, seeds)}):
        apart = f"{threads} × 1 thread" if chunk == 1 and threads > 1 else f"{threads} thread{'s' * (threads > 1)}"
        candidates[f"moesaic, {apart}, {chunk} at once"] = lambda threads=threads, chunk=chunk: our_times(
            seeds, samples, steps, threads, chunk, device
        )
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            times[name] += candidate()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    loop = min(value for name, value in medians.items() if name.startswith("released") and "each" not in name)
    loops = min(value for name, value in medians.items() if name.startswith("released"))
    rows = [
        {
            "code": name,
            "seed-step, ms": medians[name],
            "fastest, ms": min(times[name]),
            "× the loop": loop / medians[name],
            "× loops on all cores": loops / medians[name],
            "steps": len(times[name]),
            "quartiles, ms": Timing(medians[name], *quartiles(times[name])),
        }
        for name in candidates
    ]
    ours = min(value for name, value in medians.items() if name.startswith("moesaic"))
    return {
        "samples": samples,
        "seeds": seeds,
        "difference of weights": difference,
        "tolerance": TOLERANCE,
        "best against the best loop": loop / ours,
        "best against loops on all cores": loops / ours,
        "rows": rows,
    }
