"""Every operation in plain PyTorch: any float dtype, any device, ordinary autograd."""

from infssm.ops.reference.layers import add_rms_norm, causal_conv1d
from infssm.ops.reference.scan import mean_states, selective_scan

__all__ = [
    "add_rms_norm",
    "causal_conv1d",
    "mean_states",
    "selective_scan",
]
