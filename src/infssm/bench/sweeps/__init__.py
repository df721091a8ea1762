"""Searches for the best settings of a method, on validation data, by any number of processes that share a folder."""

from infssm.bench.sweeps.report import Row, objective, rows, winners_command, write_findings
from infssm.bench.sweeps.space import Choice, Range, parse_space
from infssm.bench.sweeps.sweep import Sweep
from infssm.bench.sweeps.trials import Trial

__all__ = [
    "Choice",
    "Range",
    "Row",
    "Sweep",
    "Trial",
    "objective",
    "parse_space",
    "rows",
    "winners_command",
    "write_findings",
]
