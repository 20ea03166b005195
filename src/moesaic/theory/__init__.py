"""What the papers prove, as functions that cite the theorem, and the same properties measured on data.

Chowdhury et al. 2023 (pMoE): complexities, separation of patterns, the closed form of the separately
trained router, the routing property, separability by a hyperplane, coupling to the pseudo-network. And
our own estimate of how many patches an expert must take.

Chen et al. 2022 (routing by sample): the best that one network can do, how noise makes routing smooth,
which expert becomes good at which cluster.
"""

from moesaic.theory.additive import AdditiveClassifier, additive_error, orbit
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
from moesaic.theory.exploration import (
    GrowthCondition,
    all_groups_probability,
    exploration_steps,
    initial_groups,
    sample_moe_conditions,
)
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
from moesaic.theory.smoothing import (
    expected_load,
    noise_density,
    printed_smoothing_bound,
    routing_probabilities,
    smoothing_bound,
    steepest_scores,
    unreachable,
)

__all__ = [
    "AdditiveClassifier",
    "Closeness",
    "ComplexityRow",
    "Coupling",
    "GrowthCondition",
    "InseparableSamples",
    "Model",
    "Order",
    "PatchDepth",
    "ProperRouting",
    "Separability",
    "Separation",
    "Setting",
    "additive_error",
    "all_groups_probability",
    "batch_complexity",
    "batch_weights",
    "class_sums",
    "complexity_table",
    "computation",
    "coupled_share",
    "coupling",
    "discriminative_ranks",
    "error_at_fixed_samples",
    "expected_load",
    "expert_cost",
    "exploration_steps",
    "initial_groups",
    "inseparable_samples",
    "iteration_complexity",
    "linearly_separable",
    "measure_patch_depth",
    "measure_separation",
    "neuron_complexity",
    "noise_density",
    "opponents",
    "orbit",
    "own_computation",
    "patterns_separable",
    "printed_smoothing_bound",
    "proper_routing",
    "routed_share",
    "router_cost",
    "router_init_std",
    "router_samples",
    "routing_probabilities",
    "sample_complexity",
    "sample_moe_conditions",
    "separation",
    "smoothing_bound",
    "steepest_scores",
    "suggest_patches_per_expert",
    "trained_routers",
    "unreachable",
]
