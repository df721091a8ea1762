"""The compiled kernels as `torch.library` operators, one file each."""

from infssm.kernels._ops.conv import conv
from infssm.kernels._ops.distance import distance
from infssm.kernels._ops.heads import heads
from infssm.kernels._ops.norm import norm
from infssm.kernels._ops.scan import scan
from infssm.kernels._ops.states import mean_states
from infssm.kernels._ops.subspace import lattice

__all__ = [
    "conv",
    "distance",
    "heads",
    "lattice",
    "mean_states",
    "norm",
    "scan",
]
