"""From a folder of photographs to a comparison, trained networks and a page that shows what each expert selects.

    python examples/your_photos.py FOLDER --weights mobilenetv2.safetensors
    python examples/your_photos.py FOLDER --pretrained

FOLDER has one folder per class. The script runs four commands of moesaic one after another and says how long each took:
`compare` (does routing help on these images?), `train` with the network's own head, `train` with a routed head, and
`explain` of what its experts select. The backbone computes the features of each photograph once, for all of them.
"""

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from moesaic.cli import main as moesaic


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="images, one folder per class")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path, help="file with the weights of the backbone")
    source.add_argument("--pretrained", action="store_true", help="download timm's weights")
    parser.add_argument("--model", default="timm/mobilenetv2_100", help="backbone")
    parser.add_argument("--minutes", type=float, default=2.0, help="time for the comparison")
    parser.add_argument("--img-size", type=int, default=None, help="image size; None: the backbone's own")
    parser.add_argument("--epochs", type=int, default=50, help="epochs of each training run")
    parser.add_argument("--cache-dir", type=Path, default=None, help="cache of images and features")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the folders are written")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The commands, as one would type them."""
    folder, name = str(options.folder), options.folder.resolve().name
    backbone = options.model + (":pretrained" if options.pretrained else f":weights={options.weights}")
    network, routed = options.out / f"{name}-network", options.out / f"{name}-routed"
    data = ["--seed", str(options.seed)]
    data += [] if options.cache_dir is None else ["--cache-dir", str(options.cache_dir)]
    size = [] if options.img_size is None else ["--img-size", str(options.img_size)]
    epochs = ["--epochs", str(options.epochs)]
    compared = [
        "--models",
        backbone,
        "--minutes",
        str(options.minutes),
        "--out",
        str(options.out / f"{name}-comparison"),
    ]
    return {
        "compare": ["compare", folder, *compared, *data, *size, *epochs],
        "train": ["train", folder, "--model", backbone, "--out", str(network), *data, *size, *epochs],
        "train routed": [
            "train",
            folder,
            "--model",
            f"{backbone}:head=routed",
            "--out",
            str(routed),
            *data,
            *size,
            *epochs,
        ],
        "explain": ["explain", str(routed), "--data", folder, *data],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    options = parse(arguments)
    seconds: dict[str, float] = {}
    for name, command in commands(options).items():
        print(f"\n$ moesaic {shlex.join(command)}", flush=True)
        start = time.monotonic()
        code = moesaic(command)
        if code:
            raise SystemExit(code)  # the command has said why
        seconds[name] = time.monotonic() - start
    each = ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items())
    print(f"\n{each}; together {sum(seconds.values()):.0f} s")
    return seconds


if __name__ == "__main__":
    main()
