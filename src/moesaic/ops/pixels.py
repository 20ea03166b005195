"""Where the chosen pixels of a batch are, expert by expert, and where their contributions land.

Integer arithmetic on the device only: no host sync, and static shapes where experts choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import PatchSpec
from moesaic.record import NOBODY, Routing

__all__ = ["Pixels"]


@dataclass(frozen=True)
class Pixels:
    """P chosen patches of p×p pixels each, those of expert 0 first; R = P·p·p pixels.

    Values of pixels are (E, M, ·) where all experts have equally many (``ends`` is None), and
    (R, ·) where they do not; then ``ends`` (E,) says after which row each expert's pixels end.
    """

    routing: Routing
    spec: PatchSpec
    map_size: tuple[int, int]
    image_P: Tensor
    expert_P: Tensor
    gate_P: Tensor
    used_P: Tensor | None
    """None where every patch is used. What is not used reads patch 0 and is written nowhere."""
    y_Pp: Tensor
    x_Pp: Tensor
    ends: Tensor | None

    @staticmethod
    def chosen(routing: Routing, x: Tensor, spec: PatchSpec) -> Pixels:
        """The pixels of a map (B, C, H, W) that a routing by choice sends to experts."""
        if routing.index is None:
            raise ValueError("Pixels: a soft routing chooses no pixels")
        E, p = routing.experts, spec.patch_size
        H, W = x.shape[2], x.shape[3]
        each_expert = torch.arange(E, device=x.device)
        if routing.chooser == "expert":
            B, _, L = routing.index.shape
            patch_P = routing.index.transpose(0, 1).flatten()
            gate_P = routing.gate.transpose(0, 1).flatten()
            expert_P = each_expert.view(E, 1, 1).expand(E, B, L).flatten()
            image_P = torch.arange(B, device=x.device).view(1, B, 1).expand(E, B, L).flatten()
            used_P = patch_P != NOBODY if routing.may_drop else None
            ends = None
        else:
            _, N, K = routing.index.shape
            asked = routing.index.flatten()
            # whoever was dropped sits with the last expert
            expert_P, order = torch.where(asked == NOBODY, E - 1, asked).sort(stable=True)
            image_P, patch_P = order // (N * K), order // K % N
            gate_P = routing.gate.flatten().index_select(0, order)
            used_P = (asked != NOBODY).index_select(0, order) if routing.may_drop else None
            ends = torch.searchsorted(expert_P, each_expert, right=True) * p * p
        if used_P is not None:
            patch_P = patch_P.clamp_min(0)
        within = torch.arange(p, device=x.device)
        columns = W // p
        return Pixels(
            routing=routing,
            spec=spec,
            map_size=(H, W),
            image_P=image_P,
            expert_P=expert_P,
            gate_P=gate_P,
            used_P=used_P,
            y_Pp=(patch_P // columns * p).unsqueeze(1) + within,
            x_Pp=(patch_P % columns * p).unsqueeze(1) + within,
            ends=ends,
        )

    def take(self, rows: Tensor) -> Tensor:
        """The pixels' values out of a batch of maps laid out as rows (B·H·W, C)."""
        return self.grouped(rows.index_select(0, self._place(self.image_P).flatten()))

    def take_by_expert(self, maps_EHWO: Tensor) -> Tensor:
        """The pixels' values out of one map per expert."""
        return self.grouped(maps_EHWO.flatten(0, 2).index_select(0, self._place(self.expert_P).flatten()))

    def grouped(self, rows: Tensor) -> Tensor:
        """(R, ·) in the leading shape of pixel values."""
        E = self.routing.experts
        return rows if self.ends is not None else rows.view(E, rows.shape[0] // E, rows.shape[1])

    def per_patch(self, values_P: Tensor) -> Tensor:
        """A number per patch, to broadcast over the channels of its pixels."""
        return self.grouped(self._repeated(values_P).unsqueeze(1))

    def per_expert(self, values_EC: Tensor) -> Tensor:
        """A vector per expert, to broadcast over its pixels."""
        return values_EC.unsqueeze(1) if self.ends is None else values_EC.index_select(0, self._expert_R)

    def sum(self, values: Tensor) -> Tensor:
        """Pixel values summed by expert, (E, C)."""
        if self.ends is None:
            return values.sum(1)
        return values.new_zeros(self.routing.experts, values.shape[1]).index_add(0, self._expert_R, values)

    def matmul(self, values: Tensor, weight_EOC: Tensor) -> Tensor:
        """Each expert's pixels times its matrix."""
        weight_ECO = weight_EOC.transpose(1, 2)
        return torch.bmm(values, weight_ECO) if self.ends is None else _ragged_matmul(values, weight_ECO, self.ends)

    def landings(self, kernel: int) -> tuple[Tensor, Tensor | None]:
        """Where each tap of each pixel lands among the rows of the output, and the expert's gate there.

        Both (R, kernel·kernel); no gate under ``gate_on="input"``. The output's rows are (B, H, W),
        times E under ``concat``. What leaves the map, or its patch under ``context="patch"``, lands on
        rows past those: one per image and lane, lest threads queue for a single one.
        """
        H, W = self.map_size
        p, routing, lanes = self.spec.patch_size, self.routing, self.lanes
        shift = kernel // 2 - torch.arange(kernel, device=self.y_Pp.device)
        # five axes: patch, its rows, its columns, the kernel's rows, the kernel's columns
        y, x = self.y_Pp[:, :, None, None, None] + shift[:, None], self.x_Pp[:, None, :, None, None] + shift
        image, expert = self.image_P.view(-1, 1, 1, 1, 1), self.expert_P.view(-1, 1, 1, 1, 1)
        lane = expert if lanes > 1 else 0
        landing = ((image * H + y) * W + x) * lanes + lane
        stays = None if kernel == 1 else self._stays(y, x)
        inside = stays
        if self.used_P is not None:
            used = self.used_P.view(-1, 1, 1, 1, 1)
            inside = used if stays is None else stays & used
        if inside is not None:
            landing = torch.where(inside, landing, (routing.batch * H * W + image) * lanes + lane)
        landing_Rk = landing.reshape(-1, kernel * kernel)
        if self.spec.gate_on == "input":
            return landing_Rk, None
        if stays is None or self.spec.context == "patch":
            gate = self.gate_P.view(-1, 1, 1, 1, 1).expand(landing.shape)
        else:
            there = (image * routing.units + y // p * (W // p) + x // p) * routing.experts + expert
            gate = routing.weights.flatten().index_select(0, torch.where(stays, there, 0).flatten())
        return landing_Rk, gate.reshape(landing_Rk.shape)

    @property
    def lanes(self) -> int:
        """How many rows of the output a pixel has: one, or one per expert under ``concat``."""
        return self.routing.experts if self.spec.combine == "concat" else 1

    def _stays(self, y: Tensor, x: Tensor) -> Tensor:
        H, W = self.map_size
        if self.spec.context == "map":
            return ((y >= 0) & (y < H)) & ((x >= 0) & (x < W))
        p, top, left = self.spec.patch_size, self.y_Pp[:, 0], self.x_Pp[:, 0]
        down, right = y - top.view(-1, 1, 1, 1, 1), x - left.view(-1, 1, 1, 1, 1)
        return ((down >= 0) & (down < p)) & ((right >= 0) & (right < p))

    def _place(self, map_P: Tensor) -> Tensor:
        """(P, p, p): where each pixel stands among the rows of maps (·, H, W), given its patch's map."""
        H, W = self.map_size
        return (map_P.view(-1, 1, 1) * H + self.y_Pp.unsqueeze(2)) * W + self.x_Pp.unsqueeze(1)

    @property
    def _expert_R(self) -> Tensor:
        return self._repeated(self.expert_P)

    def _repeated(self, values_P: Tensor) -> Tensor:
        return values_P.unsqueeze(1).expand(-1, self.spec.patch_size**2).flatten()


def _ragged_matmul(rows: Tensor, weight_ECO: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert times their expert's matrix."""
    if rows.dtype == torch.float64 or rows.shape[0] == 0:
        # grouped_mm has no float64: one GEMM an expert, for the price of a host sync
        bounds: list[int] = [0, *ends.tolist()]
        return torch.cat([rows[bounds[e] : bounds[e + 1]] @ weight_ECO[e] for e in range(len(bounds) - 1)])
    _, C, O = weight_ECO.shape
    step = 16 // rows.element_size()  # it reads rows in steps of 16 bytes
    if C % step or O % step:
        rows = F.pad(rows, (0, -C % step))
        weight_ECO = F.pad(weight_ECO, (0, -O % step, 0, -C % step))
    return F.grouped_mm(rows, weight_ECO, offs=ends.int())[:, :O]
