"""Train many mixtures that route samples at once, each as if it were alone (Chen et al. 2022, Algorithm 1).

Every step sees all samples. The router, which scores the sum of a sample's patches, picks an expert for each,
and only that expert works on the sample. To that end samples are laid out expert by expert in blocks of fixed
size, the last block of an expert filled up with nothing. Shapes do not depend on the loads, so nothing waits for
them, and an expert's work is a few matrix products of equal size. Experts without an activation need no blocks:
what they say depends on the sum of the patches only, and all their filters do the same.

Blocks come in turn: forward, loss and backward of as many as memory is set aside for (CPU), or all at once
(GPU, where a step is recorded once and then replayed). Patches are padded to rows of an even length, with a 1 where
filters have their bias, so that one product serves weights and bias.

Random numbers go by trial, as in `moesaic.papers.chowdhury2023.trial_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.checks import check_choice, check_positive
from moesaic.fidelity import Fidelity
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches
from moesaic.papers.chen2022.mixture_networks import FilterActivation, Mixture, Mixtures, activate
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.thread_pool import SharedProgress, check_device, check_trials, flushing_denormals, run_in_threads

__all__ = ["MixtureSchedule", "MixtureWatch", "TrainedMixtures", "train_mixtures"]

_BLOCK = 64
"""Samples in a block of one expert's work."""
_CPU_FLOATS = 8_000_000
"""Numbers of patches and filter responses that are in work at a time on a CPU: 32 MB."""
_CPU_SAMPLES = 16_000
"""Samples of a chunk's trials together, on a CPU: with fewer, threads wait for each other's Python."""
_LOOK = 20
"""On a GPU, steps between two looks at whether all trials have stopped."""


@dataclass(frozen=True)
class MixtureSchedule:
    """How the networks train, all samples in every step."""

    steps: int = 4000
    """At most."""
    learning_rate: float = 1e-3
    """Of experts and single networks."""
    router_learning_rate: float = 0.1
    optimizer: Literal["normalized", "adam"] = "normalized"
    """Gradient descent by each expert's gradient over its norm (eq. 3.4), or Adam."""
    norm: Literal["frobenius", "sum"] = "frobenius"
    """Of an expert's gradient: as printed, or as released the sum of the norms of weights and bias."""
    weight_decay: float = 0.0
    """Added to the gradient before Adam sees it."""
    balance: float = 0.0
    """The coefficient of the load-balancing loss."""
    balance_on: Literal["softmax", "raw"] = "softmax"
    """Whether the loss measures how much an expert is wanted by probabilities, or as released by h + noise."""
    stop: Literal["never", "mixture", "single"] = "never"
    """The released code's rules. A mixture stops when its loss is no new minimum and is either 0.02 above the minimum
    or at most 0.314; a single network from step 501 on when its loss is 0.02 above the minimum."""

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
        """Mixtures, Appendix A.2.

        - print: 4000 steps, of which the paper says nothing; the printed rates need 2000 and more
        - released: 501 at most. With data ten times as large, its rates are 0.01 and 10 in the paper's units
        - the load-balancing loss has the coefficient 1e-3, which the paper prints for images; as released 1e-4
        """
        check_choice("MixtureSchedule", "fidelity", fidelity, ("print", "released"))
        if fidelity == "print":
            return cls(balance=1e-3 if balance else 0.0)
        return cls(501, norm="sum", stop="mixture", balance=1e-4 if balance else 0.0, balance_on="raw")

    @classmethod
    def single(cls, fidelity: Fidelity, activation: FilterActivation = "cubic") -> MixtureSchedule:
        """Single networks, Appendix A.2: Adam at 0.01, or 0.003 for linear ones; steps as released, 501 to 801."""
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
    """(T,) int64: how many steps each took."""
    losses: Tensor
    """(T,): the loss in its last pass over the samples."""
    errors: Tensor
    """(T,) int64: samples on the wrong side then."""
    dispatch: Tensor
    """(T, B) int64: the expert that each training sample went to then."""
    keys: Tensor
    """(T,): the random keys of the trials, which also give their test samples."""


