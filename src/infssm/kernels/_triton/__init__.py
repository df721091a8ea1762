"""The operators of `_ops` in Triton, for CUDA tensors: same names, same arguments."""

from infssm.kernels._triton.scan import scan
from infssm.kernels._triton.states import mean_states

__all__ = ["mean_states", "scan"]
