"""Where the chosen pixels of a batch are, expert by expert, and where their contributions land.

Integer arithmetic on the device only: no host sync, and static shapes where experts choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.grouped import grouped_matmul
from moesaic.record import NOBODY, Routing

__all__ = ["Pixels"]


@dataclass(frozen=True)
class Pixels:
    """R chosen pixels, those of expert 0 first; each patch's p·p pixels lie together.

    Values of pixels are (E, M, ·) where all experts have equally many (``ends`` is None), and
    (R, ·) where they do not; then ``ends`` (E,) says after which row each expert's pixels end.
    """

    routing: Routing
    spec: PatchSpec
    map_size: tuple[int, int]
    image_R: Tensor
    expert_R: Tensor
    at_R: Tensor
    """Where on its map a pixel is: y · W + x."""
    gate_R: Tensor
    used_R: Tensor | None
    """None where every pixel is used. What is not used reads patch 0 and is written nowhere."""
    ends: Tensor | None

    @staticmethod
    def chosen(routing: Routing, x: Tensor, spec: PatchSpec) -> Pixels:
        """The pixels of a map (B, C, H, W) that a routing by choice sends to experts."""
        if routing.index is None:
            raise ValueError("Pixels: a soft routing chooses no pixels")
        E, area = routing.experts, spec.patch_size**2
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
            ends = torch.searchsorted(expert_P, each_expert, right=True) * area
        if used_P is not None:
            patch_P = patch_P.clamp_min(0)

        def per_pixel(of_P: Tensor) -> Tensor:
            return of_P.unsqueeze(1).expand(-1, area).flatten()

        H, W = x.shape[2], x.shape[3]
        return Pixels(
            routing=routing,
            spec=spec,
            map_size=(H, W),
            image_R=per_pixel(image_P),
            expert_R=per_pixel(expert_P),
            at_R=_pixels_of_patches(H, W, spec.patch_size, x.device).index_select(0, patch_P).flatten(),
            gate_R=per_pixel(gate_P),
            used_R=None if used_P is None else per_pixel(used_P),
            ends=ends,
        )

    @property
    def lanes(self) -> int:
        """How many rows of the output a pixel has: one, or one per expert under ``concat``."""
        return self.routing.experts if self.spec.combine == "concat" else 1

    def take(self, rows: Tensor) -> Tensor:
        """The pixels' values out of a batch of maps laid out as rows (B·H·W, C)."""
        return self.grouped(rows.index_select(0, self.image_R * self._area + self.at_R))

    def take_by_expert(self, maps_EHWO: Tensor) -> Tensor:
        """The pixels' values out of one map per expert."""
        return self.grouped(maps_EHWO.flatten(0, 2).index_select(0, self.expert_R * self._area + self.at_R))

    def grouped(self, rows: Tensor) -> Tensor:
        """(R, ·) in the leading shape of pixel values."""
        E = self.routing.experts
        return rows if self.ends is not None else rows.view(E, rows.shape[0] // E, rows.shape[1])

    def per_expert(self, values_EC: Tensor) -> Tensor:
        """A vector per expert, to broadcast over its pixels."""
        return values_EC.unsqueeze(1) if self.ends is None else values_EC.index_select(0, self.expert_R)

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many used pixels each expert has, (E, 1), and the mean and variance (E, C) of their values."""
        used = None if self.used_R is None else self.grouped(self.used_R.unsqueeze(1))

        def total(of: Tensor) -> Tensor:
            of = of if used is None else of.where(used, 0)
            if self.ends is None:
                return of.sum(1)
            return of.new_zeros(self.routing.experts, of.shape[1]).index_add(0, self.expert_R, of)

        count = total(torch.ones_like(values[..., :1]))
        mean = total(values) / count.clamp_min(1)
        return count, mean, total((values - self.per_expert(mean)).square()) / count.clamp_min(1)

    def matmul(self, values: Tensor, weight_EOC: Tensor) -> Tensor:
        """Each expert's pixels times its matrix."""
        weight_ECO = weight_EOC.transpose(1, 2)
        return torch.bmm(values, weight_ECO) if self.ends is None else grouped_matmul(values, weight_ECO, self.ends)

    def matmul_with(self, values: Tensor, extra_EC: Tensor, weight_EOC: Tensor) -> tuple[Tensor, Tensor]:
        """Each expert's pixels, and one vector more per expert, times its matrix."""
        if self.ends is not None:
            return self.matmul(values, weight_EOC), torch.bmm(weight_EOC, extra_EC.unsqueeze(2)).squeeze(2)
        # As one more row it costs nothing, while a product of its own would need a second gradient of the weights.
        both = self.matmul(torch.cat([values, extra_EC.unsqueeze(1)], 1), weight_EOC)
        return both[:, :-1], both[:, -1]

    def landings(self, kernel: int) -> tuple[Tensor, Tensor | None]:
        """Where each tap of each pixel lands among the rows of the output, and the expert's gate there.

        Both (R, kernel·kernel); no gate under ``gate_on="input"``. The output's rows are (B, H, W),
        times E under ``concat``. What leaves the map, or its patch under ``context="patch"``, lands on
        rows past those: one per image and lane, lest threads queue for a single one.
        """
        routing, lanes, area = self.routing, self.lanes, self._area
        lane_R = self.expert_R if lanes > 1 else 0
        map_R = self.image_R * (area * lanes) + lane_R
        beyond_R = self.image_R * lanes + (lane_R + routing.batch * area * lanes)
        there, inside, patch = self._taps(kernel)
        inside_Rk = inside.index_select(0, self.at_R)
        if self.used_R is not None:
            inside_Rk = inside_Rk & self.used_R.unsqueeze(1)
        landing_Rk = (there * lanes).index_select(0, self.at_R) + map_R.unsqueeze(1)
        landing_Rk = torch.where(inside_Rk, landing_Rk, beyond_R.unsqueeze(1))
        if self.spec.gate_on == "input":
            return landing_Rk, None
        gates_R = (self.image_R * routing.units) * routing.experts + self.expert_R
        at_Rk = (patch * routing.experts).index_select(0, self.at_R) + gates_R.unsqueeze(1)
        return landing_Rk, routing.weights.flatten().index_select(0, at_Rk.flatten()).view(at_Rk.shape)

    @property
    def _area(self) -> int:
        return self.map_size[0] * self.map_size[1]

    def _taps(self, kernel: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each pixel of a map and tap, (H·W, kernel·kernel): where it lands, whether it stays, on which patch."""
        (H, W), p, device = self.map_size, self.spec.patch_size, self.at_R.device
        y_Hk, inside_Hk = _shifted(H, kernel, H if self.spec.context == "map" else p, device)
        x_Wk, inside_Wk = _shifted(W, kernel, W if self.spec.context == "map" else p, device)
        y, inside_y = y_Hk[:, None, :, None], inside_Hk[:, None, :, None]
        x, inside_x = x_Wk[None, :, None, :], inside_Wk[None, :, None, :]
        tables = (y * W + x, inside_y & inside_x, y // p * (W // p) + x // p)
        there, inside, patch = (table.reshape(H * W, kernel * kernel) for table in tables)
        return there, inside, patch


def _shifted(size: int, kernel: int, room: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the taps of a kernel land along one axis, and whether they stay in the same stretch of ``room``."""
    here = torch.arange(size, device=device).unsqueeze(1)
    there = here + kernel // 2 - torch.arange(kernel, device=device)
    stays = there.div(room, rounding_mode="floor") == here // room
    return there.clamp(0, size - 1), stays


def _pixels_of_patches(H: int, W: int, p: int, device: torch.device) -> Tensor:
    """(N, p·p): where on the map each patch's pixels are."""
    at = torch.arange(H * W, device=device).view(H // p, p, W // p, p)
    return at.transpose(1, 2).reshape((H // p) * (W // p), p * p)
