"""What the papers prove, as functions that cite the theorem, and the same properties measured on data.

Chowdhury et al. 2023 (pMoE): complexities, separation of patterns, the closed form of the separately
trained router, the routing property, separability by a hyperplane, coupling to the pseudo-network. And
our own estimate of how many patches an expert must take.

Chen et al. 2022 (routing by sample): the best that one network can do, how noise makes routing smooth,
which expert becomes good at which cluster.

Wang et al. 2019 (routing by channel), supplement: how often two inputs open the same channels, and what
masks do to the rank of what a network computes.
"""

from moesaic.theory.additive import AdditiveClassifier, additive_error, orbit
from moesaic.theory.channel_masks import (
    all_distinct_probability,
    coin_collision,
    coin_confusion,
    coin_masks,
    measured_collision,
    subset_collision,
    subset_masks,
)
from moesaic.theory.channel_ranks import (
    ChannelNetwork,
    ChannelRanks,
    MatrixRank,
    blind_pair,
    confused,
    matricise,
    measure_channel_ranks,
    narrow,
    numerical_rank,
    one_sided_rank,
    printed_rank,
    random_channel_network,
    tensor_rank,
)
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
    "ChannelNetwork",
    "ChannelRanks",
    "Closeness",
    "ComplexityRow",
    "Coupling",
    "GrowthCondition",
    "InseparableSamples",
    "MatrixRank",
    "Model",
    "Order",
    "PatchDepth",
    "ProperRouting",
    "Separability",
    "Separation",
    "Setting",
    "additive_error",
    "all_distinct_probability",
    "all_groups_probability",
    "batch_complexity",
    "batch_weights",
    "blind_pair",
    "class_sums",
    "coin_collision",
    "coin_confusion",
    "coin_masks",
    "complexity_table",
    "computation",
    "confused",
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
    "matricise",
    "measure_channel_ranks",
    "measure_patch_depth",
    "measure_separation",
    "measured_collision",
    "narrow",
    "neuron_complexity",
    "noise_density",
    "numerical_rank",
    "one_sided_rank",
    "opponents",
    "orbit",
    "own_computation",
    "patterns_separable",
    "printed_rank",
    "printed_smoothing_bound",
    "proper_routing",
    "random_channel_network",
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
    "subset_collision",
    "subset_masks",
    "suggest_patches_per_expert",
    "tensor_rank",
    "trained_routers",
    "unreachable",
]
