"""Continual-learning methods: one contract, one file per method or family, composition by name.

Every module of `bases`, `regularizers` and `heads` is imported, so that a new method is one new file.
"""

import importlib
import pkgutil

from infssm.methods.core.build import (
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
from infssm.methods.core.contract import (
    Base,
    Batch,
    BatchLike,
    ComponentConfig,
    Context,
    Head,
    ModelPair,
    PairConfig,
    Regularizer,
    TaskInfo,
    Terms,
    Transforms,
)
from infssm.methods.core.head import FeatureBatch, Features, FittedHead
from infssm.methods.core.losses import total_loss, train_step
from infssm.methods.core.method import Method, StatesConfig

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
    "ModelPair",
    "PairConfig",
    "Regularizer",
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

for _folder in ("bases", "regularizers", "heads"):
    for _module in pkgutil.iter_modules([f"{__path__[0]}/{_folder}"], f"{__name__}.{_folder}."):
        importlib.import_module(_module.name)
