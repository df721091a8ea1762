"""Continual-learning methods: one contract, one file per method, composition by name."""

from infssm.methods import ewc, inf_ssm, lwf, mas, seq, si, ucl
from infssm.methods._build import attach, build_method, list_methods, parse_name, register_method
from infssm.methods._contract import (
    Base,
    Batch,
    BatchLike,
    ComponentConfig,
    Context,
    Regularizer,
    StatePair,
    TaskInfo,
    Terms,
)
from infssm.methods._method import Method, StatesConfig

__all__ = [
    "Base",
    "Batch",
    "BatchLike",
    "ComponentConfig",
    "Context",
    "Method",
    "Regularizer",
    "StatePair",
    "StatesConfig",
    "TaskInfo",
    "Terms",
    "attach",
    "build_method",
    "ewc",
    "inf_ssm",
    "list_methods",
    "lwf",
    "mas",
    "parse_name",
    "register_method",
    "seq",
    "si",
    "ucl",
]
