"""The accuracy matrix and everything computed from it."""

from infssm.metrics.matrix import Accuracies, AccuracyMatrix
from infssm.metrics.measures import aa_curve, per_task_forgetting, per_task_transfer
from infssm.metrics.summary import Summary, summarize

__all__ = [
    "Accuracies",
    "AccuracyMatrix",
    "Summary",
    "aa_curve",
    "per_task_forgetting",
    "per_task_transfer",
    "summarize",
]
