"""Benchmarks: one resolved experiment, plans and executors, sweeps, presets, studies, reports."""

from infssm.bench.running import resume, run, run_path

__all__ = ["resume", "run", "run_path"]
