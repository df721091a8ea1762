"""Continual-learning methods: one contract, one file per method or family, composition by name.

Every module of `bases`, `regularizers` and `heads` is imported, so that a new method is one new file.
"""

import importlib
import pkgutil

from infssm.methods.core.build import attach as attach
from infssm.methods.core.build import build_method as build_method
from infssm.methods.core.build import canonical_name as canonical_name
from infssm.methods.core.build import check_suits as check_suits
from infssm.methods.core.build import describe_method as describe_method
from infssm.methods.core.build import explain_method as explain_method
from infssm.methods.core.build import list_methods as list_methods
from infssm.methods.core.build import method_options as method_options
from infssm.methods.core.build import parse_name as parse_name
from infssm.methods.core.build import register_method as register_method
from infssm.methods.core.contract import Base as Base
from infssm.methods.core.contract import Batch as Batch
from infssm.methods.core.contract import BatchLike as BatchLike
from infssm.methods.core.contract import ComponentConfig as ComponentConfig
from infssm.methods.core.contract import Context as Context
from infssm.methods.core.contract import Head as Head
from infssm.methods.core.contract import ModelPair as ModelPair
from infssm.methods.core.contract import PairConfig as PairConfig
from infssm.methods.core.contract import Regularizer as Regularizer
from infssm.methods.core.contract import TaskInfo as TaskInfo
from infssm.methods.core.contract import Terms as Terms
from infssm.methods.core.contract import Transforms as Transforms
from infssm.methods.core.head import FeatureBatch as FeatureBatch
from infssm.methods.core.head import Features as Features
from infssm.methods.core.head import FittedHead as FittedHead
from infssm.methods.core.losses import total_loss as total_loss
from infssm.methods.core.losses import train_step as train_step
from infssm.methods.core.method import Method as Method
from infssm.methods.core.method import StatesConfig as StatesConfig

for _folder in ("bases", "regularizers", "heads"):
    for _module in pkgutil.iter_modules([f"{__path__[0]}/{_folder}"], f"{__name__}.{_folder}."):
        importlib.import_module(_module.name)
