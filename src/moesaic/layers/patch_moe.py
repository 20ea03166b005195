"""``PatchMoE``: a convolution whose experts each process the patches routed to them.

Chowdhury et al. 2023, Section 3, for feature maps of any depth; the released WRN block is
``gate="softmax_all", gate_on="input", expert_norm=True``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive, nearest_divisors
from moesaic.experts import ConvExperts, Experts
from moesaic.layers.map_routing import check_agreement, route_map, routing_is_internal, run_fused, run_slots
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import Combine, Context, GateOn, PatchSelection, PatchSpec, autocast_dtype
from moesaic.ops.eager_conditions import in_vmap
from moesaic.routing import ExpertChoice, Router, SoftRouter
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing_record import Routing
from moesaic.tensor_checks import check_feature_map, check_tensor

__all__ = ["PatchMoE"]


class PatchMoE(RoutedLayer):
    """Routes the patches of a map (B, C, H, W) to experts and returns a map (B, C', H, W).

    Expert e has a mask M_e (1 on its patches, else 0) and a gate map G_e (its gate there, else 0):

        gate_on="output":  y_e = G_e ⊙ conv_e(f_e(M_e ⊙ x))
        gate_on="input":   y_e = conv_e(f_e(G_e ⊙ x))

    f_e is the identity, or ReLU ∘ BatchNorm_e over the whole masked map with ``expert_norm``.
    Only the selected patches are computed: L/N of the dense convolution's multiply-adds, plus the
    router's scores.

    Args:
        in_channels: Channels of the input map.
        out_channels: Channels of the output map.
        experts: Number of convolutions, or an ``Experts`` object such as ``MLPExperts``, which has its own kernel,
            bias and norm.
        patches_per_expert: L, patches of each image that an expert selects.
        patch_size: p, patches are p×p pixels of the map.
        kernel_size: Kernel size of the experts, odd.
        gate: ``"softmax_selected"``, ``"softmax_all"`` or ``"one"``; see ``ExpertChoice``.
        gate_on: Whether the gate scales an expert's output or its input.
        context: ``"map"``: a convolution sees across the borders between its patches; ``"patch"``:
            each patch is on its own, zero-padded.
        expert_norm: BatchNorm and ReLU of each expert's masked map in front of it.
        combine: ``"concat"``: each expert owns out_channels / experts channels; ``"sum"``: each
            gives all of them.
        bias: Whether the experts have one.
        pad: Whether a map whose sides p does not divide is padded with zeros, at its bottom and right, to the next
            multiples of p, and the output cut to the size of the map. Padded pixels are part of the last patches; with
            ``expert_norm`` they count in the statistics. False: an error.
        router: Another router in place of expert choice, with its own gate, patch size and number of patches.

    >>> import torch, moesaic
    >>> layer = moesaic.PatchMoE(64, 64, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
    >>> layer(torch.randn(2, 64, 16, 16)).shape
    torch.Size([2, 64, 16, 16])

    Its arguments are readable as attributes; ``experts`` and ``router`` are the modules, and
    ``len(layer.experts)`` the count.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        experts: int | Experts,
        patches_per_expert: int | None = None,
        patch_size: int = 1,
        kernel_size: int = 1,
        gate: ExpertGate = "softmax_selected",
        gate_on: GateOn = "output",
        context: Context = "map",
        expert_norm: bool = False,
        combine: Combine = "concat",
        bias: bool = True,
        pad: bool = False,
        router: Router | nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("PatchMoE", in_channels=in_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.gate_on: GateOn = check_choice("PatchMoE", "gate_on", gate_on, get_args(GateOn))
        self.context: Context = check_choice("PatchMoE", "context", context, get_args(Context))
        self.combine: Combine = check_choice("PatchMoE", "combine", combine, get_args(Combine))
        self.pad = pad
        if isinstance(experts, Experts):
            self.experts = experts
            check_agreement(
                "PatchMoE",
                "its experts have",
                kernel_size=(kernel_size, 1, experts.kernel_size),
                expert_norm=(expert_norm, False, experts.norm is not None),
                bias=(bias, True, experts.has_bias),
            )
        else:
            check_positive("PatchMoE", experts=experts)
            width = self._expert_width(experts)
            self.experts = ConvExperts(
                experts, in_channels, width, kernel_size, bias=bias, norm=expert_norm, device=device, dtype=dtype
            )
        self._check_experts(self.experts)
        if router is None:
            if patches_per_expert is None:
                raise TypeError("PatchMoE: patches_per_expert is missing; say how many patches each expert takes")
            router = ExpertChoice(
                in_channels, len(self.experts), patches_per_expert, patch_size, gate=gate, device=device, dtype=dtype
            )
        elif not isinstance(router, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"PatchMoE: router={router!r} is a {type(router).__name__}; give a router object such as "
                f"moesaic.TokenChoice({in_channels}, {len(self.experts)})"
            )
        self.router = router
        self._patch_size = patch_size
        check_agreement(
            "PatchMoE",
            "its router has",
            patches_per_expert=(patches_per_expert, None, self.patches_per_expert),
            patch_size=(patch_size, 1, self.patch_size),
            gate=(gate, "softmax_selected", self.gate),
        )
        if isinstance(router, SoftRouter):
            self._check_soft()

    @property
    def patch_size(self) -> int:
        return getattr(self.router, "patch_size", self._patch_size)

    @property
    def patches_per_expert(self) -> int | None:
        """L, or None if the router has no such number."""
        return getattr(self.router, "patches_per_expert", None)

    @property
    def gate(self) -> str | None:
        return getattr(self.router, "gate", None)

    @property
    def kernel_size(self) -> int:
        return self.experts.kernel_size

    @property
    def expert_norm(self) -> bool:
        return self.experts.norm is not None

    @property
    def bias(self) -> bool:
        return self.experts.has_bias

    def forward(self, x: Tensor) -> Tensor:
        check_tensor("PatchMoE", x, "maps (B, C, H, W)")
        plain = x.is_contiguous() or in_vmap()  # which knows no other memory format
        memory_format = torch.contiguous_format if plain else torch.channels_last
        padded = self.expert_input(x)
        y = run_fused(self, self.router, self.experts, padded, self.spec)
        if y is None:
            y = self._run(padded, (x.shape[2], x.shape[3]))
        if padded.shape != x.shape:
            y = y[..., : x.shape[2], : x.shape[3]]
        return y.contiguous(memory_format=memory_format)

    def prepare(self, x: Tensor) -> tuple[Tensor, Routing, PatchSelection | None]:
        """Checks a map, pads it, puts it in channels_last, routes it and calls the routing hooks.

        Returns:
            The map that the experts read, its routing, and the state of the choice if kernels made it.
        """
        padded = self.expert_input(x)
        routing, selection = self._route_to_experts(padded, (x.shape[2], x.shape[3]))
        return padded, routing, selection

    def expert_input(self, x: Tensor) -> Tensor:
        """Returns the map that the experts read: checked, padded, and in channels_last."""
        self._check_input(x)
        padded = self._padded(x)
        return padded if in_vmap() else padded.contiguous(memory_format=torch.channels_last)

    def pads(self, x: Tensor) -> bool:
        """Whether a map (B, C, H, W) is padded."""
        return self.pad and bool(x.shape[2] % self.patch_size or x.shape[3] % self.patch_size)

    def route(self, x: Tensor) -> Routing:
        """The routing of a map, without running the experts."""
        self._check_input(x)
        routing, _ = self._route(self._padded(x), (x.shape[2], x.shape[3]))
        return routing

    @property
    def spec(self) -> PatchSpec:
        """How experts apply to patches, as backends take it."""
        return PatchSpec(self.patch_size, self.gate_on, self.context, self.combine)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, gate_on={self.gate_on!r}, context={self.context!r}, "
            f"combine={self.combine!r}{', pad=True' * self.pad}"
        )

    def _run(self, padded: Tensor, size: tuple[int, int]) -> Tensor:
        """Routes a map that had this size before it was padded, and runs the experts."""
        routing, selection = self._route_to_experts(padded, size)
        if routing.chooser == "soft":
            self._check_soft()
            return run_slots(self.experts, padded, routing, self.patch_size, self.combine)
        return self.experts(padded, routing, self.spec, selection)

    def _route_to_experts(self, padded: Tensor, size: tuple[int, int]) -> tuple[Routing, PatchSelection | None]:
        routing, selection = self._route(padded, size, routing_is_internal(self, self.experts))
        self._call_routing_hooks(routing)
        return routing, selection

    def _padded(self, x: Tensor) -> Tensor:
        H, W, p = x.shape[2], x.shape[3], self.patch_size
        return F.pad(x, (0, -W % p, 0, -H % p)) if self.pads(x) else x

    def _route(self, x: Tensor, size: tuple[int, int], detached: bool = False) -> tuple[Routing, PatchSelection | None]:
        """The routing of a map that had this size before it was padded."""
        count = len(self.experts)
        routing, selection = route_map("PatchMoE", self.router, x, count, self.patch_size, detached=detached)
        if size != (x.shape[2], x.shape[3]):
            routing = replace(routing, extent=(size[0] / self.patch_size, size[1] / self.patch_size))
        return routing, selection

    def _expert_width(self, experts: int) -> int:
        if self.combine == "sum":
            return self.out_channels
        if self.out_channels % experts:
            lower, upper = self.out_channels // experts * experts, (self.out_channels // experts + 1) * experts
            fits = f"{lower} or {upper}" if lower else f"{upper}"
            divisors = nearest_divisors(self.out_channels, experts)
            raise ValueError(
                f"PatchMoE: out_channels={self.out_channels} cannot be shared by experts={experts} under "
                f"combine='concat'; use experts={divisors}, out_channels={fits}, or combine='sum'"
            )
        return self.out_channels // experts

    def _check_experts(self, experts: Experts) -> None:
        width = self._expert_width(len(experts))
        if experts.in_channels != self.in_channels or experts.out_channels != width:
            raise ValueError(
                f"PatchMoE: the experts map {experts.in_channels} to {experts.out_channels} channels each, but "
                f"in_channels={self.in_channels}, out_channels={self.out_channels} under combine={self.combine!r} "
                f"needs {self.in_channels} to {width}"
            )

    def _check_soft(self) -> None:
        for option, value, needed, why in (
            ("gate_on", self.gate_on, "output", "a slot's weight applies to what comes out of it"),
            ("expert_norm", self.expert_norm, False, "slots are mixtures, so there is no masked map to normalise"),
            ("context", self.context if self.kernel_size > 1 else "patch", "patch", "slots have no neighbours"),
        ):
            if value != needed:
                raise ValueError(f"PatchMoE: {option}={value!r} has no meaning under SoftRouter: {why}; use {needed!r}")

    def _check_input(self, x: Tensor) -> None:
        weight = self.experts.first_weight
        check_feature_map("PatchMoE", x, self.in_channels, self.patch_size, weight, pad=self.pad)
        if x.dtype != weight.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"PatchMoE: the map is {x.dtype}, the weights are {weight.dtype}; convert one of them with "
                ".to(dtype), or run under torch.autocast"
            )
