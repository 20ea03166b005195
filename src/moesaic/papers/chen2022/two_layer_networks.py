"""The two-layer networks of Chen et al. 2022, T at a time: single networks, and mixtures that route samples.

An expert sums the responses of its filters over all patches of a sample (eq. 3.1), a router scores the sum of the
patches, and the sample goes to the expert with the largest score (Section 3.2):

    f_m(x) = Σ_j a_j Σ_p σ(⟨w_mj, x_p⟩ + b_mj)        h_m(x) = ⟨θ_m, Σ_p x_p⟩        F(x) = π_m(x) f_m(x)

As printed all a_j are 1 and there is no bias. The released code has two logits, each the sum of half of the
filters; its loss depends on their difference alone, so here the a_j are +1 and −1 and there is one logit.

Letters: T trials, B samples, N patches (the paper's P), D dimensions (its d), E experts (its M), J filters
of an expert, K clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.paper_fidelity import Fidelity

__all__ = ["FilterActivation", "Mixture", "Mixtures"]

FilterActivation = Literal["identity", "cubic", "relu", "celu", "gelu", "tanh"]


@dataclass(frozen=True)
class Mixture:
    """Architecture of a network: one expert (a single network, without a router) or several.

    >>> Mixture.of("print").experts, Mixture.of("print").filters
    (8, 16)
    >>> Mixture.single("released", "gelu").filters
    128
    """

    experts: int = 8
    """M, number of experts."""
    filters: int = 16
    """J, number of filters per expert."""
    activation: FilterActivation = "cubic"
    two_logits: bool = False
    """Whether half of the filters have the sign −1, for the other class."""
    bias: bool = False
    gate: Literal["softmax", "raw"] = "softmax"
    """The factor on the winner's output: softmax(h), or as released h + noise."""
    softmax_twice: bool = False
    """As released: the loss takes the probabilities for logits, so it is bounded, and never below 0.3133."""
    data_scale: float = 1.0
    """Factor of the patches."""
    init: Literal["normal", "uniform"] = "normal"
    init_scale: float = 0.01
    """σ0 of N(0, σ0²); or of the interval ±1/√D, which is torch's own, its multiple."""
    noise_in_test: bool = False
    """Whether routing on test samples has Unif[0, 1] noise, too."""

    def __post_init__(self) -> None:
        check_positive("Mixture", experts=self.experts, filters=self.filters)
        check_choice("Mixture", "activation", self.activation, get_args(FilterActivation))
        check_choice("Mixture", "gate", self.gate, ("softmax", "raw"))
        check_choice("Mixture", "init", self.init, ("normal", "uniform"))
        if self.two_logits and self.filters % 2:
            raise ValueError(f"Mixture: filters={self.filters} cannot be halved between two logits; use an even number")
        for name in ("data_scale", "init_scale"):
            value: float = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"Mixture: {name}={value}; it must be positive and finite")

    @classmethod
    def of(
        cls, fidelity: Fidelity, activation: FilterActivation = "cubic", *, experts: int = 8, filters: int = 16
    ) -> Mixture:
        """Returns a mixture of experts as printed (with σ0 = 0.01, which the paper does not give) or as released."""
        check_choice("Mixture", "fidelity", fidelity, ("print", "released"))
        printed = cls(experts, filters, activation)
        if fidelity == "print":
            return printed
        return replace(
            printed,
            two_logits=True,
            bias=True,
            gate="raw",
            softmax_twice=True,
            data_scale=10.0,
            init="uniform",
            init_scale=0.001,
            noise_in_test=True,
        )

    @classmethod
    def single(cls, fidelity: Fidelity, activation: FilterActivation = "cubic", filters: int = 128) -> Mixture:
        """Returns a single network; as released it starts from torch's own initial weights and has one softmax."""
        alone = cls.of(fidelity, activation, experts=1, filters=filters)
        if fidelity == "print":
            return alone
        return replace(alone, softmax_twice=False, init_scale=1.0, noise_in_test=False)

    @property
    def routed(self) -> bool:
        """Whether there is more than one expert."""
        return self.experts > 1


