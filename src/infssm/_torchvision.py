"""Guarded imports of torchvision and timm, which fail where the wheels of torch and torchvision do not match.

A torchvision wheel built for CUDA cannot load its compiled operations with a CPU build of torch. Its import then fails
with ``operator torchvision::nms does not exist``, and timm's with it, although neither needs those operations for image
transforms. Declaring the missing operators, without an implementation, makes the import succeed; calling them still
raises.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from types import ModuleType

import torch

from infssm.errors import ConfigError

_MISSING = re.compile(r"operator torchvision::(\w+) does not exist")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: set[str] = set()
"""Operators declared in this process."""


def mend() -> bool:
    """Make ``import torchvision`` succeed where its wheel is for another torch; return whether that was needed.

    transformers, timm and Lightning import torchvision: call this before importing them. It does nothing if torchvision
    works or is not installed.
    """
    if find_spec("torchvision") is not None:
        torchvision()
    return bool(_declared)


def torchvision(submodule: str = "") -> ModuleType:
    """``torchvision``, or ``torchvision.<submodule>``; ConfigError names the extra to install if it is absent."""
    return _guarded("torchvision", submodule)


def timm(submodule: str = "") -> ModuleType:
    """``timm``, or ``timm.<submodule>``; ConfigError names the extra to install if it is absent."""
    torchvision()
    return _guarded("timm", submodule)


def _guarded(package: str, submodule: str, tried: frozenset[str] = frozenset()) -> ModuleType:
    try:
        return importlib.import_module(f"{package}.{submodule}" if submodule else package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"{package} is not installed: pip install 'infssm[bench]'") from error
    except RuntimeError as error:
        operator = _MISSING.search(str(error))
        if operator is None or operator[1] in tried:
            raise
        # Forget the half-imported modules, so that the next import starts anew.
        for module in [name for name in sys.modules if name.split(".")[0] in (package, "torchvision")]:
            del sys.modules[module]
        torch.library.define(f"torchvision::{operator[1]}", _SCHEMA)
        _declared.add(operator[1])
    return _guarded(package, submodule, tried | {operator[1]})
