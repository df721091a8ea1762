"""Using what was trained: a run as a classifier of images."""

from infssm.inference.classifier import Prediction, TrainedClassifier, load

__all__ = ["Prediction", "TrainedClassifier", "load"]
