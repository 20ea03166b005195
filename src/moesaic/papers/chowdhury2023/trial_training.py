"""Train many small networks at once, each as if it were alone.

The theory papers' experiments need hundreds of two-layer networks: several widths, sample sizes and
patch counts, and several trials of each. One such network keeps neither a CPU core nor a GPU busy. Here
T of them train along a leading axis, each with its own data, initial weights and order of minibatches,
and each stops when it is done. Random numbers go by trial (`moesaic.keyed_random`), so a trial's result does
not depend on how many others train beside it.

On a CPU every core has trials of its own and works on them in one thread, so that no core waits for
another after each small operation. On a GPU an epoch is recorded once and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.checks import check_positive
from moesaic.fidelity import Fidelity
from moesaic.papers.chowdhury2023.theory.closed_form_router import class_sums, trained_routers
from moesaic.papers.chowdhury2023.two_layer_networks import Networks, TwoLayer, error_signal, standardise_
from moesaic.papers.engine.trial_data import PatchSource, TrialData
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.thread_pool import SharedProgress, check_device, check_trials, run_in_threads

__all__ = ["Schedule", "Trained", "Watch", "accuracy", "train_trials"]

# Bytes of gathered patches that a chunk has in work at a time. On a CPU what matters is that they are still
# in a cache when the second matrix product reads them; on a GPU, that launches are worth their while.
_CPU_WORK, _GPU_WORK = 16 << 20, 2 << 30


@dataclass(frozen=True)
class Schedule:
    """How the networks train: minibatch SGD at a constant rate."""

    epochs: int = 150
    """At most."""
    stop_at_zero_error: bool = False
    """Stop a network after its first epoch in which no sample was on the wrong side when its turn came."""
    batch: int = 20
    learning_rate: float = 0.2
    router_epochs: int = 100
    """Of the routers that train beforehand (separate training)."""
    router_learning_rate: float = 0.2
    """Likewise; routers that train along have the ``learning_rate``."""

    def __post_init__(self) -> None:
        check_positive("Schedule", epochs=self.epochs, batch=self.batch, router_epochs=self.router_epochs)
        for name in ("learning_rate", "router_learning_rate"):
            value: float = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"Schedule: {name}={value}; it must be positive and finite")

    @classmethod
    def of(cls, fidelity: Fidelity) -> Schedule:
        """Section 5.1, or ours.

        - print: "until zero training error"; 600 epochs at most, which hardly any network of the paper's sizes needs
        - released: 150 epochs, whatever the error
        - best: 150 epochs, since the margin still grows when the error is zero; the rate is that of
          patches of length 1
        """
        if fidelity == "best":
            return cls(learning_rate=30.0)
        return cls(600, stop_at_zero_error=True) if fidelity == "print" else cls()


@dataclass(eq=False)
class Trained:
    """T networks after training."""

    networks: Networks
    epochs: Tensor
    """(T,) int64: how many epochs each took."""
    errors: Tensor
    """(T,) int64: samples on the wrong side during its last epoch."""
    keys: Tensor
    """(T,): the random keys of the trials, which also give their test samples."""


Watch = Callable[[int, Networks, Tensor], None]
"""Called before training (0) and after each epoch with the epoch, the networks still training, and which they are.

Once for each chunk of networks; chunks come in any order."""


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
    watch: Watch | None = None,
) -> Trained:
    """Train one network for each trial number, each on ``samples`` samples of its own.

    ``chunk`` trials are in work at a time; by default as many as keep the gathered patches of a
    minibatch within a fixed budget, so that a run can be repeated exactly on the same kind of machine.

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
    turns = SharedProgress(progress or NoProgress())

    def train(start: int) -> Trained:
        keys = keyed_random.keys(seed, numbers[start : start + chunk], device)
        data = source.draw(keys, samples, "train")
        data = replace(data, pool=data.pool.to(dtype))
        networks = Networks.initial(model, keys, patches=source.patches, dim=source.dim, classes=source.classes)
        networks = replace(networks, kernels=networks.kernels.to(dtype), output=networks.output.to(dtype))
        if model.standardise:
            networks = replace(networks, centre=_sums(data).mean(dim=1) / source.patches)
        if networks.routers is not None:
            networks = replace(networks, routers=_train_routers(networks.routers.to(dtype), data, schedule))
        return _train(networks, data, keys, schedule, turns, watch, start)

    parts = [train(start) for start in starts] if device.type != "cpu" else run_in_threads(train, starts, turns)
    return Trained(
        _joined([part.networks for part in parts]),
        torch.cat([part.epochs for part in parts]),
        torch.cat([part.errors for part in parts]),
        torch.cat([part.keys for part in parts]),
    )


