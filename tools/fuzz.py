"""Property tests with fresh examples until the time is over: ``make fuzz MINUTES=5``.

Rounds follow each other, each with a seed of its own, which is printed; ``make fuzz SEED=n`` begins with that one.
"""

import argparse
import os
import random
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="tests begin within this time")
    parser.add_argument("--seed", type=int, help="of the first round; default: a fresh one")
    given, more = parser.parse_known_args()  # the rest is for pytest: paths, -k, -x
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    end = time.time() + 60 * given.minutes
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
