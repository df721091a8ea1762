"""Kernels and distances side by side with other implementations: `python -m benchmarks`."""
