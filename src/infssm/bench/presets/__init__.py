"""Benchmarks as data: one YAML file each, every value traced to its table."""

from infssm.bench.presets.load import (
    VARIANTS,
    is_job,
    list_benchmarks,
    list_presets,
    load_preset,
    main_job,
    paper_numbers,
)
from infssm.bench.presets.paper import PAPER_FORMATS, compare_with_paper, coverage, paper_cells
from infssm.bench.presets.plan import fast_dev_config, plan, run

__all__ = [
    "PAPER_FORMATS",
    "VARIANTS",
    "compare_with_paper",
    "coverage",
    "fast_dev_config",
    "is_job",
    "list_benchmarks",
    "list_presets",
    "load_preset",
    "main_job",
    "paper_cells",
    "paper_numbers",
    "plan",
    "run",
]
