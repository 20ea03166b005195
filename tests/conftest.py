"""Settings that every test shares."""

import os

import hypothesis
import torch
from mnist_files import mlxtends_digits, mnist, own_mnist  # noqa: F401  fixtures

os.environ.setdefault("MPLBACKEND", "agg")  # no test opens a window

# Workers of pytest-xdist share the cores: more threads in each would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# No deadline: the first example of a shape pays for allocation and kernel selection.
# Under CI every run draws the same examples; elsewhere each run looks further.
hypothesis.settings.register_profile(
    "moesaic", deadline=None, max_examples=40, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("moesaic")
