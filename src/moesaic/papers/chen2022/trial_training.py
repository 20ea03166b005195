"""Trains many networks of Chen et al. 2022 at once (Algorithm 1), each with the result that it has alone.

Every step uses all samples. The router scores the sum of a sample's patches and sends the sample to one expert. The
samples of each expert are gathered into blocks of fixed size; the last block of an expert is padded. Shapes do not
depend on the loads, so that no step synchronizes with the host, and experts run as a few matmuls of equal size.
Experts without an activation need no blocks: their output depends only on the sum of the patches.

On a CPU, forward, loss and backward run for as many blocks at a time as fit in a fixed amount of memory. On a GPU they
run for all blocks at once, in a CUDA graph of the step. Patches are padded to a multiple of 4 numbers, with a 1 for
the bias, so that one matmul covers weights and bias.

Random numbers are keyed by trial, as in `moesaic.papers.chowdhury2023.trial_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_device, check_positive
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches
from moesaic.papers.chen2022.two_layer_networks import FilterActivation, Mixture, Mixtures, activate
from moesaic.papers.engine.trial_chunks import (
    SharedProgress,
    check_trials,
    concatenate,
    flushing_denormals,
    replayable,
    run_chunks,
)
from moesaic.training.progress import NoProgress, Progress

__all__ = ["MixtureSchedule", "StepCallback", "TrainedMixtures", "train_mixtures"]

_BLOCK = 64
"""Samples per block of an expert."""
_CPU_FLOATS = 8_000_000
"""Size of patches and filter responses that are computed at a time on a CPU: 32 MB."""
_CPU_SAMPLES = 16_000
"""Samples of all trials of a chunk, on a CPU. With fewer, threads contend for the interpreter lock."""
_CHECK_EVERY = 20
"""On a GPU, steps between two checks whether trials have stopped."""


@dataclass(frozen=True)
class MixtureSchedule:
    """Hyperparameters of full-batch training."""

    steps: int = 4000
    """Maximum number of steps."""
    learning_rate: float = 1e-3
    """Learning rate of experts and single networks."""
    router_learning_rate: float = 0.1
    optimizer: Literal["normalized", "adam"] = "normalized"
    """Gradient descent by each expert's gradient over its norm (eq. 3.4), or Adam."""
    norm: Literal["frobenius", "sum"] = "frobenius"
    """Norm of an expert's gradient: as printed, or as released the sum of the norms of weights and bias."""
    weight_decay: float = 0.0
    """Weight decay of Adam, added to the gradient."""
    balance: float = 0.0
    """Coefficient of the load-balancing loss."""
    balance_on: Literal["softmax", "raw"] = "softmax"
    """What the load-balancing loss multiplies an expert's load by: its probability, or as released h + noise."""
    stop: Literal["never", "mixture", "single"] = "never"
    """Early stopping of the released code. A mixture stops when its loss is not a new minimum and is either 0.02 above
    the minimum or at most 0.314; a single network, from step 501 on, when its loss is 0.02 above the minimum."""

    def __post_init__(self) -> None:
        check_positive("MixtureSchedule", steps=self.steps)
        check_choice("MixtureSchedule", "optimizer", self.optimizer, ("normalized", "adam"))
        check_choice("MixtureSchedule", "norm", self.norm, ("frobenius", "sum"))
        check_choice("MixtureSchedule", "balance_on", self.balance_on, ("softmax", "raw"))
        check_choice("MixtureSchedule", "stop", self.stop, ("never", "mixture", "single"))
        for name in ("learning_rate", "router_learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"MixtureSchedule: {name}={getattr(self, name)}; it must be positive and finite")
        for name in ("weight_decay", "balance"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"MixtureSchedule: {name}={getattr(self, name)}; it must be 0 or above, and finite")

    @classmethod
    def of(cls, fidelity: Fidelity, *, balance: bool = False) -> MixtureSchedule:
        """Returns the schedule of mixtures (Appendix A.2).

        - print: 4000 steps. The paper does not give the number; the printed rates need 2000 and more.
        - released: at most 501 steps. Its data are ten times as large, so its rates are 0.01 and 10 in the paper's
          units.
        - The load-balancing loss has the coefficient 1e-3, which the paper prints for images; as released 1e-4.
        """
        check_choice("MixtureSchedule", "fidelity", fidelity, ("print", "released"))
        if fidelity == "print":
            return cls(balance=1e-3 if balance else 0.0)
        return cls(501, norm="sum", stop="mixture", balance=1e-4 if balance else 0.0, balance_on="raw")

    @classmethod
    def single(cls, fidelity: Fidelity, activation: FilterActivation = "cubic") -> MixtureSchedule:
        """Returns the schedule of single networks (Appendix A.2): Adam at 0.01, or 0.003 for linear ones."""
        check_choice("MixtureSchedule", "fidelity", fidelity, ("print", "released"))
        rate = 0.003 if activation == "identity" else 0.01
        if fidelity == "print":
            return cls(501, rate, optimizer="adam", weight_decay=5e-4)
        return cls(801, rate, optimizer="adam", weight_decay=5e-4, stop="single")


@dataclass(eq=False)
class TrainedMixtures:
    """T networks after training."""

    mixtures: Mixtures
    steps: Tensor
    """(T,) int64: number of steps."""
    losses: Tensor
    """(T,): training loss at the last step."""
    errors: Tensor
    """(T,) int64: misclassified training samples at the last step."""
    dispatch: Tensor
    """(T, B) int64: expert of each training sample at the last step."""
    keys: Tensor
    """(T,): random keys of the trials, which also determine their test samples."""


StepCallback = Callable[[int, Mixtures, ClusterData, Tensor], None]
"""Called with the step, the networks, their training samples and the indices of their trials.

It is called once per chunk of trials; the order of chunks is not defined."""


def train_mixtures(
    model: Mixture,
    source: ClusterPatches,
    *,
    trials: Iterable[int],
    samples: int,
    schedule: MixtureSchedule | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    progress: Progress | None = None,
    callback: StepCallback | None = None,
    callback_steps: Iterable[int] = (),
) -> TrainedMixtures:
    """Trains one network per trial, each on its own training samples.

    Args:
        model: Architecture of the networks.
        source: Distribution of the samples.
        trials: Numbers of the trials. A trial's result depends on its number and the seed alone.
        samples: Training samples per trial.
        schedule: Hyperparameters; by default `MixtureSchedule()`.
        seed: Base seed.
        device: torch device.
        dtype: Floating-point type of weights and patches.
        chunk: Trials that train at a time; by default, on a CPU as many as fit the cache, on a GPU all.
        progress: Receives progress in steps.
        callback: Called at each of ``callback_steps``.
        callback_steps: Steps at which to call it; 0 is before training.

    >>> trained = train_mixtures(
    ...     Mixture.of("released"),
    ...     ClusterPatches.setting(1),
    ...     trials=range(2),
    ...     samples=200,
    ...     schedule=MixtureSchedule(steps=5, norm="sum"),
    ... )
    >>> trained.mixtures.weights.shape, trained.dispatch.shape
    (torch.Size([2, 8, 16, 50]), torch.Size([2, 200]))
    """
    numbers = check_trials("train_mixtures", trials, samples, chunk)
    schedule = schedule or MixtureSchedule()
    device = check_device("train_mixtures", device)
    if chunk is None:
        share = -(-len(numbers) // torch.get_num_threads())
        chunk = len(numbers) if device.type != "cpu" else max(1, min(share, _CPU_SAMPLES // samples))
    at_steps = frozenset(callback_steps)
    shared_progress = SharedProgress(progress or NoProgress())

    def train(start: int) -> TrainedMixtures:
        keys = keyed_random.keys(seed, numbers[start : start + chunk], device)
        data = source.draw(keys, samples, "train")
        mixtures = Mixtures.initial(model, keys, dim=source.dim, dtype=dtype)

        def notify(step: int, work: _Chunk, which: Tensor) -> None:
            if callback is not None and step in at_steps:
                shared_progress.call(callback, step, work.mixtures, work.data, which + start)

        with flushing_denormals():
            return _train(_Chunk(mixtures, data, keys, schedule), notify, shared_progress)

    parts = run_chunks(train, range(0, len(numbers), chunk), device, shared_progress)
    mixtures = concatenate([part.mixtures for part in parts], "weights", "bias", "router")
    return replace(concatenate(parts, "steps", "losses", "errors", "dispatch", "keys"), mixtures=mixtures)


def _train(
    work: _Chunk, notify: Callable[[int, _Chunk, Tensor], None], shared_progress: SharedProgress
) -> TrainedMixtures:
    steps, cuda = work.schedule.steps, work.keys.is_cuda
    which = torch.arange(len(work.keys), device=work.keys.device)
    done = TrainedMixtures(
        work.mixtures.of(which),
        work.steps.clone(),
        work.losses.clone(),
        work.errors.clone(),
        work.dispatch.clone(),
        work.keys,
    )
    run = replayable(work.run_step, work.state)
    notify(0, work, which)
    for step in range(1, steps + 1):
        run()
        notify(step, work, which)
        shared_progress.advance(len(which))
        if work.schedule.stop == "never" or step % (_CHECK_EVERY if cuda else 1):
            continue
        left = int(work.active.sum())
        # On a CPU going on with fewer costs a copy of their samples, on a GPU another recording of the step
        if left <= len(which) * (0.5 if cuda else 0.75):
            _store(done, work, which)
            shared_progress.advance((len(which) - left) * (steps - step))
            if not left:
                return done
            remaining = work.active.nonzero()[:, 0]
            work, which = work.of(remaining), which[remaining]
            run = replayable(work.run_step, work.state)
    _store(done, work, which)
    return done


def _store(done: TrainedMixtures, work: _Chunk, which: Tensor) -> None:
    """Copies the state of the chunk's networks to their trials' positions."""
    done.steps[which], done.losses[which] = work.steps, work.losses
    done.errors[which], done.dispatch[which] = work.errors, work.dispatch
    done.mixtures.weights[which] = work.mixtures.weights
    for stored, now in ((done.mixtures.bias, work.mixtures.bias), (done.mixtures.router, work.mixtures.router)):
        if stored is not None and now is not None:
            stored[which] = now


class _Chunk:
    """Networks that train together: weights, samples, optimizer state and buffers."""

    def __init__(self, mixtures: Mixtures, data: ClusterData, keys: Tensor, schedule: MixtureSchedule) -> None:
        self.mixtures, self.data, self.keys, self.schedule = mixtures, data, keys, schedule
        weights, device = mixtures.weights, keys.device
        T, B, N, D = data.patches.shape
        self.shape = (T, B, N, D, mixtures.model.experts, mixtures.model.filters)
        patches = data.patches.to(weights.dtype) * mixtures.model.data_scale
        self.sums = patches.sum(dim=2)
        self.width = _width(D, mixtures.model.bias)
        padded = F.pad(patches, (0, self.width - D))
        if mixtures.model.bias:
            padded[..., D] = 1
        self.patches = padded.view(T * B, N * self.width)
        # the class as +1 or −1, and 0 for the padding of blocks
        self.y = F.pad(2.0 * data.labels - 1.0, (0, 1)).to(weights.dtype)
        self.signs = mixtures.signs
        self.signs_of_patches = self.signs.repeat(N)
        # buffer for the samples of blocks: allocating it in every step costs as much as filling it
        self.picked = self.patches.new_empty(0)
        self.gradient = torch.zeros_like(weights)
        self.bias_gradient = None if mixtures.bias is None else torch.zeros_like(mixtures.bias)
        self.adam_moments = (
            [torch.zeros_like(each) for each in self._parameters for _ in range(2)]
            if schedule.optimizer == "adam"
            else []
        )
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = torch.zeros(T, dtype=torch.int64, device=device)
        self.errors = torch.zeros(T, dtype=torch.int64, device=device)
        self.active = torch.ones(T, dtype=torch.bool, device=device)
        self.losses = weights.new_zeros(T)
        self.least = weights.new_full((T,), float("inf"))
        self.dispatch = torch.zeros(T, B, dtype=torch.int64, device=device)

    def of(self, remaining: Tensor) -> _Chunk:
        """Returns a chunk of some of the networks in their current state."""
        data = ClusterData(**{each.name: getattr(self.data, each.name)[remaining] for each in fields(self.data)})
        some = _Chunk(self.mixtures.of(remaining), data, self.keys[remaining], self.schedule)
        some.step = self.step
        some.adam_moments = [each[remaining] for each in self.adam_moments]
        for name in ("steps", "errors", "active", "losses", "least", "dispatch"):
            setattr(some, name, getattr(self, name)[remaining])
        return some

    @property
    def _parameters(self) -> list[Tensor]:
        return [self.mixtures.weights, *([] if self.mixtures.bias is None else [self.mixtures.bias])]

    @property
    def state(self) -> list[Tensor]:
        """All tensors that a step changes."""
        router = [] if self.mixtures.router is None else [self.mixtures.router]
        counts = [self.step, self.steps, self.errors, self.active, self.losses, self.least, self.dispatch]
        return [*self._parameters, *router, *self.adam_moments, *counts]

    def run_step(self) -> None:
        """Runs one step of every network that has not stopped, without host synchronization and in fixed shapes."""
        if self.mixtures.router is None:
            loss, wrong = self._single_pass()
        else:
            loss, wrong = self._mixture_pass(self.mixtures.router)
        continues = self._continues(loss)
        self.losses.copy_(torch.where(self.active, loss, self.losses))
        self.errors.copy_(torch.where(self.active, wrong, self.errors))
        self.active &= continues
        self.steps += self.active
        self.step += 1
        self._update(self.active.to(loss.dtype)[:, None, None])

    def _continues(self, loss: Tensor) -> Tensor:
        """(T,): whether a network continues under the stopping rule."""
        rule = self.schedule.stop
        if rule == "never":
            return torch.ones_like(self.active)
        record = loss <= self.least
        rising = loss > self.least + 0.02
        self.least.copy_(torch.minimum(self.least, loss))
        if rule == "mixture":
            return record | ~(rising | (loss <= 0.314))
        return record | ~(rising & (self.step > 500))

    # forward and backward

    def _single_pass(self) -> tuple[Tensor, Tensor]:
        T, B, N, _, _, _ = self.shape
        loss, wrong, y = self.sums.new_zeros(T), self.errors.new_zeros(T), self.y[:, :B]
        if self.mixtures.model.activation == "identity":
            output = self._linear_outputs()[:, 0]
            loss, wrong, slope = self._loss(output, y)
            self._linear_gradients(slope[:, None])
            return loss, wrong
        patches = self.patches.view(T, B, N, self.width)
        ones, size = y.new_ones(()), self._samples_at_a_time()
        filters = self._filters()[:, 0]
        total = torch.zeros_like(filters)
        for start in range(0, B, size):
            some = patches[:, start : start + size].flatten(1, 2)
            part_loss, part_wrong, _, change = self._experts_pass(some, filters, y[:, start : start + size], ones)
            loss, wrong = loss + part_loss.sum(1), wrong + part_wrong.sum(1)
            total += change
        self._set_gradient(total[:, None])
        return loss, wrong

    def _mixture_pass(self, router: Tensor) -> tuple[Tensor, Tensor]:
        _, B, _, _, E, _ = self.shape
        scores = router @ self.sums.transpose(1, 2)  # (T, E, B)
        noisy = scores + keyed_random.coarse_uniform(self.keys, self.step, E, B).to(scores.dtype)
        index = noisy.max(dim=1).indices
        self.dispatch.copy_(torch.where(self.active[:, None], index, self.dispatch))
        chosen = index[:, None] == torch.arange(E, device=index.device)[:, None]  # (T, E, B)
        raw = self.mixtures.model.gate == "raw"
        gates = noisy if raw else scores.softmax(dim=1)
        gate = gates.gather(1, index[:, None])[:, 0]
        if self.mixtures.model.activation == "identity":
            outputs = self._linear_outputs().gather(1, index[:, None])[:, 0]
            loss, wrong, slope = self._loss(gate * outputs, self.y[:, :B])
            self._linear_gradients(chosen * (slope * gate)[:, None])
            by_gate = slope * outputs
        else:
            loss, wrong, by_gate = self._blocks_pass(chosen, index, gate)
        if raw:
            by_score = chosen * by_gate[:, None]
        else:
            by_score = (by_gate * gate)[:, None] * (chosen.to(gates.dtype) - gates)
        if self.schedule.balance:
            added, by_score = self._balanced(chosen, noisy, scores, by_score)
            loss = loss + added
        self.router_gradient = by_score @ self.sums
        return loss, wrong

    def _balanced(self, chosen: Tensor, noisy: Tensor, scores: Tensor, by_score: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the load-balancing loss E·Σ_m load_m·p_m, and ``by_score`` with its gradient added."""
        T, B, _, _, E, _ = self.shape
        factor = self.schedule.balance * E
        share = chosen.to(noisy.dtype).mean(dim=2, keepdim=True)  # (T, E, 1)
        probability = scores.softmax(dim=1)
        wanted = noisy if self.schedule.balance_on == "raw" else probability
        added = factor * (share * wanted.mean(dim=2, keepdim=True)).sum(dim=(1, 2))
        slope = share.expand(T, E, B)
        if self.schedule.balance_on == "softmax":
            slope = probability * (share - (probability * share).sum(dim=1, keepdim=True))
        return added, by_score + slope * (factor / B)

    def _linear_outputs(self) -> Tensor:
        """(T, E, B): outputs of experts without an activation, which depend only on the sums of filters and patches."""
        _, _, N, _, _, _ = self.shape
        outputs = torch.einsum("j,tejd->ted", self.signs, self.mixtures.weights) @ self.sums.transpose(1, 2)
        if self.mixtures.bias is not None:
            outputs += N * (self.mixtures.bias @ self.signs)[..., None]
        return outputs

    def _linear_gradients(self, slope: Tensor) -> None:
        """Sets the gradients of the filters from those of the experts' outputs (T, E, B)."""
        _, _, N, _, _, _ = self.shape
        self.gradient = self.signs[:, None] * (slope @ self.sums)[:, :, None]
        if self.mixtures.bias is not None:
            self.bias_gradient = self.signs * (N * slope.sum(dim=2))[..., None]

    def _blocks_pass(self, chosen: Tensor, index: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs every expert on its samples, block by block; returns loss, errors and the gradients of the gates."""
        T, B, N, _, E, J = self.shape
        S = _BLOCK
        slots, owners = _blocks(chosen, index, S)  # (T, Q·S) samples, B for none; (T, Q) experts
        Q = owners.shape[1]
        gates = F.pad(gate, (0, 1)).gather(1, slots)
        y = self.y.gather(1, slots)
        first = torch.arange(T, device=slots.device)[:, None]
        rows = (slots.clamp(max=B - 1) + first * B).view(T, Q, S)
        whose = owners + first * E
        filters = self._filters().view(T * E, J, self.width)
        loss, wrong = self.sums.new_zeros(T), self.errors.new_zeros(T)
        gate_gradients: list[Tensor] = []
        changes: list[Tensor] = []
        size = max(1, self._samples_at_a_time() // S)
        if not len(self.picked):
            self.picked = self.patches.new_empty(T * min(size, Q) * S, N * self.width)
        for start in range(0, Q, size):
            owner = whose[:, start : start + size].flatten()
            some = slice(start * S, (start + size) * S)
            picked = self.picked[: len(owner) * S]
            torch.index_select(self.patches, 0, rows[:, start : start + size].flatten(), out=picked)
            part_loss, part_wrong, by_gate, change = self._experts_pass(
                picked.view(len(owner), S * N, self.width),
                filters.index_select(0, owner),
                y[:, some].reshape(len(owner), S),
                gates[:, some].reshape(len(owner), S),
            )
            loss, wrong = loss + part_loss.view(T, -1).sum(1), wrong + part_wrong.view(T, -1).sum(1)
            gate_gradients.append(by_gate.view(T, -1))
            changes.append(change.view(T, -1, J * self.width))
        # summed by a matmul, which is deterministic; atomic additions on a GPU are not
        owned = (owners[:, None] == torch.arange(E, device=owners.device)[:, None]).to(gate.dtype)  # (T, E, Q)
        self._set_gradient((owned @ torch.cat(changes, dim=1)).view(T, E, J, self.width))
        by_gate = gate.new_zeros(T, B + 1).scatter_(1, slots, torch.cat(gate_gradients, dim=1))[:, :B]
        return loss, wrong, by_gate

    def _filters(self) -> Tensor:
        """(T, E, J, width): weights, with the bias where patches have a 1."""
        weights, bias = self.mixtures.weights, self.mixtures.bias
        known = weights if bias is None else torch.cat([weights, bias[..., None]], dim=3)
        return F.pad(known, (0, self.width - known.shape[3]))

    def _set_gradient(self, total: Tensor) -> None:
        """Sets the gradients from those of `_filters` before the signs of the filters."""
        D = self.shape[3]
        self.gradient = total[..., :D] * self.signs[:, None]
        if self.mixtures.bias is not None:
            self.bias_gradient = total[..., D] * self.signs

    def _experts_pass(
        self, patches: Tensor, filters: Tensor, y: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs samples (n, S·N, width) through filters (n, J, width), forward and backward.

        Returns losses (n, S), errors (n, S), gradients of the gates (n, S), and gradients of the filters (n, J, width)
        before their signs.
        """
        _, _, N, _, _, J = self.shape
        n, S = y.shape
        pre = torch.bmm(patches, filters.transpose(1, 2))
        value, slope, factor = activate(self.mixtures.model.activation, pre)
        outputs = (value.view(n * S, N * J) @ self.signs_of_patches).view(n, S)
        each_loss, each_wrong, by_output = self._sample_losses(gate * outputs, y)
        slope.view(n, S, N * J).mul_((by_output * gate * factor)[..., None])
        return each_loss, each_wrong, by_output * outputs, torch.bmm(slope.transpose(1, 2), patches)

    def _loss(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns loss and number of errors of each network (T,), and the gradients of the outputs (T, B)."""
        loss, wrong, slope = self._sample_losses(output, y)
        return loss.sum(dim=1), wrong.sum(dim=1), slope

    def _sample_losses(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each sample's part of the mean loss, whether it is misclassified, and the gradient of its output."""
        B = self.shape[1]
        inner = (output / 2).tanh() if self.mixtures.model.softmax_twice else output
        margin = y * inner
        loss = y.abs() * F.softplus(-margin) / B
        slope = -y * torch.sigmoid(-margin) / B
        if self.mixtures.model.softmax_twice:
            slope = slope * (1 - inner * inner) / 2
        return loss, (y * output <= 0) & (y != 0), slope

    def _samples_at_a_time(self) -> int:
        """Samples of each trial that fit in the memory limit; on a GPU all."""
        T, B, N, _, E, J = self.shape
        if self.keys.is_cuda:
            return B + E * _BLOCK
        return max(_BLOCK, _CPU_FLOATS // (T * N * (self.width + 2 * J)) // _BLOCK * _BLOCK)

    # optimizers

    def _update(self, share: Tensor) -> None:
        """Updates the weights; ``share`` (T, 1, 1) is 1 for networks that continue, 0 for the others."""
        rate = self.schedule.learning_rate
        gradients = [self.gradient, *([] if self.bias_gradient is None else [self.bias_gradient])]
        if self.schedule.optimizer == "adam":
            self._adam(gradients, share)
        else:
            # the norms of an expert's tensors, (2 or 1, T, E)
            norms = torch.stack([each.square().flatten(2).sum(dim=2).sqrt() for each in gradients])
            norm = norms.sum(dim=0) if self.schedule.norm == "sum" else norms.square().sum(dim=0).sqrt()
            # the weights of an expert without samples do not change
            factor = share[..., 0] * rate / torch.where(norm > 0, norm, 1.0)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient * factor.view(*factor.shape, *[1] * (gradient.ndim - 2)))
        if self.mixtures.router is not None:
            self.mixtures.router.sub_(self.router_gradient * (share * self.schedule.router_learning_rate))

    def _adam(self, gradients: list[Tensor], share: Tensor) -> None:
        """Adam as torch.optim has it, with its default betas and eps."""
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            first, second = self.adam_moments[2 * i : 2 * i + 2]
            gradient = gradient + self.schedule.weight_decay * parameter
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient * gradient, 0.001)
            count = self.step.to(parameter.dtype)  # already counts this step
            spread = (second / (1 - 0.999**count)).sqrt_().add_(1e-8)
            moved = first / (1 - 0.9**count) / spread
            parameter.sub_(moved * (share.view(-1, *[1] * (parameter.ndim - 1)) * self.schedule.learning_rate))


def _width(dim: int, bias: bool) -> int:
    """Length of a padded patch: space for the 1 of a bias, rounded up to a multiple of 4."""
    return -(-(dim + bias) // 4) * 4


def _blocks(chosen: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Assigns samples to blocks, each of which belongs to one expert.

    ``chosen`` (T, E, B) and ``index`` (T, B) are the routing. Returns the sample in each slot (T, Q·size), B for
    padding, and the expert of each block (T, Q). Q = ⌈B/size⌉ + E − 1 blocks suffice for any loads.
    """
    T, E, B = chosen.shape
    Q = -(-B // size) + E - 1
    turn = chosen.to(torch.int32).cumsum(dim=2, dtype=torch.int32)
    ends = ((turn[:, :, -1] + size - 1) // size).cumsum(dim=1)  # (T, E) blocks up to and with this expert
    first = F.pad(ends[:, :-1], (1, 0)) * size
    place = first.gather(1, index) + turn.gather(1, index[:, None])[:, 0] - 1
    numbers = torch.arange(B, device=index.device).expand(T, B)
    slots = torch.full((T, Q * size), B, dtype=torch.int64, device=index.device).scatter_(1, place, numbers)
    owners = (torch.arange(Q, device=index.device)[:, None] >= ends[:, None]).sum(dim=2).clamp_(max=E - 1)
    return slots, owners
