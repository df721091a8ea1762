"""The accuracy matrix, the confusion of classes, and everything computed from them."""

from infssm.metrics.confusion import Confusion
from infssm.metrics.matrix import Accuracies, AccuracyMatrix
from infssm.metrics.measures import aa_curve, per_task_forgetting, per_task_transfer
from infssm.metrics.summary import Summary, summarize

__all__ = [
    "Accuracies",
    "AccuracyMatrix",
    "Confusion",
    "Summary",
    "aa_curve",
    "per_task_forgetting",
    "per_task_transfer",
    "summarize",
]
