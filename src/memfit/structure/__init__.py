"""Lighter models: changes of structure, each returned as a proposal with its price.

Each function leaves the user's workload alone and returns a changed copy, `Proposal.workload`, which `memfit.plan`
takes like any other. All are of numerics class `changed`.
"""

from memfit.structure.batch_norm import freeze_batch_norm, group_norm_for_batch_norm
from memfit.structure.compound_scaling import COMPOUND, SINGLE, Member, Rule, Scaling, scale
from memfit.structure.convolutions import grouped_convolutions, separable_convolutions
from memfit.structure.distillation import distill, precompute, softened_loss, student
from memfit.structure.proposal import Change, Price, Proposal, price
from memfit.structure.pruning import batch_norm_sparsity, prune
from memfit.structure.sparsity import sparsify, to_sparse

__all__ = [
    "COMPOUND",
    "SINGLE",
    "Change",
    "Member",
    "Price",
    "Proposal",
    "Rule",
    "Scaling",
    "batch_norm_sparsity",
    "distill",
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "grouped_convolutions",
    "precompute",
    "price",
    "prune",
    "scale",
    "separable_convolutions",
    "softened_loss",
    "sparsify",
    "student",
    "to_sparse",
]
