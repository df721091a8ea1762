"""Every operation in plain PyTorch: any float dtype, any device, ordinary autograd."""

from infssm.kernels._reference.layers import add_rms_norm, causal_conv1d
from infssm.kernels._reference.scan import mean_states, selective_scan

__all__ = [
    "add_rms_norm",
    "causal_conv1d",
    "mean_states",
    "selective_scan",
]