@dataclass(frozen=True, eq=False)
class Mixtures:
    """T networks of one kind."""

    model: Mixture
    weights: Tensor
    """(T, E, J, D)."""
    bias: Tensor | None
    """(T, E, J)."""
    router: Tensor | None
    """(T, E, D); None for a single network."""

    @classmethod
    def initial(cls, model: Mixture, keys: Tensor, *, dim: int, dtype: torch.dtype = torch.float32) -> Mixtures:
        """Returns networks with random filters and zero routers (Algorithm 1, steps 1 and 2)."""
        E, J = model.experts, model.filters
        bound = model.init_scale / math.sqrt(dim)

        def drawn(stream: str, *shape: int) -> Tensor:
            if model.init == "normal":
                return (model.init_scale * keyed_random.normal(keys, stream, *shape)).to(dtype)
            return (bound * (2 * keyed_random.uniform(keys, stream, *shape) - 1)).to(dtype)

        return cls(
            model,
            drawn("mixtures/weights", E, J, dim),
            drawn("mixtures/bias", E, J) if model.bias else None,
            torch.zeros(len(keys), E, dim, device=keys.device, dtype=dtype) if model.routed else None,
        )

    def __len__(self) -> int:
        """T, the number of trials."""
        return len(self.weights)

    @property
    def signs(self) -> Tensor:
        """(J,): a_j."""
        signs = self.weights.new_ones(self.model.filters)
        if self.model.two_logits:
            signs[self.model.filters // 2 :] = -1
        return signs

    def scores(self, patches: Tensor) -> Tensor:
        """Returns the scores h (T, B, E) of unscaled patches (T, B, N, D); zeros for a single network."""
        if self.router is None:
            return patches.new_zeros(*patches.shape[:2], 1)
        return (self.model.data_scale * patches.sum(dim=2)) @ self.router.transpose(1, 2)

    def expert_outputs(self, patches: Tensor) -> Tensor:
        """Returns the outputs f_m (T, B, E) of all experts on unscaled patches (T, B, N, D)."""
        T, B, N, D = patches.shape
        E, J = self.model.experts, self.model.filters
        flat = (self.model.data_scale * patches).view(T, B * N, D)
        pre = flat @ self.weights.view(T, E * J, D).transpose(1, 2)
        if self.bias is not None:
            pre += self.bias.view(T, 1, E * J)
        value, _, _ = activate(self.model.activation, pre)
        return value.view(T, B, N, E, J).sum(dim=2) @ self.signs

    def choose(self, scores: Tensor, noise: Tensor | None = None) -> Tensor:
        """(T, B) int64: the expert with the largest score, or the largest sum of score and noise."""
        return (scores if noise is None else scores + noise).argmax(dim=2)

    def predict(self, patches: Tensor, noise: Tensor | None = None, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Returns the outputs F and the experts, (T, B) each, of unscaled patches (T, B, N, D)."""
        outputs: list[Tensor] = []
        chosen: list[Tensor] = []
        for start in range(0, patches.shape[1], block):
            part = patches[:, start : start + block]
            scores = self.scores(part)
            moved = None if noise is None else noise[:, start : start + block]
            index = self.choose(scores, moved)
            output = self.expert_outputs(part).gather(2, index[..., None])[..., 0]
            outputs.append(output * self._gate(scores, moved).gather(2, index[..., None])[..., 0])
            chosen.append(index)
        return torch.cat(outputs, dim=1), torch.cat(chosen, dim=1)

    def _gate(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        if not self.model.routed:
            return torch.ones_like(scores)
        if self.model.gate == "softmax":
            return scores.softmax(dim=2)
        return scores if noise is None else scores + noise

    def of(self, which: Tensor) -> Mixtures:
        """Returns some of the networks."""
        return replace(
            self,
            weights=self.weights[which],
            bias=None if self.bias is None else self.bias[which],
            router=None if self.router is None else self.router[which],
        )


def activate(name: FilterActivation, pre: Tensor) -> tuple[Tensor, Tensor, float]:
    """σ(pre), and σ'(pre) as a tensor and a factor. ``pre`` is not needed afterwards and may be written to."""
    if name == "cubic":
        square = pre * pre
        return pre.mul_(square), square, 3.0
    if name == "identity":
        return pre, torch.ones_like(pre), 1.0
    if name == "relu":
        return F.relu(pre), (pre > 0).to(pre.dtype), 1.0
    if name == "celu":
        low = pre.clamp(max=0).exp_()
        return F.relu(pre).add_(low).sub_(1), low, 1.0
    if name == "gelu":
        below = torch.erf(pre / math.sqrt(2)).add_(1).mul_(0.5)
        slope = pre.square().mul_(-0.5).exp_().mul_(pre / math.sqrt(2 * math.pi)).add_(below)
        return pre.mul_(below), slope, 1.0
    value = pre.tanh_()
    return value, 1 - value * value, 1.0
