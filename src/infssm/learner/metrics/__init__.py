"""What is measured, the accuracy matrix, the confusion of classes, and everything computed from them."""

from infssm.learner.metrics.accuracies import Accuracies
from infssm.learner.metrics.confusion import Confusion
from infssm.learner.metrics.matrix import AccuracyMatrix
from infssm.learner.metrics.measure import ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, RMSE, Measure, measure_of
from infssm.learner.metrics.reliability import auroc, expected_calibration_error
from infssm.learner.metrics.summary import Summary, summarize

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
