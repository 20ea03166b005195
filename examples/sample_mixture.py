"""Train a mixture whose experts are whole networks, and see which data each of them takes.

The data come from four clusters (a small version of Chen et al. 2022). In each cluster another feature has the sign
of the label, and the feature of a second cluster is there with a random sign: a single network on patches cannot tell
which one counts. A router sends each sample to one of four small networks.

Expect: the single network stays below 87.5 % test accuracy, which is the most that any sum over patches can reach here;
nonlinear experts reach nearly 100 % and divide the clusters among them (dispatch entropy near 0); linear experts may
classify well too, but do not divide them. A few seconds on one core.
"""

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F

import moesaic
from moesaic.experts import PatchNetExperts
from moesaic.insight import dispatch_entropy, dispatch_table
from moesaic.routing import SampleRouter

CLUSTERS, DIM = 4, 24


def draw_samples(count: int, signals: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of four patches (B, 4, D), labels ±1, and clusters."""
    centres, features = signals[:CLUSTERS], signals[CLUSTERS : 2 * CLUSTERS]
    cluster = torch.randint(CLUSTERS, (count,), generator=rng)
    other = (cluster + torch.randint(1, CLUSTERS, (count,), generator=rng)) % CLUSTERS
    label, coin = (2.0 * torch.randint(2, (2, count, 1), generator=rng) - 1).unbind()
    noise = torch.randn(count, DIM, generator=rng) / DIM**0.5
    patches = [centres[cluster], label * features[cluster], coin * features[other], noise]
    return torch.stack(patches, 1), label.flatten(), cluster


def build(experts: int, activation: str) -> moesaic.SampleMoE:
    return moesaic.SampleMoE(
        SampleRouter(DIM, experts=experts), PatchNetExperts(experts, DIM, 8, activation=activation)
    )


def train(layer: moesaic.SampleMoE, x: Tensor, label: Tensor, steps: int) -> None:
    optimizers = [
        moesaic.NormalizedGD.per_expert(layer.experts, lr=0.05),  # experts with few samples learn as fast as others
        torch.optim.SGD(layer.router.parameters(), lr=10.0),
    ]
    for _ in range(steps):
        F.softplus(-label * layer(x).squeeze(1)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000, help="Number of training samples.")
    parser.add_argument("--steps", type=int, default=200, help="Training steps over all samples.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of data and initial weights.")
    args = parser.parse_args(argv)

    rng = torch.Generator().manual_seed(args.seed)
    signals = torch.linalg.qr(torch.randn(DIM, DIM, generator=rng)).Q
    x, label, _ = draw_samples(args.samples, signals, rng)
    test_x, test_label, cluster = draw_samples(2000, signals, rng)

    found: dict[str, dict[str, float]] = {}
    tables: dict[str, str] = {}
    for name, experts, activation in (
        ("one network", 1, "cubic"),
        ("four nonlinear experts", 4, "cubic"),
        ("four linear experts", 4, "identity"),
    ):
        torch.manual_seed(args.seed)
        layer = build(experts, activation)
        train(layer, x, label, args.steps)
        with torch.no_grad(), moesaic.record_routing(layer.eval()) as routing:
            accuracy = (layer(test_x).squeeze(1).sign() == test_label).float().mean().item()
        entropy = dispatch_entropy(routing[""], cluster)
        found[name] = {"accuracy": accuracy, "entropy": entropy}
        tables[name] = str(dispatch_table(routing[""], cluster))
        most = math.log(CLUSTERS)
        print(f"{name:24}test accuracy {accuracy:6.1%}   dispatch entropy {entropy:.2f} nats (at most {most:.2f})")
    print(f"\nwhere the nonlinear experts' samples come from:\n{tables['four nonlinear experts']}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