MixtureWatch = Callable[[int, Mixtures, ClusterData, Tensor], None]
"""Called before training (0) and every so many steps, with the steps done, the networks, their training samples and
which trials they are. Once for each chunk of trials; chunks come in any order."""


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
    watch: MixtureWatch | None = None,
    watch_at: Iterable[int] = (),
) -> TrainedMixtures:
    """Train one network for each trial number, each on ``samples`` samples of its own.

    ``chunk`` trials are in work at a time: by default on a CPU as many as make a step worth its calls, and on a
    GPU all of them.

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
    moments = frozenset(watch_at)
    turns = SharedProgress(progress or NoProgress())

    def train(start: int) -> TrainedMixtures:
        keys = keyed_random.keys(seed, numbers[start : start + chunk], device)
        data = source.draw(keys, samples, "train")
        mixtures = Mixtures.initial(model, keys, dim=source.dim, dtype=dtype)

        def see(step: int, work: _Chunk, which: Tensor) -> None:
            if watch is not None and step in moments:
                turns.call(watch, step, work.mixtures, work.data, which + start)

        with flushing_denormals():
            return _train(_Chunk(mixtures, data, keys, schedule), see, turns)

    starts = range(0, len(numbers), chunk)
    parts = [train(start) for start in starts] if device.type != "cpu" else run_in_threads(train, starts, turns)
    return _joined(parts)


def _joined(parts: list[TrainedMixtures]) -> TrainedMixtures:
    first = parts[0]
    if len(parts) == 1:
        return first
    several = [part.mixtures for part in parts]
    mixtures = replace(
        first.mixtures,
        weights=torch.cat([each.weights for each in several]),
        bias=None
        if first.mixtures.bias is None
        else torch.cat([each.bias for each in several if each.bias is not None]),
        router=(
            None
            if first.mixtures.router is None
            else torch.cat([each.router for each in several if each.router is not None])
        ),
    )
    return TrainedMixtures(
        mixtures,
        torch.cat([part.steps for part in parts]),
        torch.cat([part.losses for part in parts]),
        torch.cat([part.errors for part in parts]),
        torch.cat([part.dispatch for part in parts]),
        torch.cat([part.keys for part in parts]),
    )


def _train(work: _Chunk, see: Callable[[int, _Chunk, Tensor], None], turns: SharedProgress) -> TrainedMixtures:
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
    run = _step_runner(work)
    see(0, work, which)
    for step in range(1, steps + 1):
        run()
        see(step, work, which)
        turns.advance(len(which))
        if work.schedule.stop == "never" or step % (_LOOK if cuda else 1):
            continue
        left = int(work.active.sum())
        # On a CPU going on with fewer costs a copy of their samples, on a GPU another recording of the step
        if left <= len(which) * (0.5 if cuda else 0.75):
            _store(done, work, which)
            turns.advance((len(which) - left) * (steps - step))
            if not left:
                return done
            keep = work.active.nonzero()[:, 0]
            work, which = work.of(keep), which[keep]
            run = _step_runner(work)
    _store(done, work, which)
    return done


def _store(done: TrainedMixtures, work: _Chunk, which: Tensor) -> None:
    """Keep the state of the chunk's networks at their own places."""
    done.steps[which], done.losses[which] = work.steps, work.losses
    done.errors[which], done.dispatch[which] = work.errors, work.dispatch
    done.mixtures.weights[which] = work.mixtures.weights
    for kept, now in ((done.mixtures.bias, work.mixtures.bias), (done.mixtures.router, work.mixtures.router)):
        if kept is not None and now is not None:
            kept[which] = now


