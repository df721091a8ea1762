"""The Triton kernels. Importing one of these modules imports Triton: only the operators do, when they are called."""
