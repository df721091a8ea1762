"""The configuration of a run: its fields, and how YAML, mappings and overrides become one."""

from infssm.learner.config.fields import DataConfig, LogConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from infssm.learner.config.grid import expand_overrides
from infssm.learner.config.load import config_hash, differences, load_config, merge, parse_overrides, to_dict, to_yaml

__all__ = [
    "DataConfig",
    "LogConfig",
    "MethodConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "config_hash",
    "differences",
    "expand_overrides",
    "load_config",
    "merge",
    "parse_overrides",
    "to_dict",
    "to_yaml",
]
