"""Benchmarks as data: one YAML file each, every value traced to its table."""

from infssm.presets._load import VARIANTS, Preset, list_benchmarks, list_presets, load_preset, paper_numbers
from infssm.presets._run import run

__all__ = ["VARIANTS", "Preset", "list_benchmarks", "list_presets", "load_preset", "paper_numbers", "run"]
