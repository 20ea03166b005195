"""Trains many two-layer networks of Chowdhury et al. 2023 at once, each with the result that it has alone.

The experiments need hundreds of small networks: several widths, sample sizes and numbers of patches, and several trials
of each. One such network uses neither a CPU core nor a GPU fully. Here T of them train along a leading axis, each with
its own data, initial weights, order of minibatches and number of epochs. Random numbers are keyed by trial
(`moesaic.keyed_random`), so that a trial's result does not depend on the other trials.

On a CPU every thread trains trials of its own, so that no thread waits for another after each small operation. On a
GPU an epoch is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.argument_checks import check_device, check_positive
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.theory.closed_form_router import class_sums, trained_routers
from moesaic.papers.chowdhury2023.two_layer_networks import Networks, TwoLayer, error_signal, standardise_
from moesaic.papers.engine.trial_chunks import SharedProgress, check_trials, concatenate, replayable, run_chunks
from moesaic.papers.engine.trial_datasets import PatchSource, TrialData
from moesaic.training.progress import NoProgress, Progress

__all__ = ["EpochCallback", "Schedule", "TrainedNetworks", "accuracy", "train_trials"]

# Bytes of gathered patches that a chunk computes at a time. On a CPU they must stay in the cache until the second
# matmul reads them; on a GPU they must be enough to keep it busy.
_CPU_WORK, _GPU_WORK = 16 << 20, 2 << 30


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of minibatch SGD at a constant learning rate."""

    epochs: int = 150
    """Maximum number of epochs."""
    stop_at_zero_error: bool = False
    """Stop a network after its first epoch without a misclassified sample, counted before each sample's update."""
    batch: int = 20
    learning_rate: float = 0.2
    router_epochs: int = 100
    """Epochs of routers that are trained before the experts (separate training)."""
    router_learning_rate: float = 0.2
    """Their learning rate. Routers that are trained jointly use ``learning_rate``."""

    def __post_init__(self) -> None:
        check_positive("Schedule", epochs=self.epochs, batch=self.batch, router_epochs=self.router_epochs)
        for name in ("learning_rate", "router_learning_rate"):
            value: float = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"Schedule: {name}={value}; it must be positive and finite")

    @classmethod
    def of(cls, fidelity: Fidelity) -> Schedule:
        """Returns the schedule of Section 5.1, or ours.

        - print: "until zero training error", at most 600 epochs, which hardly any network needs.
        - released: 150 epochs, whatever the error.
        - best: 150 epochs, since the margin still grows at zero error. The learning rate is for patches of length 1.
        """
        if fidelity == "best":
            return cls(learning_rate=30.0)
        return cls(600, stop_at_zero_error=True) if fidelity == "print" else cls()


@dataclass(eq=False)
class TrainedNetworks:
    """T networks after training."""

    networks: Networks
    epochs: Tensor
    """(T,) int64: number of epochs."""
    errors: Tensor
    """(T,) int64: misclassified samples during the last epoch."""
    keys: Tensor
    """(T,): random keys of the trials, which also determine their test samples."""


EpochCallback = Callable[[int, Networks, Tensor], None]
"""Called before training (epoch 0) and after each epoch with the epoch, the networks that still train, and the indices
of their trials. It is called once per chunk of networks; the order of chunks is not defined."""


def train_trials(
    model: TwoLayer,
    source: PatchSource,
    *,
    trials: Iterable[int],
    samples: int,
    schedule: Schedule | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    progress: Progress | None = None,
    callback: EpochCallback | None = None,
) -> TrainedNetworks:
    """Trains one network per trial, each on its own training samples.

    Args:
        model: Architecture of the networks.
        source: Distribution of the samples.
        trials: Numbers of the trials. A trial's result depends on its number and the seed alone.
        samples: Training samples per trial.
        schedule: Hyperparameters; by default `Schedule()`.
        seed: Base seed.
        device: torch device.
        dtype: Floating-point type of weights and patches.
        chunk: Trials that train at a time; by default as many as fit the gathered patches of a minibatch into a fixed
            amount of memory.
        progress: Receives progress in epochs.
        callback: Called before training and after each epoch.

    >>> from moesaic.papers.chowdhury2023.data.synthetic_patterns import PatternPatches
    >>> source = PatternPatches(patches=8, dim=16, delta_d=0.0, delta_r=0.3, pattern_sets=4)
    >>> trained = train_trials(TwoLayer.cnn("print"), source, trials=range(3), samples=20)
    >>> trained.epochs.shape, trained.networks.kernels.shape
    (torch.Size([3]), torch.Size([3, 1, 40, 16]))
    """
    numbers = check_trials("train_trials", trials, samples, chunk)
    schedule = schedule or Schedule()
    device = check_device("train_trials", device)
    chunk = chunk or _chunk_size(model, source, len(numbers), min(schedule.batch, samples), device)
    starts = range(0, len(numbers), chunk)
    shared_progress = SharedProgress(progress or NoProgress())

    def train(start: int) -> TrainedNetworks:
        keys = keyed_random.keys(seed, numbers[start : start + chunk], device)
        data = source.draw(keys, samples, "train")
        data = replace(data, pool=data.pool.to(dtype))
        networks = Networks.initial(model, keys, patches=source.patches, dim=source.dim, classes=source.classes)
        networks = replace(networks, kernels=networks.kernels.to(dtype), output=networks.output.to(dtype))
        if model.standardise:
            networks = replace(networks, centre=_sums(data).mean(dim=1) / source.patches)
        if networks.routers is not None:
            networks = replace(networks, routers=_train_routers(networks.routers.to(dtype), data, schedule))
        return _train(networks, data, keys, schedule, shared_progress, callback, start)

    parts = run_chunks(train, starts, device, shared_progress)
    networks = concatenate([part.networks for part in parts], "kernels", "output", "routers", "centre")
    return replace(concatenate(parts, "epochs", "errors", "keys"), networks=networks)


