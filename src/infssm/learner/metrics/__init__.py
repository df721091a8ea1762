"""Measures, the accuracy matrix, the confusion of classes, and everything computed from them."""

from infssm.learner.metrics.accuracies import (
    ACCURACY,
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    RMSE,
    Accuracies,
    Confusion,
    Quantity,
    Summary,
    quantity_of,
)
from infssm.learner.metrics.matrix import AccuracyMatrix, summarize

__all__ = [
    "ACCURACY",
    "BITS_PER_BYTE",
    "BITS_PER_TOKEN",
    "RMSE",
    "Accuracies",
    "AccuracyMatrix",
    "Confusion",
    "Quantity",
    "Summary",
    "quantity_of",
    "summarize",
]
