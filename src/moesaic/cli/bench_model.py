"""`moesaic bench model`: what the routed layers of a network gain on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from moesaic.argument_checks import check_choice
from moesaic.cli.network_argument import NetworkOptions
from moesaic.cli.shared import log, resolve_device, user_errors

if TYPE_CHECKING:
    from moesaic.bench.network_timer import Mode

__all__ = ["BenchModel"]


@dataclass(frozen=True)
class BenchModel(NetworkOptions):
    """Time a network with routed layers on this machine against the same network with dense ones.

    moesaic bench model wrn10_10_pmoe prints what its routed layers gain and the bound that their share of the work
    sets. For a dense network, moesaic advise finds the layers that gain by routing. Nothing is trained.
    """

    mode: Annotated[
        str | None, arg(metavar="eager|compiled|captured", help_behavior_hint="(default: all that this machine has)")
    ] = None
    """How networks run: eager, under torch.compile, or in CUDA graphs."""
    repetitions: int = 10
    """Timed runs per network; the median is reported."""

    def run(self, given: Sequence[str]) -> int:
        """Builds the network, runs the benchmark and prints the tables."""
        import torch

        from moesaic.bench.model_benchmark import benchmark_model
        from moesaic.report import describe_machine
        from moesaic.report.model_benchmark_table import benchmark_json, print_model_benchmark

        with user_errors("bench model"):
            self.check("bench model", {"--repetitions": self.repetitions})
            device = resolve_device("bench model", self.device)
            gpu = torch.device(device).type == "cuda"
            modes, network = self._modes(gpu), self.build()
            self.warn_if_busy(device)
            log(f"{describe_machine(device)}: {self.repetitions} runs, routed and dense in turns")
            found = benchmark_model(
                network.model.to(device),
                network.image,
                batch_size=self.batch_size,
                modes=modes,
                passes=self.passes(),
                repetitions=self.repetitions,
                autocast=torch.bfloat16 if gpu else None,
                log=log,
            )
        C, H, W = network.image
        about = {"network": self.network, "machine": describe_machine(device), "image": [C, H, W]}
        if self.json:
            content = {**about, "batch_size": self.batch_size, **benchmark_json(found)}
            sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            title = f"{self.network}, {self.batch_size} images of {H}×{W} on {device}"
            print_model_benchmark(title, found)
        return 0

    def _modes(self, gpu: bool) -> list[Mode]:
        from moesaic.bench.network_timer import MODES

        if self.mode is None:
            return list(MODES) if gpu else ["eager", "compiled"]
        check_choice("bench model", "--mode", self.mode, MODES)
        if self.mode == "captured" and not gpu:
            raise ValueError("--mode=captured needs a GPU: CPUs have no CUDA graphs; use eager or compiled")
        return [mode for mode in MODES if mode == self.mode]
