"""``python -m benchmarks``, short for ``python -m benchmarks.kernels``."""

from benchmarks.kernels.__main__ import main

if __name__ == "__main__":
    main()
