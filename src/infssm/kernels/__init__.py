"""Selective scan, causal convolution and fused distances: one public op each, chosen backend at run time."""
