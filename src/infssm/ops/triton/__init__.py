"""The operators' kernels in Triton, for CUDA tensors: how they are launched."""
