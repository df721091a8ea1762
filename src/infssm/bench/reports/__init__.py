"""What is made of finished runs: reports, comparisons, tables."""

from infssm.bench.reports.compare import Comparison, Row, compare
from infssm.bench.reports.report import render_report, write_report, write_reports
from infssm.bench.reports.tables import FORMATS, render, write_comparison

__all__ = [
    "FORMATS",
    "Comparison",
    "Row",
    "compare",
    "render",
    "render_report",
    "write_comparison",
    "write_report",
    "write_reports",
]
