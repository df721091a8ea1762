"""Benchmarks as data: one YAML file each, every value traced to its table."""

from infssm.bench.presets.estimates import Estimate, estimate
from infssm.bench.presets.fast import fast_dev_config
from infssm.bench.presets.load import (
    VARIANTS,
    Preset,
    is_job,
    list_benchmarks,
    list_presets,
    load_preset,
    main_job,
    paper_numbers,
)
from infssm.bench.presets.paper import Cell, Measured, compare_with_paper, paper_cells
from infssm.bench.presets.paper_tables import PAPER_FORMATS, coverage, render_paper
from infssm.bench.presets.plan import plan, run

__all__ = [
    "PAPER_FORMATS",
    "VARIANTS",
    "Cell",
    "Estimate",
    "Measured",
    "Preset",
    "compare_with_paper",
    "coverage",
    "estimate",
    "fast_dev_config",
    "is_job",
    "list_benchmarks",
    "list_presets",
    "load_preset",
    "main_job",
    "paper_cells",
    "paper_numbers",
    "plan",
    "render_paper",
    "run",
]
