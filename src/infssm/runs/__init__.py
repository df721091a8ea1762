"""Run directories, and what is made of them: reports, comparisons, tables."""

from infssm.runs.compare import Comparison, Row, compare
from infssm.runs.directory import RunDirectory, find_runs
from infssm.runs.env import commit_of, environment
from infssm.runs.manifest import read_checked
from infssm.runs.report import render_report, write_report, write_reports
from infssm.runs.tables import FORMATS, render, write_comparison

__all__ = [
    "FORMATS",
    "Comparison",
    "Row",
    "RunDirectory",
    "commit_of",
    "compare",
    "environment",
    "find_runs",
    "read_checked",
    "render",
    "render_report",
    "write_comparison",
    "write_report",
    "write_reports",
]
