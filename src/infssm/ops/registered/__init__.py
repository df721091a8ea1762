"""The compiled kernels as `torch.library` operators, one file each."""

from infssm.ops.registered.conv import conv
from infssm.ops.registered.distance import distance
from infssm.ops.registered.heads import heads
from infssm.ops.registered.norm import norm
from infssm.ops.registered.scan import scan
from infssm.ops.registered.states import mean_states

__all__ = [
    "conv",
    "distance",
    "heads",
    "mean_states",
    "norm",
    "scan",
]
