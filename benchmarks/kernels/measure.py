"""Timing of several methods interleaved in one run, peak memory in a process of its own, and the machine's rates."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from infssm.ops import backend_report

# With the default thresholds every large tensor is mapped and page-faulted anew, which flatters methods that
# allocate little (us); with raised ones all methods reuse their memory.
RAISED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


Clock = Callable[[], float]
K = TypeVar("K", bound=Hashable)


def add_clock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="processor time instead of wall time (busy machines, one thread)",
    )


def with_raised_malloc(module: str = "benchmarks") -> None:
    """Start this process, `python -m module`, again with raised malloc thresholds, unless it was."""
    if all(os.environ.get(name) == value for name, value in RAISED_MALLOC.items()):
        return
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **RAISED_MALLOC})


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one method."""

    median: float
    best: float
    repeats: int


@dataclass(frozen=True)
class Aim:
    """A bound that a ratio should keep."""

    value: float
    at_least: bool = False

    def verdict(self, ratio: float) -> str:
        """The aim, and whether the ratio keeps it here."""
        holds = ratio >= self.value if self.at_least else ratio <= self.value
        return f"aim: at {'least' if self.at_least else 'most'} {self.value:g}, {'holds' if holds else 'missed'}"


@dataclass(frozen=True)
class Method:
    """A call to time; `repeats` bounds how often, for slow ones."""

    run: Callable[[], object]
    repeats: int = 1_000_000


def interleaved(methods: Mapping[K, Method], repeats: int, clock: Clock) -> dict[K, Timing]:
    """Time all methods in turn, `repeats` rounds after one warm-up round."""
    samples: dict[K, list[float]] = {name: [] for name in methods}
    for round_ in range(repeats + 1):
        for name, method in methods.items():
            if round_ > method.repeats:
                continue
            start = clock()
            method.run()
            elapsed = (clock() - start) * 1e3
            if round_ > 0 or method.repeats == 0:
                samples[name].append(elapsed)
    return {name: Timing(statistics.median(times), min(times), len(times)) for name, times in samples.items()}


def peak_memory(*arguments: str, module: str = "benchmarks.kernels.memory") -> float:
    """MiB a job holds at most, above what exists before it, as `python -m module` prints; in a process of its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", module, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def machine() -> str:
    """Processor, cores, instruction set of the kernels, threads and torch, in a line."""
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown CPU")
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    isa = backend_report().get("isa", "no compiled kernels")
    return f"{model}, {os.cpu_count()} cores, {isa}, {threads}, PyTorch {torch.__version__}"


def exp_rate(clock: Clock) -> float:
    """Exponentials per second of torch.exp, in the first-level cache of each thread."""
    x, best = torch.rand(torch.get_num_threads() * 4096), 0.0
    y = torch.empty_like(x)
    for _ in range(10):
        start = clock()
        for _ in range(200):
            torch.exp(x, out=y)
        best = max(best, 200 * len(x) / (clock() - start))
    return best


def matmul_rate(clock: Clock) -> float:
    """Floating-point operations per second of torch.mm at 1024."""
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
    for _ in range(10):
        start = clock()
        torch.mm(a, b)
        best = max(best, 2 * 1024**3 / (clock() - start))
    return best
