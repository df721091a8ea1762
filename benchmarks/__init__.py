"""One folder per topic, each of which makes a page of docs/results; ``python -m benchmarks`` measures the kernels."""
