"""How it runs: gather → compute → combine on a backend, behind one dispatch point.

Backends register below in the order of preference, the preferred one last.
"""

from moesaic.ops.autocast import autocast_dtype, autocast_off
from moesaic.ops.dispatch import (
    Activation,
    Backend,
    ChosenPatches,
    Combine,
    Context,
    ConvWeights,
    GateOn,
    MLPWeights,
    Norm,
    PatchSpec,
    Samples,
    Softmax,
    backend,
    backends,
    pools,
    register_backend,
    run_choice,
    run_conv,
    run_conv_pooled,
    run_each,
    run_mlp,
    run_stacked,
    select_backend,
)
from moesaic.ops.reference_backend import ReferenceBackend
from moesaic.ops.torch_backend import TorchBackend
from moesaic.ops.triton_backend import TritonBackend

__all__ = [
    "Activation",
    "Backend",
    "ChosenPatches",
    "Combine",
    "Context",
    "ConvWeights",
    "GateOn",
    "MLPWeights",
    "Norm",
    "PatchSpec",
    "Samples",
    "Softmax",
    "autocast_dtype",
    "autocast_off",
    "backend",
    "backends",
    "pools",
    "register_backend",
    "run_choice",
    "run_conv",
    "run_conv_pooled",
    "run_each",
    "run_mlp",
    "run_stacked",
    "select_backend",
]

register_backend(ReferenceBackend())
register_backend(TorchBackend())
register_backend(TritonBackend())
