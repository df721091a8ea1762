"""Training one task after another, and using what was learned: the loop, its folder, predictions, export."""

from infssm.learner.config.fields import DataConfig, LogConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from infssm.learner.config.load import (
    config_hash,
    differences,
    expand_overrides,
    load_config,
    merge,
    parse_overrides,
    to_dict,
    to_yaml,
)
from infssm.learner.evaluate import Evaluation
from infssm.learner.events import Interrupted
from infssm.learner.export import export_classifier, export_model
from infssm.learner.knowledge import Lesson
from infssm.learner.learner import Learner, load
from infssm.learner.optim import build_optimizer, decay_groups, learning_rate, task_lr
from infssm.learner.predict import Prediction, TrainedClassifier, load_classifier
from infssm.learner.result import Result
from infssm.learner.saving import load_checkpoint, save_checkpoint

__all__ = [
    "DataConfig",
    "Evaluation",
    "Interrupted",
    "Learner",
    "Lesson",
    "LogConfig",
    "MethodConfig",
    "ModelConfig",
    "Prediction",
    "Result",
    "RunConfig",
    "TrainConfig",
    "TrainedClassifier",
    "build_optimizer",
    "config_hash",
    "decay_groups",
    "differences",
    "expand_overrides",
    "export_classifier",
    "export_model",
    "learning_rate",
    "load",
    "load_checkpoint",
    "load_classifier",
    "load_config",
    "merge",
    "parse_overrides",
    "save_checkpoint",
    "task_lr",
    "to_dict",
    "to_yaml",
]
