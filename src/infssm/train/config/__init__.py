"""The configuration of a run: its fields, and how YAML, mappings and overrides become one."""

from infssm.train.config.fields import DataConfig, LogConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from infssm.train.config.grid import expand_overrides
from infssm.train.config.load import config_hash, differences, load_config, merge, parse_overrides, to_dict, to_yaml

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
