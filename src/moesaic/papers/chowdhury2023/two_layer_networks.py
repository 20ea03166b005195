"""The two-layer networks of Chowdhury et al. 2023, T at a time: separate and joint pMoE, and the CNN.

A sample has N patches. Expert s applies J neurons to L patches of its own,

    f_i(x) = Σ_s Σ_r  a_{r,s,i} · scale · Σ_{j ∈ J_s(x)} ReLU⟨w_{r,s}, x^(j)⟩ G_{j,s}(x)     (eqs. 1, 23)

and the three models differ in the selection of the patches and in their gates:

- `cnn`: one expert that takes every patch, G = 1 (eq. 5)
- `separate`: one expert a class; routers trained beforehand, then fixed; G = 1 (eq. 3)
- `joint`: routers trained with the experts; G the softmax over the chosen patches (eq. 4, with the exponential
  in its denominator that print dropped)

With two classes there is one output, whose sign is the class, and the logistic loss; with more, one
output a class and the softmax loss (Section M).

All tensors have a leading axis T of independent networks. Gradients are explicit (eqs. 13, 19, 21 and 26):
`error_signal` computes those of the pre-activations, and a kernel's gradient is the sum of patches weighted by them, so
that a step needs two matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.theory.closed_form_router import router_init_std
from moesaic.routing.router import stable_topk

__all__ = ["Networks", "TwoLayer", "error_signal", "logits", "standardise_"]

_MAX_BYTES = 2 << 30
"""Maximum size of an array over all patches of all samples; larger ones are computed in blocks of networks."""

Kind = Literal["cnn", "separate", "joint"]
OutputWeights = Literal["normal", "by_class", "alternating"]
Scale = Literal["selected", "patches", "one"]


@dataclass(frozen=True)
class TwoLayer:
    """Architecture of a network; `cnn`, `separate` and `joint` have the paper's values.

    >>> TwoLayer.joint("released").experts
    8
    """

    kind: Kind
    experts: int
    """Number of experts, k in the paper."""
    patches_per_expert: int | None
    """Number of patches per expert, l in the paper; None for all."""
    neurons: int
    """Neurons per expert, m/k in the paper."""
    scale: Scale
    """Divisor of the sum over patches: l, n or 1."""
    expert_std: float | None
    """Standard deviation of the initial kernels; None for 1/√m (eq. 8)."""
    router_std: float | None
    """Standard deviation of the initial routers; None for eq. 7."""
    output_weights: OutputWeights
    """Weights of the second layer: N(0, 1); ±1 by the expert's class; or alternating ±1.

    With more than two classes, 1 for one class and 0 for the others."""
    train_output: bool = False
    """Whether the second layer is trained; in the paper it is not."""
    standardise: bool = False
    """Whether patches are centred at the mean of the trial's training patches and scaled to length 1 first.

    The theory assumes unit vectors (Section 4.2); the paper's experiments do not normalise patches.
    """

    def __post_init__(self) -> None:
        check_choice("TwoLayer", "kind", self.kind, get_args(Kind))
        check_choice("TwoLayer", "scale", self.scale, get_args(Scale))
        check_choice("TwoLayer", "output_weights", self.output_weights, get_args(OutputWeights))
        check_positive("TwoLayer", experts=self.experts, neurons=self.neurons)
        if self.patches_per_expert is not None:
            check_positive("TwoLayer", patches_per_expert=self.patches_per_expert)
        if self.kind == "cnn" and (self.experts != 1 or self.patches_per_expert is not None):
            raise ValueError(
                f"TwoLayer: kind='cnn' has one expert that takes every patch, got experts={self.experts}, "
                f"patches_per_expert={self.patches_per_expert}; use experts=1, patches_per_expert=None"
            )
        if self.kind == "separate" and self.standardise:
            raise ValueError("TwoLayer: kind='separate' takes patches as they are given; use standardise=False")
        if self.kind != "separate" and self.output_weights == "by_class":
            raise ValueError(
                f"TwoLayer: output_weights='by_class' needs an expert for each class, which kind={self.kind!r} "
                "has not; use 'normal' or 'alternating'"
            )

    @classmethod
    def cnn(cls, fidelity: Fidelity, neurons: int | None = None) -> TwoLayer:
        """Returns the CNN (eq. 5): 40 neurons in print, 4 in the released code."""
        _printed_or_released("TwoLayer.cnn", fidelity)
        released = fidelity == "released"
        width = neurons if neurons is not None else 4 if released else 40
        return cls("cnn", 1, None, width, "patches", 0.1 if released else None, None, "normal")

    @classmethod
    def separate(
        cls, fidelity: Fidelity, *, classes: int = 2, patches_per_expert: int = 2, neurons: int = 20
    ) -> TwoLayer:
        """Returns a pMoE with separate training (eqs. 1 and 3): one expert per class (Section M: k = c)."""
        _printed_or_released("TwoLayer.separate", fidelity)
        if fidelity == "released":
            return cls("separate", classes, patches_per_expert, neurons, "patches", 0.1, 0.1, "by_class")
        return cls("separate", classes, patches_per_expert, neurons, "selected", None, None, "normal")

    @classmethod
    def joint(
        cls,
        fidelity: Fidelity,
        *,
        experts: int | None = None,
        patches_per_expert: int | None = None,
        neurons: int | None = None,
    ) -> TwoLayer:
        """Returns a pMoE with joint training of routers and experts (eqs. 1 and 4).

        The paper has 8 experts of 5 neurons with 6 patches each. ``"best"`` is our recommendation: 16 experts of 4
        neurons with 4 patches, standardised patches, small initial kernels and balanced output signs. `Schedule.of`
        has the matching schedules, `suggest_patches_per_expert` estimates the number of patches from data.
        """
        check_choice("TwoLayer.joint", "fidelity", fidelity, get_args(Fidelity))
        E, L, J = (16, 4, 4) if fidelity == "best" else (8, 6, 5)
        shape = (
            E if experts is None else experts,
            L if patches_per_expert is None else patches_per_expert,
            J if neurons is None else neurons,
        )
        if fidelity == "best":
            return cls("joint", *shape, "selected", 0.01, None, "alternating", standardise=True)
        if fidelity == "released":
            return cls("joint", *shape, "patches", 0.01, 1e-4, "normal")
        return cls("joint", *shape, "selected", None, None, "normal")

    @classmethod
    def best(
        cls, patches_per_expert: int | None = None, *, experts: int | None = None, neurons: int | None = None
    ) -> TwoLayer:
        """Returns our recommended network: `joint` with ``fidelity="best"``."""
        return cls.joint("best", experts=experts, patches_per_expert=patches_per_expert, neurons=neurons)

    @property
    def width(self) -> int:
        """m, total number of neurons of all experts."""
        return self.experts * self.neurons

    def selected(self, patches: int) -> int:
        """Returns L for samples of so many patches."""
        count = self.patches_per_expert or patches
        if count > patches:
            raise ValueError(
                f"TwoLayer: l ≤ n fails: patches_per_expert={count}, but samples have n = {patches} patches; "
                f"take at most {patches}"
            )
        return count

    def factor(self, patches: int) -> float:
        """Returns the factor of the sum over patches."""
        return {"selected": 1 / self.selected(patches), "patches": 1 / patches, "one": 1.0}[self.scale]


def _printed_or_released(owner: str, fidelity: Fidelity) -> None:
    check_choice(owner, "fidelity", fidelity, ("print", "released"))


@dataclass(eq=False)
class Networks:
    """The weights of T networks of one architecture.

    Kernels form groups with the same input patches: one group for the CNN and for joint training, one per expert in
    separate training. A group has K kernels: jointly trained routers, if any, then the neurons.
    """

    model: TwoLayer
    patches: int
    """N, number of patches of the samples."""
    kernels: Tensor
    """(T, G, K, D)."""
    output: Tensor
    """(T, m, O): the second layer, with O = 1 for two classes."""
    routers: Tensor | None
    """(T, E, D): separately trained routers, else None."""
    centre: Tensor | None = None
    """(T, D): mean that is subtracted from patches before they are scaled to length 1; None for no standardisation."""

    @classmethod
    def initial(cls, model: TwoLayer, keys: Tensor, *, patches: int, dim: int, classes: int) -> Networks:
        """Returns initial networks, one per key (eqs. 7 and 8)."""
        check_positive("Networks", patches=patches, dim=dim)
        if model.kind == "separate" and model.experts != classes:
            raise ValueError(
                f"Networks: separate training needs an expert for each class (Section M: k = c), got "
                f"experts={model.experts} for {classes} classes; use experts={classes}"
            )
        model.selected(patches)
        T, E, J = len(keys), model.experts, model.neurons
        expert_std = model.expert_std if model.expert_std is not None else model.width**-0.5
        router_std = model.router_std if model.router_std is not None else router_init_std(patches, dim)
        neurons = expert_std * keyed_random.normal(keys, "neurons", E * J, dim)
        routers = router_std * keyed_random.normal(keys, "routers", E, dim)
        if model.kind == "separate":
            kernels = neurons.view(T, E, J, dim)
        elif model.kind == "joint":
            kernels = torch.cat([routers, neurons], dim=1)[:, None]
        else:
            kernels = neurons[:, None]
        output = _output_weights(model, keys, 1 if classes == 2 else classes)
        return cls(
            model,
            patches,
            kernels.float().contiguous(),
            output.float().contiguous(),
            routers.float() if model.kind == "separate" else None,
        )

    def __len__(self) -> int:
        return len(self.kernels)

    def of(self, which: Tensor) -> Networks:
        """Returns copies of some of the networks."""
        return replace(
            self,
            kernels=self.kernels[which],
            output=self.output[which],
            routers=None if self.routers is None else self.routers[which],
            centre=None if self.centre is None else self.centre[which],
        )

    def select(self, pool: Tensor, index: Tensor) -> Tensor:
        """Returns the patches (T, G, B, N') that each group of kernels reads, from those of samples (T, B, N)."""
        if self.routers is None:
            return index[:, None]
        return index[:, None].expand(-1, self.model.experts, -1, -1).gather(3, self._chosen(pool, index))

    def fixed_gate(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, 1, B, N, E): 1 if a separately trained router selects the patch for its expert, else 0."""
        chosen = self._chosen(pool, index).transpose(1, 2)  # (T, B, E, L)
        gate = self.kernels.new_zeros(*chosen.shape[:3], index.shape[2]).scatter_(3, chosen, 1.0)
        return gate.transpose(2, 3)[:, None].contiguous()

    def _chosen(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, E, B, L): indices of the patches that each router selects."""
        return stable_topk(self.scores(pool, index).permute(0, 3, 1, 2), self.model.selected(self.patches))

    def scores(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, B, N, E): scores g of every patch."""
        if self.model.kind == "cnn":
            raise ValueError("Networks: a CNN has no routers, so its patches have no scores")
        routers = self.routers if self.routers is not None else self.kernels[:, 0, : self.model.experts]
        return _of_pool(routers, pool, index, self.centre)

    def pre_activations(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, G, B, N', K) of samples whose patches are rows of the pool."""
        seen = self.select(pool, index)
        T, G, B, N = seen.shape
        centre = None if self.centre is None else self.centre.repeat_interleave(G, dim=0)
        flat = _of_pool(self.kernels.flatten(0, 1), pool, seen.reshape(T * G, B, N), centre)
        return flat.view(T, G, B, N, -1)

    def neuron_responses(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, B, N', E, J): pre-activations of the neurons on the patches that their expert may get."""
        pre = self.pre_activations(pool, index)
        if self.model.kind == "separate":  # a group for each expert
            return pre.permute(0, 2, 3, 1, 4)
        neurons = pre[:, 0, ..., pre.shape[-1] - self.model.width :]
        return neurons.view(*neurons.shape[:-1], self.model.experts, self.model.neurons)

    def predict(self, pool: Tensor, index: Tensor) -> Tensor:
        """(T, B, O): outputs for samples whose patches are rows of the pool."""
        each = self.kernels[0].nbytes // self.kernels.shape[3] * index[0].numel()  # one number per kernel and patch
        outputs = [
            logits(self.model, some.pre_activations(pool, index[which]), some.output, self.patches)
            for which in _in_blocks(index, each)
            for some in [self if len(which) == len(self) else self.of(which)]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _output_weights(model: TwoLayer, keys: Tensor, outputs: int) -> Tensor:
    """(T, m, O) float64."""
    if model.output_weights == "normal":
        return keyed_random.normal(keys, "output", model.width, outputs)
    if model.output_weights == "by_class":
        own = torch.eye(model.experts, dtype=torch.float64, device=keys.device)
        signs = own if outputs > 1 else own[:, 1:] - own[:, :1]  # one output: class 1 is y = +1
        weights = signs.repeat_interleave(model.neurons, dim=0)
    else:
        neuron = torch.arange(model.width, device=keys.device)
        if outputs > model.width:
            raise ValueError(
                f"Networks: output_weights='alternating' gives each neuron to one class, and m ≥ c fails: "
                f"{model.width} neurons for {outputs} classes; use more neurons or output_weights='normal'"
            )
        if outputs == 1:
            weights = (1.0 - 2.0 * (neuron % 2)).double()[:, None]
        else:
            weights = F.one_hot(neuron % outputs, outputs).double()
    return weights.expand(len(keys), -1, -1).clone()


def standardise_(patches: Tensor, centre: Tensor) -> Tensor:
    """Patches (T, …, D) minus their trial's centre (T, D), scaled to length 1, in place."""
    patches.sub_(centre.view(len(centre), *[1] * (patches.ndim - 2), -1))
    length = cast("Tensor", torch.linalg.vector_norm(patches, dim=-1, keepdim=True))
    return patches.div_(length.clamp_(min=1e-12))


def _in_blocks(index: Tensor, each: int) -> tuple[Tensor, ...]:
    """Splits the indices of the networks of ``index`` (T, …) into blocks that fit in `_MAX_BYTES`."""
    return torch.split(torch.arange(len(index), device=index.device), max(1, _MAX_BYTES // max(each, 1)))


def _of_pool(kernels: Tensor, pool: Tensor, index: Tensor, centre: Tensor | None) -> Tensor:
    """⟨kernel, patch⟩ (T, B, N, K) for kernels (T, K, D) and patches (T, B, N) by row of the pool."""
    T, B, N = index.shape
    if len(pool) > B * N:
        blocks = _in_blocks(index, B * N * pool[0].nbytes)
        if len(blocks) > 1:
            parts = [(kernels[i], index[i], None if centre is None else centre[i]) for i in blocks]
            return torch.cat([_of_pool(some, pool, rows, middle) for some, rows, middle in parts])
        patches = pool[index.reshape(T, B * N)]
        if centre is not None:
            standardise_(patches, centre)
        return torch.bmm(patches, kernels.transpose(1, 2)).view(T, B, N, -1)
    each = kernels @ pool.T  # (T, K, P): every patch of the pool once, however many samples show it
    if centre is not None:
        length = torch.cdist(centre, pool, compute_mode="donot_use_mm_for_euclid_dist")  # (T, P)
        each = (each - kernels @ centre[..., None]) / length[:, None].clamp(min=1e-12)
    rows = index.reshape(T, 1, B * N).expand(-1, kernels.shape[1], -1)
    return each.gather(2, rows).view(T, -1, B, N).permute(0, 2, 3, 1)


@dataclass(eq=False)
class _Response:
    """Intermediate values of a batch, with expert axes in place of the flat axis of kernels."""

    pre: Tensor
    """(T, G, B, N', E', J): pre-activations of the neurons."""
    active: Tensor
    """Their ReLU."""
    gate: Tensor | None
    """(T, G, B, N', E'): G of eq. 4, 0 where a patch is not routed to the expert; None: 1 everywhere."""
    pooled: Tensor
    """(T, B, m): scale · Σ_j ReLU(…) G_j."""


def _respond(model: TwoLayer, pre: Tensor, patches: int, gate: Tensor | None = None) -> _Response:
    T, G, B, N = pre.shape[:4]
    routed = model.experts if model.kind == "joint" else 0
    neurons = pre[..., routed:].view(T, G, B, N, model.experts // G, model.neurons)
    active = neurons.relu()
    if routed:
        gate = _gate(pre[..., :routed], model.selected(patches))
    weighted = active if gate is None else active * gate[..., None]
    pooled = weighted.sum(dim=3)  # (T, G, B, E', J)
    flat = pooled.transpose(1, 2).reshape(T, B, model.width)
    return _Response(neurons, active, gate, flat * model.factor(patches))


def _gate(scores: Tensor, selected: int) -> Tensor:
    """Returns the softmax of scores (…, N, E) over every expert's selected patches, 0 elsewhere."""
    if selected == scores.shape[-2]:
        return scores.softmax(dim=-2)
    by_expert = scores.transpose(-1, -2)
    chosen = stable_topk(by_expert, selected)
    values = by_expert.gather(-1, chosen).softmax(dim=-1)
    return torch.zeros_like(by_expert).scatter_(-1, chosen, values).transpose(-1, -2)


def logits(model: TwoLayer, pre: Tensor, output: Tensor, patches: int) -> Tensor:
    """Outputs (T, B, O) from pre-activations (T, G, B, N', K): eqs. 1, 5 and 23."""
    return torch.bmm(_respond(model, pre, patches).pooled, output)


def error_signal(
    model: TwoLayer,
    pre: Tensor,
    output: Tensor,
    labels: Tensor,
    weight: Tensor,
    patches: int,
    out: Tensor,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of the pre-activations, written to ``out`` (T, G, B, N', K).

    The loss is Σ_i weight_i · loss(f(x_i), labels_i); weights (T, B) of 1/B give the mean, and 0 leaves a
    network as it is. Where pre-activations are of all patches although routers are fixed, ``gate``
    (T, 1, B, N, E) says which of them count (`Networks.fixed_gate`). Returns the outputs (T, B, O), and the
    gradient of ``output`` where it learns.
    """
    response = _respond(model, pre, patches, gate)
    f = torch.bmm(response.pooled, output)
    if f.shape[2] == 1:
        y = 2.0 * labels - 1.0
        slope = (-y * torch.sigmoid(-y * f[..., 0]) * weight)[..., None]
    else:
        own = labels[..., None] == torch.arange(f.shape[2], device=f.device)
        slope = (f.softmax(-1) - own.to(f.dtype)) * weight[..., None]
    # of each neuron, pooled over patches; laid out like the pre-activations
    T, G, B, _, inside, J = response.pre.shape
    through = torch.bmm(slope, output.transpose(1, 2)) * model.factor(patches)
    through = through.view(T, B, G, 1, inside, J).transpose(1, 2)

    routed = model.experts if model.kind == "joint" else 0
    neurons = out[..., routed:].view(response.pre.shape)
    torch.mul(response.pre > 0, through, out=neurons)
    if response.gate is not None:
        neurons *= response.gate[..., None]
    if response.gate is not None and routed:
        benefit = (response.active * through).sum(dim=-1)  # what each patch adds to the loss if fully gated
        mean = (benefit * response.gate).sum(dim=3, keepdim=True)
        torch.mul(response.gate, benefit - mean, out=out[..., :routed])
    return f, torch.bmm(response.pooled.transpose(1, 2), slope) if model.train_output else None
