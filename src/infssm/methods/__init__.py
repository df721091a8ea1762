"""Continual-learning methods: one contract, one file per method or head, composition by name."""

from infssm.methods import clfd, der, er, ewc, heads, inf_ssm, l2p, lucir, lwf, mas, seq, si, ucl, xder
from infssm.methods._build import (
    attach,
    build_method,
    canonical_name,
    describe_method,
    list_methods,
    method_options,
    parse_name,
    register_method,
)
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
from infssm.methods._head import FeatureBatch, Features, FittedHead, Head
from infssm.methods._method import Method, StatesConfig
from infssm.methods._step import total_loss, train_step

__all__ = [
    "Base",
    "Batch",
    "BatchLike",
    "ComponentConfig",
    "Context",
    "FeatureBatch",
    "Features",
    "FittedHead",
    "Head",
    "Method",
    "Regularizer",
    "StatePair",
    "StatesConfig",
    "TaskInfo",
    "Terms",
    "attach",
    "build_method",
    "canonical_name",
    "clfd",
    "der",
    "describe_method",
    "er",
    "ewc",
    "heads",
    "inf_ssm",
    "l2p",
    "list_methods",
    "lucir",
    "lwf",
    "mas",
    "method_options",
    "parse_name",
    "register_method",
    "seq",
    "si",
    "total_loss",
    "train_step",
    "ucl",
    "xder",
]
