"""`moesaic advise`: times routing in a dense network on this machine, and prints the command to train it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from moesaic.cli.network_argument import Network, NetworkOptions
from moesaic.cli.shared import log, resolve_device, user_errors

if TYPE_CHECKING:
    from moesaic.bench.advise import Advice, Plan

__all__ = ["Advise", "train_command"]


@dataclass(frozen=True)
class Advise(NetworkOptions):
    """Time routing in a dense network on this machine, and print the command that trains the routed network.

    Times each layer that can be routed, dense and routed; prints the bound that the layer's share of the time sets on
    the speed of the network; times the network with the layers that are faster routed; and says "not worth it" where
    none is. Nothing is trained: moesaic compare measures accuracy.
    """

    experts: int = 8
    """Number of experts of a routed layer."""
    capacity: Annotated[
        float | None, arg(metavar="FACTOR", help_behavior_hint="(default: 1; half of the experts with init=split)")
    ] = None
    """Mean number of experts of a token in routed MLPs; as in moesaic train --convert."""
    keep: float = 0.5
    """Share of the tokens that a transformer block processes; the other tokens skip the block."""
    compile: bool = False
    """Time whole networks under torch.compile as well, which takes a minute or more for each."""
    repetitions: int = 3
    """Timed runs of a network, three times as many of a layer; the median is reported."""

    def run(self, given: Sequence[str]) -> int:
        """Builds the network, measures and prints the advice."""
        import torch

        from moesaic.bench.advise import RoutingOptions, advise
        from moesaic.report import describe_machine
        from moesaic.report.advice_table import advice_json, print_advice

        with user_errors("advise"):
            self._check()
            device = resolve_device("advise", self.device)
            gpu = torch.device(device).type == "cuda"
            network = self.build()
            trained = network.weights is not None or network.spec.is_pretrained
            self.warn_if_busy(device)
            log(f"{describe_machine(device)}: {self.repetitions} runs, routed and dense in turns")
            found = advise(
                network.model.to(device),
                network.image,
                RoutingOptions(self.experts, self.capacity, self.keep, trained),
                batch_size=self.batch_size,
                modes=("eager", "compiled") if self.compile else ("eager",),
                passes=self.passes(),
                repetitions=self.repetitions,
                autocast=torch.bfloat16 if gpu else None,
                log=log,
            )
        commands = self._commands(found, network)
        C, H, W = network.image
        if self.json:
            about = {"network": self.network, "machine": describe_machine(device), "image": [C, H, W]}
            content = {**about, "batch_size": self.batch_size, **advice_json(found, commands)}
            sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            title = f"{self.network}, {self.batch_size} images of {H}×{W} on {device}"
            print_advice(title, found, commands)
        return 0

    def _check(self) -> None:
        self.check("advise", {"--experts": self.experts, "--repetitions": self.repetitions})
        if self.capacity is not None and not 0 < self.capacity <= self.experts:
            raise ValueError(f"--capacity={self.capacity}; it must be above 0 and at most --experts {self.experts}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"--keep={self.keep}; it must be above 0 and at most 1")

    def _commands(self, found: Advice, network: Network) -> dict[str, str]:
        return {plan.name: shlex.join(train_command(plan, network)) for plan in found.plans}


def train_command(plan: Plan, network: Network) -> list[str]:
    """The command line of `moesaic train` for a plan: one conversion as options, several in the network's name."""
    from moesaic.models.model_string import format_model_string

    conversions = [*network.spec.conversions, *plan.conversions]
    as_options = len(conversions) == 1 and "skip" not in conversions[0]
    name = format_model_string(network.spec.name, network.spec.arguments, () if as_options else conversions)
    weights = [] if network.weights is None else ["--weights", str(network.weights)]
    words = ["moesaic", "train", "DATA", "--img-size", str(network.image[1]), "--model", name, *weights]
    return [*words, *(_options(conversions[0]) if as_options else ())]


def _options(conversion: Mapping[str, Any]) -> list[str]:
    layers = [word for layer in conversion["layer"] for word in ("--convert", layer)]
    others = (
        (f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value))
        for name, value in conversion.items()
        if name != "layer"
    )
    return [*layers, *(word for pair in others for word in pair)]
