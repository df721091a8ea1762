"""Searches for the best settings of a method, on validation data, by any number of processes that share a folder."""

from infssm.bench.sweeps.space import parse_space
from infssm.bench.sweeps.sweep import Sweep
from infssm.bench.sweeps.trials import Trial

__all__ = ["Sweep", "Trial", "parse_space"]
