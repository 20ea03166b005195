"""Property tests with fresh examples, then mutated files, until the time is over: ``make fuzz MINUTES=5``.

Half of the time goes to property tests: rounds follow each other, each with a seed of its own, which is printed;
``make fuzz SEED=n`` begins with that one. The other half goes to `fuzz_files`.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="tests begin within this time")
    parser.add_argument("--seed", type=int, help="of the first round; default: a fresh one")
    parser.add_argument("--only", choices=("properties", "files"), help="one half, for all of the time")
    given, more = parser.parse_known_args()  # the rest is for pytest: paths, -k, -x
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    halves = ("properties", "files") if given.only is None else (given.only,)
    minutes = given.minutes / len(halves)
    code = fuzz_properties(seed, minutes, more) if "properties" in halves else 0
    if code or "files" not in halves:
        return code
    files = [sys.executable, str(Path(__file__).with_name("fuzz_files.py")), "--minutes", str(minutes)]
    return subprocess.run([*files, "--seed", str(seed)]).returncode


def fuzz_properties(seed: int, minutes: float, more: list[str]) -> int:
    end = time.time() + 60 * minutes
    while time.time() < end:
        print(f"fuzz: seed {seed}; to repeat this round: make fuzz SEED={seed}", flush=True)
        environment = {**os.environ, "MOESAIC_FUZZ_UNTIL": str(end), "MOESAIC_TEST_SEED": str(seed)}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "-r", "fE"]
        command += ["-m", "hypothesis and not gpu", f"--hypothesis-seed={seed}", *(more or ["tests"])]
        if code := subprocess.run(command, env=environment).returncode:
            print(f"fuzz: failed with seed {seed}; to repeat it: make fuzz SEED={seed}")
            return code
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
