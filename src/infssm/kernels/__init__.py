"""Selective scan with state outputs and the fused operations around it: reference, compiled and Triton backends."""

from infssm.kernels._distances import KINDS, Kind
from infssm.kernels.backend import backend_report
from infssm.kernels.conv import causal_conv1d
from infssm.kernels.distance import fused_distance
from infssm.kernels.heads import scan_heads
from infssm.kernels.norm import add_rms_norm
from infssm.kernels.packing import seq_idx_from_cu_seqlens, seq_idx_from_position_ids
from infssm.kernels.records import ScanInputs, ScanOutput, ScanStates
from infssm.kernels.scan import scan, selective_scan
from infssm.kernels.states import mean_states
from infssm.kernels.subspace import principal_angles, rotation_lattice

__all__ = [
    "KINDS",
    "Kind",
    "ScanInputs",
    "ScanOutput",
    "ScanStates",
    "add_rms_norm",
    "backend_report",
    "causal_conv1d",
    "fused_distance",
    "mean_states",
    "principal_angles",
    "rotation_lattice",
    "scan",
    "scan_heads",
    "selective_scan",
    "seq_idx_from_cu_seqlens",
    "seq_idx_from_position_ids",
]
