"""Time the epochs of pMoE's released two-layer training script, run as it is from a checkout.

    python released_pmoe.py SCRIPT [--samples 300] [--epochs 3] [--warm-up 1]

`trials.py` starts this in a folder that holds the files which the script loads. It needs tensorflow
(tensorflow-cpu will do) and tf_keras, which keeps the Keras of the script's time, and nothing of
moesaic, so that the two may live in different environments. It always runs on the CPU.

The script's own text runs, unchanged. Only what it calls is wrapped: `Model.fit` passes over other
sample sizes, takes the number of epochs from here and ends the script after the first network, and
`Model.evaluate`, which the script calls after each epoch, returns at once. The rest of an epoch,
the script's way of keeping the weights and Keras' progress bar included, is what gets timed.
The result is one line of JSON.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import runpy
import sys
import time
from pathlib import Path
from typing import Any

NEEDED = ("tensorflow", "tf_keras")


class Finished(Exception):
    """The network that was to be timed has been trained."""


def seconds_per_epoch(script: Path, samples: int, epochs: int, warm_up: int) -> list[float]:
    """Wall-clock seconds of each epoch after the warm-up; a checkout of an older or newer script may have none."""
    import tensorflow as tf

    seconds: list[float] = []
    fit = tf.keras.Model.fit

    class Stopwatch(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            seconds.append(time.perf_counter() - self.start)

    def timed_fit(model: Any, x: Any, y: Any, *, callbacks: list[Any], **options: Any) -> None:
        if len(x) == samples:
            # last of the callbacks, so that an epoch ends when the script's own are done
            fit(model, x, y, **{**options, "epochs": warm_up + epochs, "callbacks": [*callbacks, Stopwatch()]})
            raise Finished

    tf.keras.Model.fit = timed_fit
    tf.keras.Model.evaluate = lambda *_, **__: None
    sys.path.insert(0, str(script.parent))  # it imports its neighbours
    # standard output is for the result; what the script prints is not wanted, but costs what it costs
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.suppress(Finished):
        runpy.run_path(str(script), run_name="__main__")
    return seconds[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="epochs before the first that counts")
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"missing": missing}))
        return
    os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    seconds = seconds_per_epoch(arguments.script, arguments.samples, arguments.epochs, arguments.warm_up)
    if not seconds:
        sys.exit(f"{arguments.script} trained no network on {arguments.samples} samples; is it the script of pMoE_CNN?")
    import tensorflow as tf
    import tf_keras

    versions = {"tensorflow": tf.__version__, "tf_keras": tf_keras.__version__, "python": platform.python_version()}
    print(json.dumps({"seconds": seconds, "cores": len(os.sched_getaffinity(0)), **versions}))


if __name__ == "__main__":
    main()