def _chunk_size(model: TwoLayer, source: PatchSource, trials: int, batch: int, device: torch.device) -> int:
    """As many as the budget allows, in chunks of one size, as many for every core: none waits for the last."""
    seen = source.patches
    if model.kind == "separate":
        seen = min(seen, model.experts * model.selected(seen))
    work, cores = (_CPU_WORK, torch.get_num_threads()) if device.type == "cpu" else (_GPU_WORK, 1)
    most = max(1, work // (4 * batch * seen * source.dim))
    rounds = -(-trials // (cores * most))
    return -(-trials // (cores * rounds))


def accuracy(networks: Networks, data: TrialData) -> Tensor:
    """(T,) the share of each trial's samples that its network gets right."""
    outputs = networks.predict(data.pool, data.index)
    return _right(outputs, data.labels).double().mean(dim=1)


def _right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Outputs (T, B, O) → (T, B) whether the label's side wins; y·f > 0 for two classes."""
    if outputs.shape[2] == 1:
        return (2.0 * labels - 1.0) * outputs[..., 0] > 0
    return outputs.argmax(dim=2) == labels


def _joined(parts: list[Networks]) -> Networks:
    first = parts[0]
    routers = [part.routers for part in parts if part.routers is not None]
    centres = [part.centre for part in parts if part.centre is not None]
    return replace(
        first,
        kernels=torch.cat([part.kernels for part in parts]),
        output=torch.cat([part.output for part in parts]),
        routers=torch.cat(routers) if routers else None,
        centre=torch.cat(centres) if centres else None,
    )


def _train_routers(initial: Tensor, data: TrialData, schedule: Schedule) -> Tensor:
    """Step 2 of Algorithm 1, by its closed form.

    Where the samples of a pair of classes do not fill their last minibatch, those in it count for
    more; which ones is left to chance, so every sample gets the average.
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
    """(T, B, D): of each sample the sum of its patches."""
    T, B, N = data.index.shape
    return F.embedding_bag(data.index.reshape(T * B, N), data.pool, mode="sum").view(T, B, -1)


class _Chunk:
    """Networks that train together: their weights, their data, and room to work in."""

    def __init__(self, networks: Networks, data: TrialData, keys: Tensor, schedule: Schedule) -> None:
        self.schedule = schedule
        self.data = data
        # Experts that together see more patches than there are would gather some of them twice: then all
        # kernels look at all patches, and a gate tells which count.
        model, N = networks.model, networks.patches
        self.gate: Tensor | None = None
        if model.kind == "separate" and model.experts * model.selected(N) > N:
            self.gate = networks.fixed_gate(data.pool, data.index)
            self.seen = data.index[:, None].contiguous()
        else:
            self.seen = networks.select(data.pool, data.index).contiguous()
        self.epoch: Tensor = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.take(networks, keys, torch.arange(len(keys), device=keys.device))
        self.epochs = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        self.active = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        self.errors = torch.zeros_like(self.epochs)

    def take(self, networks: Networks, keys: Tensor, which: Tensor) -> None:
        """Work on these from now on."""
        self.networks, self.keys, self.which = networks, keys, which
        T, G, B, N = self.seen.shape
        self.batch = min(self.schedule.batch, B)
        kernels = networks.kernels.view(T * G, -1, networks.kernels.shape[3])
        self.patches = kernels.new_empty(T * G, self.batch * N, kernels.shape[2])
        self.pre = kernels.new_empty(T * G, self.batch * N, kernels.shape[1])
        self.signal = torch.empty_like(self.pre)

    def shrink(self, keep: Tensor) -> None:
        """Go on with some of the networks."""
        self.seen, self.active, self.epochs = self.seen[keep], self.active[keep], self.epochs[keep]
        self.gate = None if self.gate is None else self.gate[keep]
        self.errors = self.errors[keep]
        self.data = replace(self.data, labels=self.data.labels[keep])
        self.take(self.networks.of(keep), self.keys[keep], self.which[keep])

    def run_epoch(self) -> None:
        """Every sample once, in a new order for every network. All on the device, in fixed shapes."""
        T, G, B, N = self.seen.shape
        order = keyed_random.permutations(self.keys, self.epoch, B)
        rows = self.seen.gather(2, order[:, None, :, None].expand(T, G, B, N))
        labels = self.data.labels.gather(1, order)
        gate = None
        if self.gate is not None:
            gate = self.gate.gather(2, order[:, None, :, None, None].expand_as(self.gate))
        share = self.active.to(self.pre.dtype)[:, None]
        wrong = torch.zeros_like(self.errors)
        for start in range(0, B, self.batch):
            stop = min(start + self.batch, B)
            part = None if gate is None else gate[:, :, start:stop]
            wrong += self._step(rows[:, :, start:stop], labels[:, start:stop], share / (stop - start), part)
        self.errors.copy_(torch.where(self.active, wrong, self.errors))
        self.epochs += self.active
        self.epoch += 1
        if self.schedule.stop_at_zero_error:
            self.active &= wrong > 0

    def _step(self, rows: Tensor, labels: Tensor, share: Tensor, gate: Tensor | None) -> Tensor:
        """One minibatch of every network; returns how many samples of each were on the wrong side."""
        networks = self.networks
        T, G, B, N = rows.shape
        K, D = self.pre.shape[2], networks.kernels.shape[3]
        patches, pre, signal = (room[:, : B * N] for room in (self.patches, self.pre, self.signal))
        if self.batch > B:  # the rest of the samples: too few to fill the room, which must not be torn
            patches, pre, signal = (
                torch.empty_like(room, memory_format=torch.contiguous_format) for room in (patches, pre, signal)
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
            share.expand(T, B),
            networks.patches,
            signal.view(T, G, B, N, K),
            gate,
        )
        kernels.baddbmm_(signal.transpose(1, 2), patches, alpha=-self.schedule.learning_rate)
        if output_gradient is not None:
            networks.output.sub_(output_gradient, alpha=self.schedule.learning_rate)
        return (~_right(outputs, labels)).sum(dim=1)


def _train(
    networks: Networks,
    data: TrialData,
    keys: Tensor,
    schedule: Schedule,
    turns: SharedProgress,
    watch: Watch | None,
    first: int,
) -> Trained:
    chunk = _Chunk(networks, data, keys, schedule)
    done = Trained(networks, chunk.epochs.clone(), chunk.errors.clone(), keys)
    run = _epoch_runner(chunk)

    def see(epoch: int) -> None:
        if watch is not None:
            turns.call(watch, epoch, chunk.networks, chunk.which + first)

    see(0)
    for epoch in range(1, schedule.epochs + 1):
        run()
        see(epoch)
        turns.advance(len(chunk.which))
        if not schedule.stop_at_zero_error or epoch == schedule.epochs:
            continue
        remaining = int(chunk.active.sum())
        # On a CPU a smaller chunk costs a copy; on a GPU another recording of the epoch.
        if remaining <= len(chunk.which) * (0.5 if chunk.keys.is_cuda else 0.9):
            _store(done, chunk)
            turns.advance((len(chunk.which) - remaining) * (schedule.epochs - epoch))
            if not remaining:
                break
            chunk.shrink(chunk.active.nonzero()[:, 0])
            run = _epoch_runner(chunk)
    _store(done, chunk)
    return done


def _store(done: Trained, chunk: _Chunk) -> None:
    """Keep the state of the chunk's networks at their own places."""
    done.epochs[chunk.which] = chunk.epochs
    done.errors[chunk.which] = chunk.errors
    if done.networks is not chunk.networks:
        done.networks.kernels[chunk.which] = chunk.networks.kernels
        done.networks.output[chunk.which] = chunk.networks.output


def _epoch_runner(chunk: _Chunk) -> Callable[[], None]:
    """The epoch as a function; on a GPU a recorded one, because its kernels are shorter than their launches."""
    if not chunk.keys.is_cuda:
        return chunk.run_epoch
    state = [chunk.networks.kernels, chunk.networks.output, chunk.epoch, chunk.epochs, chunk.errors, chunk.active]
    before = [each.clone() for each in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chunk.run_epoch()  # what libraries set up at the first call must not be recorded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk.run_epoch()
    for each, value in zip(state, before, strict=True):
        each.copy_(value)
    return graph.replay
