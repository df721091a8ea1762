"""Measures, the accuracy matrix, the confusion of classes, and everything computed from them."""

from infssm.learner.metrics.accuracies import (
    ACCURACY,
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    RMSE,
    Accuracies,
    Measure,
    Summary,
    measure_of,
)
from infssm.learner.metrics.classification import Confusion, auroc, expected_calibration_error
from infssm.learner.metrics.matrix import AccuracyMatrix, summarize

__all__ = [
    "ACCURACY",
    "BITS_PER_BYTE",
    "BITS_PER_TOKEN",
    "RMSE",
    "Accuracies",
    "AccuracyMatrix",
    "Confusion",
    "Measure",
    "Summary",
    "auroc",
    "expected_calibration_error",
    "measure_of",
    "summarize",
]
