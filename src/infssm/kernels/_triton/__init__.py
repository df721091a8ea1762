"""The operators of `_ops` in Triton, for CUDA tensors: same names, same arguments."""

from infssm.kernels._triton.distance import distance, output_distance
from infssm.kernels._triton.scan import scan
from infssm.kernels._triton.states import mean_states

__all__ = ["distance", "mean_states", "output_distance", "scan"]
