"""Execution of experts on a backend: gather → compute → combine, behind one dispatch point.

Backends register below in the order of preference, the preferred one last.
"""

from moesaic.ops.autocast import autocast_dtype, autocast_off
from moesaic.ops.dispatch import (
    Activation,
    Backend,
    Combine,
    Context,
    ConvWeights,
    ExpertGate,
    GateOn,
    MLPWeights,
    Norm,
    PatchChoice,
    PatchSelection,
    PatchSpec,
    Samples,
    StackedExecutor,
    backend,
    backends,
    register_backend,
    requested_backend,
    run_chosen_conv,
    run_chosen_mlp,
    run_conv,
    run_each,
    run_expert_choice,
    run_mlp,
    run_stacked,
    select_backend,
)
from moesaic.ops.reference_backend import ReferenceBackend
from moesaic.ops.torch_backend import TorchBackend
from moesaic.ops.triton_backend import TritonBackend, kernels_available

__all__ = [
    "Activation",
    "Backend",
    "Combine",
    "Context",
    "ConvWeights",
    "ExpertGate",
    "GateOn",
    "MLPWeights",
    "Norm",
    "PatchChoice",
    "PatchSelection",
    "PatchSpec",
    "Samples",
    "StackedExecutor",
    "autocast_dtype",
    "autocast_off",
    "backend",
    "backends",
    "kernels_available",
    "register_backend",
    "requested_backend",
    "run_chosen_conv",
    "run_chosen_mlp",
    "run_conv",
    "run_each",
    "run_expert_choice",
    "run_mlp",
    "run_stacked",
    "select_backend",
]

register_backend(ReferenceBackend())
register_backend(TorchBackend())
register_backend(TritonBackend())
