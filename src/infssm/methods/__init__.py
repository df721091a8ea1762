"""Continual-learning methods: one contract, one file or folder per method, one file per head, composition by name.

Every module of this folder is imported, so that adding a method touches its own file alone.
"""

import importlib
import pkgutil

from infssm.methods._build import (
    attach,
    build_method,
    canonical_name,
    check_suits,
    describe_method,
    explain_method,
    list_methods,
    method_options,
    parse_name,
    register_method,
)
from infssm.methods._method import Method, StatesConfig
from infssm.methods._step import total_loss, train_step
from infssm.methods.contract import (
    Base,
    Batch,
    BatchLike,
    ComponentConfig,
    Context,
    OldNew,
    PairConfig,
    Regularizer,
    StatePair,
    TaskInfo,
    Terms,
    Transforms,
)
from infssm.methods.head import FeatureBatch, Features, FittedHead, Head

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
    "OldNew",
    "PairConfig",
    "Regularizer",
    "StatePair",
    "StatesConfig",
    "TaskInfo",
    "Terms",
    "Transforms",
    "attach",
    "build_method",
    "canonical_name",
    "check_suits",
    "describe_method",
    "explain_method",
    "list_methods",
    "method_options",
    "parse_name",
    "register_method",
    "total_loss",
    "train_step",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
