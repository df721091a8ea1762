"""Selective scan with state outputs and the fused operations around it: reference, compiled and Triton backends."""

from infssm.ops.backend import backend_report
from infssm.ops.conv import causal_conv1d
from infssm.ops.distance import fused_distance
from infssm.ops.distances import (
    KINDS,
    KINDS_OF_ANGLES,
    Kind,
    System,
    principal_angles,
    rotation_lattice,
    sampled_output,
    schubert_distance,
)
from infssm.ops.norm import add_rms_norm
from infssm.ops.packing import seq_idx_from_cu_seqlens, seq_idx_from_position_ids
from infssm.ops.scan import ScanInputs, ScanOutput, ScanStates, scan, selective_scan
from infssm.ops.ssd import scan_ssd
from infssm.ops.states import mean_states
from infssm.ops.step import scan_step

__all__ = [
    "KINDS",
    "KINDS_OF_ANGLES",
    "Kind",
    "ScanInputs",
    "ScanOutput",
    "ScanStates",
    "System",
    "add_rms_norm",
    "backend_report",
    "causal_conv1d",
    "fused_distance",
    "mean_states",
    "principal_angles",
    "rotation_lattice",
    "sampled_output",
    "scan",
    "scan_ssd",
    "scan_step",
    "schubert_distance",
    "selective_scan",
    "seq_idx_from_cu_seqlens",
    "seq_idx_from_position_ids",
]
