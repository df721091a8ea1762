"""Using what was trained: a run as a classifier of images."""

from infssm.inference.classifier import Prediction, TrainedClassifier, load
from infssm.inference.export import export_classifier, export_model

__all__ = ["Prediction", "TrainedClassifier", "export_classifier", "export_model", "load"]
