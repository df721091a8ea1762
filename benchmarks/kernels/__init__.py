"""docs/results/kernels.md: operations and training steps beside other implementations."""
