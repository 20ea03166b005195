"""What the papers prove, as functions that cite the theorem, and the same properties measured on data.

Chowdhury et al. 2023 (pMoE): complexities, separation of patterns, the closed form of the separately
trained router, the routing property, separability by a hyperplane, coupling to the pseudo-network. And
our own estimate of how many patches an expert must take.
"""

from moesaic.theory.complexity import (
    ComplexityRow,
    Model,
    Order,
    Setting,
    batch_complexity,
    complexity_table,
    computation,
    error_at_fixed_samples,
    expert_cost,
    iteration_complexity,
    neuron_complexity,
    own_computation,
    router_cost,
    router_samples,
    sample_complexity,
)
from moesaic.theory.depth import PatchDepth, measure_patch_depth, suggest_patches_per_expert
from moesaic.theory.patterns import Closeness, Separation, measure_separation, separation
from moesaic.theory.pseudo_network import Coupling, coupled_share, coupling
from moesaic.theory.router import batch_weights, class_sums, opponents, router_init_std, trained_routers
from moesaic.theory.routing_property import ProperRouting, discriminative_ranks, proper_routing, routed_share
from moesaic.theory.separability import (
    InseparableSamples,
    Separability,
    inseparable_samples,
    linearly_separable,
    patterns_separable,
)

__all__ = [
    "Closeness",
    "ComplexityRow",
    "Coupling",
    "InseparableSamples",
    "Model",
    "Order",
    "PatchDepth",
    "ProperRouting",
    "Separability",
    "Separation",
    "Setting",
    "batch_complexity",
    "batch_weights",
    "class_sums",
    "complexity_table",
    "computation",
    "coupled_share",
    "coupling",
    "discriminative_ranks",
    "error_at_fixed_samples",
    "expert_cost",
    "inseparable_samples",
    "iteration_complexity",
    "linearly_separable",
    "measure_patch_depth",
    "measure_separation",
    "neuron_complexity",
    "opponents",
    "own_computation",
    "patterns_separable",
    "proper_routing",
    "routed_share",
    "router_cost",
    "router_init_std",
    "router_samples",
    "sample_complexity",
    "separation",
    "suggest_patches_per_expert",
    "trained_routers",
]
