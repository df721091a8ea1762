"""The operators of `_ops` in Triton, for CUDA tensors: same names, same arguments."""

from infssm.kernels._triton.conv import conv
from infssm.kernels._triton.distance import distance, output_distance
from infssm.kernels._triton.norm import norm
from infssm.kernels._triton.scan import scan
from infssm.kernels._triton.states import mean_states

__all__ = ["conv", "distance", "mean_states", "norm", "output_distance", "scan"]
