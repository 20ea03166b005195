"""``SampleMoE``: every sample of a batch goes to its best experts, whole networks if you like.

Chen et al. 2022, Section 3.2: F(x) = Σ_{m ∈ T_x} π_m(x) f_m(x), where T_x are the experts whose
noisy scores are largest and π is the softmax of the scores. The released code's gate is
``gate="raw"``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice, check_positive
from moesaic.experts import ConvExperts
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import run_each
from moesaic.routing.noise import Noise, draw_noise
from moesaic.routing.router import stable_topk
from moesaic.routing_record import Routing

__all__ = ["SampleGate", "SampleMoE"]

SampleGate = Literal["softmax", "raw"]


class SampleMoE(RoutedLayer):
    """Routes each sample of a batch (B, …) to its ``top_k`` experts and returns the gated sum of their answers.

    Only the experts a sample goes to run on it. Experts that come as a list run once each, on all
    of their samples together, and the host waits once for the device, to learn how many samples
    each has. Stacked experts run in grouped products and the host never waits.

    An expert that gets no sample of a batch does not run: in a list it has no gradient then
    (``None``), in a stack a gradient of zero. An expert of a list that normalises over the batch, as
    BatchNorm does, sees its own samples alone, and in training BatchNorm needs two values per
    channel; it fails when a 1×1 map of one sample is all there is.

    Args:
        router: any module from samples to scores (B, E), such as ``SampleRouter`` or
            ``nn.Linear``; scores are taken as float32 at least.
        experts: a list or ``nn.ModuleList`` of modules from samples (n, …) to answers (n, …), all of
            one shape; or stacked experts: ``PatchNetExperts``, ``LinearExperts``, ``MLPExperts``, or a
            module of your own with a length and ``forward(samples, routing)``.
        top_k: how many experts a sample goes to; among equals those of lower index.
        noise: added to the scores before the choice: ``"uniform"``, ``"gaussian"``, ``"gumbel"`` or None;
            see ``TokenChoice``.
        gate: ``"softmax"``: of the scores over all experts, without the noise (print); ``"raw"``: the
            chosen score itself with its noise (the released code). Gradients reach the router through it.
        noise_scale: by which the noise is multiplied.
        noise_in_eval: whether noise acts in eval mode too, as in the released code.
        generator: where noise is drawn from.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> experts = [nn.Sequential(nn.Flatten(), nn.Linear(12, 10)) for _ in range(4)]
    >>> layer = moesaic.SampleMoE(moesaic.routing.SampleRouter(3, experts=4, patch_size=2), experts)
    >>> with moesaic.record_routing(layer) as routing:
    ...     y = layer(torch.randn(6, 3, 2, 2))
    >>> y.shape, routing[""].index.shape, int(routing[""].load.sum())
    (torch.Size([6, 10]), torch.Size([6, 1, 1]), 6)
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module | Iterable[nn.Module],
        top_k: int = 1,
        noise: Noise | None = "uniform",
        gate: SampleGate = "softmax",
        *,
        noise_scale: float = 1.0,
        noise_in_eval: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(router, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"SampleMoE: router={router!r} is a {type(router).__name__}; give a module from samples to scores "
                "(B, E) such as moesaic.routing.SampleRouter"
            )
        self.router = router
        self.experts = _experts(experts)
        self._stacked = not isinstance(self.experts, nn.ModuleList)
        count = len(self.experts)  # pyright: ignore[reportArgumentType]
        check_positive("SampleMoE", experts=count, top_k=top_k)
        if top_k > count:
            raise ValueError(f"SampleMoE: top_k={top_k}, but there are {count} experts; use 1 to {count}")
        self.top_k = top_k
        self.noise: Noise | None = check_choice("SampleMoE", "noise", noise, (*get_args(Noise), None))
        self.gate: SampleGate = check_choice("SampleMoE", "gate", gate, get_args(SampleGate))
        self.noise_scale = noise_scale
        self.noise_in_eval = noise_in_eval
        self.generator = generator
        self._count = count

    def forward(self, x: Tensor) -> Tensor:
        routing = self._call_routing_hooks(self.route(x))
        return self.experts(x, routing) if self._stacked else run_each(x, routing, self._answer)

    def route(self, x: Tensor) -> Routing:
        """What is chosen for a batch, without running the experts."""
        scores = self.router(x)
        if not isinstance(scores, Tensor) or scores.shape != (x.shape[0], self._count):
            found = f"{tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise ValueError(
                f"SampleMoE: the router returned {found} for {x.shape[0]} samples and {self._count} experts; "
                f"it must return scores ({x.shape[0]}, {self._count})"
            )
        return self.choose(scores)

    def choose(self, scores: Tensor) -> Routing:
        """The choice itself: scores (B, E) in, the record of who works on which sample out."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).unsqueeze(1)
        noisy = scores
        if self.noise is not None and (self.training or self.noise_in_eval):
            noisy = scores + self.noise_scale * draw_noise(self.noise, scores, self.generator)
        index = stable_topk(noisy, self.top_k)
        gate = (scores.softmax(-1) if self.gate == "softmax" else noisy).gather(-1, index)
        return Routing("sample", scores, index, gate, chooser="unit", may_drop=False)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, noise={self.noise!r}, gate={self.gate!r}"

    def _answer(self, e: int, samples: Tensor) -> Tensor:
        """What expert e of a list answers to its samples."""
        assert isinstance(self.experts, nn.ModuleList)
        n = samples.shape[0]
        try:
            answer = self.experts[e](samples)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"SampleMoE: expert {e} got {n} sample{'s' * (n != 1)} of the batch, too few for its BatchNorm to "
                "train on; use larger batches (and drop a last one that is small), a balance loss, or GroupNorm"
            ) from error
        if not isinstance(answer, Tensor):
            raise TypeError(
                f"SampleMoE: expert {e} returned a {type(answer).__name__}; experts must return one tensor: "
                "wrap it in a module that picks what the mixture is to combine"
            )
        if answer.ndim == 0 or answer.shape[0] != n:
            raise ValueError(
                f"SampleMoE: expert {e} returned {tuple(answer.shape)} for {n} samples; its output must keep the "
                f"batch axis in front, ({n}, …)"
            )
        if not answer.is_floating_point():
            raise TypeError(
                f"SampleMoE: expert {e} returned {answer.dtype}; gates can weigh floating-point outputs alone"
            )
        return answer


def _experts(experts: nn.Module | Iterable[nn.Module]) -> nn.Module:
    """A list of modules as ``nn.ModuleList``, stacked experts as they are."""
    if isinstance(experts, ConvExperts):
        raise TypeError(
            "SampleMoE: ConvExperts run on the patches of a map; use moesaic.PatchMoE, or give a list of networks"
        )
    if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
        if isinstance(experts, nn.Sequential) or not hasattr(experts, "__len__"):
            raise TypeError(
                f"SampleMoE: experts is one {type(experts).__name__}; give a list of modules, or stacked experts, "
                "which have a length"
            )
        return experts
    modules = list(experts)
    for e, module in enumerate(modules):
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"SampleMoE: expert {e} is a {type(module).__name__}; experts are modules")
    return experts if isinstance(experts, nn.ModuleList) else nn.ModuleList(modules)
