"""Training: configuration, the loop, checkpoints, devices."""

from infssm.train.config import (
    DataConfig,
    LogConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    config_hash,
    differences,
    expand_overrides,
    load_config,
    merge,
    parse_overrides,
    to_dict,
    to_yaml,
)
from infssm.train.optim import build_optimizer, decay_groups, learning_rate, task_lr
from infssm.train.result import Result
from infssm.train.running import resume, run, run_path
from infssm.train.saving.checkpoint import load_checkpoint, save_checkpoint
from infssm.train.signals import Interrupted

__all__ = [
    "DataConfig",
    "Interrupted",
    "LogConfig",
    "MethodConfig",
    "ModelConfig",
    "Result",
    "RunConfig",
    "TrainConfig",
    "build_optimizer",
    "config_hash",
    "decay_groups",
    "differences",
    "expand_overrides",
    "learning_rate",
    "load_checkpoint",
    "load_config",
    "merge",
    "parse_overrides",
    "resume",
    "run",
    "run_path",
    "save_checkpoint",
    "task_lr",
    "to_dict",
    "to_yaml",
]
