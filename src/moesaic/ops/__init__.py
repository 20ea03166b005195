"""How it runs: gather → compute → combine on a backend, behind one dispatch point.

Importing this room registers the backends; later ones are preferred where they fit.
"""

from moesaic.ops import reference_backend as _reference  # noqa: F401  registers "reference"
from moesaic.ops import torch_backend as _torch  # noqa: F401  registers "torch"
from moesaic.ops.backends import (
    Activation,
    Backend,
    Combine,
    Context,
    ConvWeights,
    GateOn,
    MLPWeights,
    Norm,
    PatchSpec,
    backend,
    backends,
    register_backend,
    run_conv,
    run_mlp,
    select_backend,
)

__all__ = [
    "Activation",
    "Backend",
    "Combine",
    "Context",
    "ConvWeights",
    "GateOn",
    "MLPWeights",
    "Norm",
    "PatchSpec",
    "backend",
    "backends",
    "register_backend",
    "run_conv",
    "run_mlp",
    "select_backend",
]