def _step_runner(work: _Chunk) -> Callable[[], None]:
    """The step as a function; on a GPU a recorded one, because many of its kernels are shorter than their launches."""
    if not work.keys.is_cuda:
        return work.run_step
    state = work.state
    before = [each.clone() for each in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work.run_step()  # what libraries set up at the first call must not be recorded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run_step()
    for each, value in zip(state, before, strict=True):
        each.copy_(value)
    return graph.replay


class _Chunk:
    """Networks that train together, their samples, and what the step keeps between two calls."""

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
        # the class as +1 or −1, and 0 for the nothing that blocks are filled up with
        self.y = F.pad(2.0 * data.labels - 1.0, (0, 1)).to(weights.dtype)
        self.signs = mixtures.signs
        self.signs_of_patches = self.signs.repeat(N)
        # memory for the samples of blocks, the same in every step: new memory costs as much as filling it
        self.picked = self.patches.new_empty(0)
        self.gradient = torch.zeros_like(weights)
        self.bias_gradient = None if mixtures.bias is None else torch.zeros_like(mixtures.bias)
        self.moments = (
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

    def of(self, keep: Tensor) -> _Chunk:
        """Some of the networks, as they are now."""
        data = ClusterData(**{each.name: getattr(self.data, each.name)[keep] for each in fields(self.data)})
        some = _Chunk(self.mixtures.of(keep), data, self.keys[keep], self.schedule)
        some.step = self.step
        some.moments = [each[keep] for each in self.moments]
        for name in ("steps", "errors", "active", "losses", "least", "dispatch"):
            setattr(some, name, getattr(self, name)[keep])
        return some

    @property
    def _parameters(self) -> list[Tensor]:
        return [self.mixtures.weights, *([] if self.mixtures.bias is None else [self.mixtures.bias])]

    @property
    def state(self) -> list[Tensor]:
        """All that a step changes."""
        router = [] if self.mixtures.router is None else [self.mixtures.router]
        counts = [self.step, self.steps, self.errors, self.active, self.losses, self.least, self.dispatch]
        return [*self._parameters, *router, *self.moments, *counts]

    def run_step(self) -> None:
        """One step of every network that has not stopped. All on the device, in fixed shapes."""
        if self.mixtures.router is None:
            loss, wrong = self._single_pass()
        else:
            loss, wrong = self._mixture_pass(self.mixtures.router)
        going = self._going(loss)
        self.losses.copy_(torch.where(self.active, loss, self.losses))
        self.errors.copy_(torch.where(self.active, wrong, self.errors))
        self.active &= going
        self.steps += self.active
        self.step += 1
        self._update(self.active.to(loss.dtype)[:, None, None])

    def _going(self, loss: Tensor) -> Tensor:
        """(T,): whether the rule lets a network go on."""
        rule = self.schedule.stop
        if rule == "never":
            return torch.ones_like(self.active)
        record = loss <= self.least
        rising = loss > self.least + 0.02
        self.least.copy_(torch.minimum(self.least, loss))
        if rule == "mixture":
            return record | ~(rising | (loss <= 0.314))
        return record | ~(rising & (self.step > 500))

    # what the networks say, and how the loss changes with it

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
        self._keep_gradient(total[:, None])
        return loss, wrong

    def _mixture_pass(self, router: Tensor) -> tuple[Tensor, Tensor]:
        _, B, _, _, E, _ = self.shape
        scores = router @ self.sums.transpose(1, 2)  # (T, E, B)
        noisy = scores + keyed_random.coarse(self.keys, self.step, E, B).to(scores.dtype)
        index = noisy.max(dim=1).indices
        self.dispatch.copy_(torch.where(self.active[:, None], index, self.dispatch))
        chosen = index[:, None] == torch.arange(E, device=index.device)[:, None]  # (T, E, B)
        raw = self.mixtures.model.gate == "raw"
        gates = noisy if raw else scores.softmax(dim=1)
        gate = gates.gather(1, index[:, None])[:, 0]
        if self.mixtures.model.activation == "identity":
            said = self._linear_outputs().gather(1, index[:, None])[:, 0]
            loss, wrong, slope = self._loss(gate * said, self.y[:, :B])
            self._linear_gradients(chosen * (slope * gate)[:, None])
            by_gate = slope * said
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
        """The load-balancing loss E·Σ_m (share of m)(how much m is wanted), and the slopes with its own added."""
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
        """(T, E, B): without an activation, filters add up to one, and patches to their sum."""
        _, _, N, _, _, _ = self.shape
        said = torch.einsum("j,tejd->ted", self.signs, self.mixtures.weights) @ self.sums.transpose(1, 2)
        if self.mixtures.bias is not None:
            said += N * (self.mixtures.bias @ self.signs)[..., None]
        return said

    def _linear_gradients(self, slope: Tensor) -> None:
        """From how the loss changes with what the experts say (T, E, B)."""
        _, _, N, _, _, _ = self.shape
        self.gradient = self.signs[:, None] * (slope @ self.sums)[:, :, None]
        if self.mixtures.bias is not None:
            self.bias_gradient = self.signs * (N * slope.sum(dim=2))[..., None]

    def _blocks_pass(self, chosen: Tensor, index: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every expert on its own samples, block by block; also how the loss changes with each sample's gate."""
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
        outputs: list[Tensor] = []
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
            outputs.append(by_gate.view(T, -1))
            changes.append(change.view(T, -1, J * self.width))
        # a product with who owns which block: sums in one order, which atomic additions on a GPU are not
        owned = (owners[:, None] == torch.arange(E, device=owners.device)[:, None]).to(gate.dtype)  # (T, E, Q)
        self._keep_gradient((owned @ torch.cat(changes, dim=1)).view(T, E, J, self.width))
        by_gate = gate.new_zeros(T, B + 1).scatter_(1, slots, torch.cat(outputs, dim=1))[:, :B]
        return loss, wrong, by_gate

    def _filters(self) -> Tensor:
        """(T, E, J, width): weights, and the bias where patches have a 1."""
        weights, bias = self.mixtures.weights, self.mixtures.bias
        known = weights if bias is None else torch.cat([weights, bias[..., None]], dim=3)
        return F.pad(known, (0, self.width - known.shape[3]))

    def _keep_gradient(self, total: Tensor) -> None:
        """Of `_filters`, but for the signs with which filters count."""
        D = self.shape[3]
        self.gradient = total[..., :D] * self.signs[:, None]
        if self.mixtures.bias is not None:
            self.bias_gradient = total[..., D] * self.signs

    def _experts_pass(
        self, patches: Tensor, filters: Tensor, y: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Samples (n, S·N, width) through filters (n, J, width), and back.

        Returns of each of the n the loss and the wrong samples (n, S), how the loss changes with the gate (n, S), and
        the gradient of the filters as if all of them counted positively.
        """
        _, _, N, _, _, J = self.shape
        n, S = y.shape
        pre = torch.bmm(patches, filters.transpose(1, 2))
        value, slope, factor = activate(self.mixtures.model.activation, pre)
        said = (value.view(n * S, N * J) @ self.signs_of_patches).view(n, S)
        each_loss, each_wrong, by_output = self._sample_losses(gate * said, y)
        slope.view(n, S, N * J).mul_((by_output * gate * factor)[..., None])
        return each_loss, each_wrong, by_output * said, torch.bmm(slope.transpose(1, 2), patches)

    def _loss(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of outputs (T, B): loss and errors of each network, and how the loss changes with each output."""
        loss, wrong, slope = self._sample_losses(output, y)
        return loss.sum(dim=1), wrong.sum(dim=1), slope

    def _sample_losses(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each sample's part of the mean loss, whether it is on the wrong side, and the loss's slope."""
        B = self.shape[1]
        inner = (output / 2).tanh() if self.mixtures.model.softmax_twice else output
        margin = y * inner
        loss = y.abs() * F.softplus(-margin) / B
        slope = -y * torch.sigmoid(-margin) / B
        if self.mixtures.model.softmax_twice:
            slope = slope * (1 - inner * inner) / 2
        return loss, (y * output <= 0) & (y != 0), slope

    def _samples_at_a_time(self) -> int:
        """As many of each trial as there is memory for; on a GPU all."""
        T, B, N, _, E, J = self.shape
        if self.keys.is_cuda:
            return B + E * _BLOCK
        return max(_BLOCK, _CPU_FLOATS // (T * N * (self.width + 2 * J)) // _BLOCK * _BLOCK)

    # what the networks learn from it

    def _update(self, share: Tensor) -> None:
        """``share`` (T, 1, 1) is 1 for those that go on and 0 for those that have stopped."""
        rate = self.schedule.learning_rate
        gradients = [self.gradient, *([] if self.bias_gradient is None else [self.bias_gradient])]
        if self.schedule.optimizer == "adam":
            self._adam(gradients, share)
        else:
            # the norms of an expert's tensors, (2 or 1, T, E)
            norms = torch.stack([each.square().flatten(2).sum(dim=2).sqrt() for each in gradients])
            norm = norms.sum(dim=0) if self.schedule.norm == "sum" else norms.square().sum(dim=0).sqrt()
            # an expert that got no sample has no gradient, and stays where it is
            factor = share[..., 0] * rate / torch.where(norm > 0, norm, 1.0)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient * factor.view(*factor.shape, *[1] * (gradient.ndim - 2)))
        if self.mixtures.router is not None:
            self.mixtures.router.sub_(self.router_gradient * (share * self.schedule.router_learning_rate))

    def _adam(self, gradients: list[Tensor], share: Tensor) -> None:
        """Adam as torch.optim has it, with its default betas and eps."""
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            first, second = self.moments[2 * i : 2 * i + 2]
            gradient = gradient + self.schedule.weight_decay * parameter
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient * gradient, 0.001)
            count = self.step.to(parameter.dtype)  # already counts this step
            spread = (second / (1 - 0.999**count)).sqrt_().add_(1e-8)
            moved = first / (1 - 0.9**count) / spread
            parameter.sub_(moved * (share.view(-1, *[1] * (parameter.ndim - 1)) * self.schedule.learning_rate))


def _width(dim: int, bias: bool) -> int:
    """Numbers of a padded patch: there is room for the 1 of a bias, and a multiple of 4 is what processors like."""
    return -(-(dim + bias) // 4) * 4


def _blocks(chosen: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Samples laid out expert by expert, each expert's in blocks of their own.

    ``chosen`` (T, E, B) and ``index`` (T, B) say who works on what. Returns the sample in each place
    (T, Q·size), B where there is none, and the expert of each block (T, Q). Q = ⌈B/size⌉ + E − 1 blocks
    are enough for any loads.
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
