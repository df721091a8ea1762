"""Benchmarks: one resolved experiment, plans and executors, sweeps, presets, studies, reports."""

from infssm.bench.running import resume, run, run_path
from infssm.bench.timing import estimate

__all__ = ["estimate", "resume", "run", "run_path"]
