"""The compiled kernels as `torch.library` operators, one file each."""

from infssm.kernels._ops.conv import conv
from infssm.kernels._ops.distance import KINDS, distance, output_distance
from infssm.kernels._ops.norm import norm
from infssm.kernels._ops.scan import scan
from infssm.kernels._ops.states import mean_states
from infssm.kernels._ops.subspace import chordal, geodesic, lattice

__all__ = [
    "KINDS",
    "chordal",
    "conv",
    "distance",
    "geodesic",
    "lattice",
    "mean_states",
    "norm",
    "output_distance",
    "scan",
]