def _chunk_size(model: TwoLayer, source: PatchSource, trials: int, batch: int, device: torch.device) -> int:
    """Returns the trials per chunk: as many as fit in memory, in equal chunks, equally many per thread."""
    visible = source.patches
    if model.kind == "separate":
        visible = min(visible, model.experts * model.selected(visible))
    work, cores = (_CPU_WORK, torch.get_num_threads()) if device.type == "cpu" else (_GPU_WORK, 1)
    most = max(1, work // (4 * batch * visible * source.dim))
    rounds = -(-trials // (cores * most))
    return -(-trials // (cores * rounds))


def accuracy(networks: Networks, data: TrialData) -> Tensor:
    """Returns each network's accuracy (T,) on its trial's samples, from 0 to 1."""
    outputs = networks.predict(data.pool, data.index)
    return _is_correct(outputs, data.labels).double().mean(dim=1)


def _is_correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns (T, B) whether the outputs (T, B, O) predict the labels; for two classes, whether y·f > 0."""
    if outputs.shape[2] == 1:
        return (2.0 * labels - 1.0) * outputs[..., 0] > 0
    return outputs.argmax(dim=2) == labels


def _train_routers(initial: Tensor, data: TrialData, schedule: Schedule) -> Tensor:
    """Trains the routers (step 2 of Algorithm 1) by the closed form.

    If the last minibatch of a pair of classes is smaller, its samples have more weight; since they are random, every
    sample gets the average weight.
    """
    classes = initial.shape[1]
    pair = 2 * data.labels.shape[1] // classes
    steps = -(-pair // schedule.batch)
    return trained_routers(
        class_sums(_sums(data), data.labels, classes),
        initial,
        learning_rate=schedule.router_learning_rate * steps / pair,
        epochs=schedule.router_epochs,
    )


def _sums(data: TrialData) -> Tensor:
    """(T, B, D): the sum of each sample's patches."""
    T, B, N = data.index.shape
    return F.embedding_bag(data.index.reshape(T * B, N), data.pool, mode="sum").view(T, B, -1)


class _Chunk:
    """Networks that train together: weights, data and buffers."""

    def __init__(self, networks: Networks, data: TrialData, keys: Tensor, schedule: Schedule) -> None:
        self.schedule = schedule
        self.data = data
        # If the experts together take more patches than a sample has, some would be gathered twice: then all kernels
        # read all patches, and a gate selects those that count.
        model, N = networks.model, networks.patches
        self.gate: Tensor | None = None
        if model.kind == "separate" and model.experts * model.selected(N) > N:
            self.gate = networks.fixed_gate(data.pool, data.index)
            self.visible = data.index[:, None].contiguous()
        else:
            self.visible = networks.select(data.pool, data.index).contiguous()
        self.epoch: Tensor = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.assign(networks, keys, torch.arange(len(keys), device=keys.device))
        self.epochs = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        self.active = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        self.errors = torch.zeros_like(self.epochs)

    def assign(self, networks: Networks, keys: Tensor, which: Tensor) -> None:
        """Makes these the networks that train, and allocates their buffers."""
        self.networks, self.keys, self.which = networks, keys, which
        T, G, B, N = self.visible.shape
        self.batch = min(self.schedule.batch, B)
        kernels = networks.kernels.view(T * G, -1, networks.kernels.shape[3])
        self.patches = kernels.new_empty(T * G, self.batch * N, kernels.shape[2])
        self.pre = kernels.new_empty(T * G, self.batch * N, kernels.shape[1])
        self.signal = torch.empty_like(self.pre)

    @property
    def state(self) -> list[Tensor]:
        """All tensors that an epoch changes."""
        return [self.networks.kernels, self.networks.output, self.epoch, self.epochs, self.errors, self.active]

    def shrink(self, selected: Tensor) -> None:
        """Continues with some of the networks."""
        self.visible, self.active, self.epochs = self.visible[selected], self.active[selected], self.epochs[selected]
        self.gate = None if self.gate is None else self.gate[selected]
        self.errors = self.errors[selected]
        self.data = replace(self.data, labels=self.data.labels[selected])
        self.assign(self.networks.of(selected), self.keys[selected], self.which[selected])

    def run_epoch(self) -> None:
        """Runs one epoch, in a new random order for every network, without host synchronization and in fixed shapes."""
        T, G, B, N = self.visible.shape
        order = keyed_random.permutations(self.keys, self.epoch, B)
        rows = self.visible.gather(2, order[:, None, :, None].expand(T, G, B, N))
        labels = self.data.labels.gather(1, order)
        gate = None
        if self.gate is not None:
            gate = self.gate.gather(2, order[:, None, :, None, None].expand_as(self.gate))
        weight = self.active.to(self.pre.dtype)[:, None]
        wrong = torch.zeros_like(self.errors)
        for start in range(0, B, self.batch):
            stop = min(start + self.batch, B)
            part = None if gate is None else gate[:, :, start:stop]
            wrong += self._step(rows[:, :, start:stop], labels[:, start:stop], weight / (stop - start), part)
        self.errors.copy_(torch.where(self.active, wrong, self.errors))
        self.epochs += self.active
        self.epoch += 1
        if self.schedule.stop_at_zero_error:
            self.active &= wrong > 0

    def _step(self, rows: Tensor, labels: Tensor, weight: Tensor, gate: Tensor | None) -> Tensor:
        """Runs one minibatch of every network; returns the number of misclassified samples (T,)."""
        networks = self.networks
        T, G, B, N = rows.shape
        K, D = self.pre.shape[2], networks.kernels.shape[3]
        patches, pre, signal = (buffer[:, : B * N] for buffer in (self.patches, self.pre, self.signal))
        if self.batch > B:  # the last, smaller minibatch needs contiguous buffers
            patches, pre, signal = (
                torch.empty_like(buffer, memory_format=torch.contiguous_format) for buffer in (patches, pre, signal)
            )
        kernels = networks.kernels.view(T * G, K, D)
        torch.index_select(self.data.pool, 0, rows.reshape(-1), out=patches.view(-1, D))
        if networks.centre is not None:
            standardise_(patches, networks.centre)
        torch.bmm(patches, kernels.transpose(1, 2), out=pre)
        outputs, output_gradient = error_signal(
            networks.model,
            pre.view(T, G, B, N, K),
            networks.output,
            labels,
            weight.expand(T, B),
            networks.patches,
            signal.view(T, G, B, N, K),
            gate,
        )
        kernels.baddbmm_(signal.transpose(1, 2), patches, alpha=-self.schedule.learning_rate)
        if output_gradient is not None:
            networks.output.sub_(output_gradient, alpha=self.schedule.learning_rate)
        return (~_is_correct(outputs, labels)).sum(dim=1)


def _train(
    networks: Networks,
    data: TrialData,
    keys: Tensor,
    schedule: Schedule,
    shared_progress: SharedProgress,
    callback: EpochCallback | None,
    first: int,
) -> TrainedNetworks:
    chunk = _Chunk(networks, data, keys, schedule)
    done = TrainedNetworks(networks, chunk.epochs.clone(), chunk.errors.clone(), keys)
    run = replayable(chunk.run_epoch, chunk.state)

    def notify(epoch: int) -> None:
        if callback is not None:
            shared_progress.call(callback, epoch, chunk.networks, chunk.which + first)

    notify(0)
    for epoch in range(1, schedule.epochs + 1):
        run()
        notify(epoch)
        shared_progress.advance(len(chunk.which))
        if not schedule.stop_at_zero_error or epoch == schedule.epochs:
            continue
        remaining = int(chunk.active.sum())
        # On a CPU a smaller chunk costs a copy; on a GPU another capture of the epoch.
        if remaining <= len(chunk.which) * (0.5 if chunk.keys.is_cuda else 0.9):
            _store(done, chunk)
            shared_progress.advance((len(chunk.which) - remaining) * (schedule.epochs - epoch))
            if not remaining:
                break
            chunk.shrink(chunk.active.nonzero()[:, 0])
            run = replayable(chunk.run_epoch, chunk.state)
    _store(done, chunk)
    return done


def _store(done: TrainedNetworks, chunk: _Chunk) -> None:
    """Copies the state of the chunk's networks to their trials' positions."""
    done.epochs[chunk.which] = chunk.epochs
    done.errors[chunk.which] = chunk.errors
    if done.networks is not chunk.networks:
        done.networks.kernels[chunk.which] = chunk.networks.kernels
        done.networks.output[chunk.which] = chunk.networks.output
