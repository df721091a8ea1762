"""infssm: learn task after task with state space models, without forgetting.

Everything a user needs is a name of this module; each is loaded on first use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infssm.bench.presets import run as run
    from infssm.data import TaskStream as TaskStream
    from infssm.data import load_dataset as load_dataset
    from infssm.data import register_dataset as register_dataset
    from infssm.errors import CheckpointError as CheckpointError
    from infssm.errors import ConfigError as ConfigError
    from infssm.errors import DataError as DataError
    from infssm.errors import DivergedError as DivergedError
    from infssm.errors import InfssmError as InfssmError
    from infssm.errors import NoSSMLayersError as NoSSMLayersError
    from infssm.learner.learner import Learner as Learner
    from infssm.learner.learner import load as load
    from infssm.methods import attach as attach
    from infssm.methods import list_methods as list_methods
    from infssm.methods import register_method as register_method
    from infssm.models import create_model as create_model
    from infssm.models import list_models as list_models
    from infssm.models import register_model as register_model
    from infssm.ops import causal_conv1d as causal_conv1d
    from infssm.ops import selective_scan as selective_scan
    from infssm.ssm import StateSpace as StateSpace
    from infssm.ssm import compress as compress
    from infssm.ssm import distance as distance
    from infssm.ssm import gram as gram
    from infssm.ssm import gram_dense as gram_dense
    from infssm.ssm import list_distances as list_distances
    from infssm.ssm import principal_angles as principal_angles
    from infssm.ssm import record_states as record_states
    from infssm.ssm import register_distance as register_distance
    from infssm.ssm import register_probe as register_probe
    from infssm.ssm import soft_normalize as soft_normalize

__version__ = "0.1.0"

_PACKAGES = {
    "bench.presets": ("run",),
    "data": ("TaskStream", "load_dataset", "register_dataset"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DivergedError",
        "InfssmError",
        "NoSSMLayersError",
    ),
    "learner.learner": ("Learner", "load"),
    "methods": ("attach", "list_methods", "register_method"),
    "models": ("create_model", "list_models", "register_model"),
    "ops": ("causal_conv1d", "selective_scan"),
    "ssm": (
        "StateSpace",
        "compress",
        "distance",
        "gram",
        "gram_dense",
        "list_distances",
        "principal_angles",
        "record_states",
        "register_distance",
        "register_probe",
        "soft_normalize",
    ),
}
_HOME = {name: package for package, names in _PACKAGES.items() for name in names}

__all__ = sorted(_HOME)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Imports leave no garbage: looking for some among PyTorch's objects took a sixth of the time of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'infssm' has no attribute {name!r}")
    with _without_collector():  # a package may load the name on first use, too
        value = getattr(importlib.import_module(f"infssm.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
