"""Reports, comparisons, tables and figures of finished runs."""

from infssm.bench.reports.compare import Comparison, compare
from infssm.bench.reports.figures import write_figures
from infssm.bench.reports.report import render_report, write_report, write_reports
from infssm.bench.reports.rows import PairedTest, Row, paired_tests
from infssm.bench.reports.tables import FORMATS, write_comparison

__all__ = [
    "FORMATS",
    "Comparison",
    "PairedTest",
    "Row",
    "compare",
    "paired_tests",
    "render_report",
    "write_comparison",
    "write_figures",
    "write_report",
    "write_reports",
]
