"""``python -m benchmarks.steps``, short for ``python -m benchmarks.kernels.steps``."""

from benchmarks.kernels.steps import main

if __name__ == "__main__":
    main()
