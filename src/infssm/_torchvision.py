"""This library's only way to torchvision and timm, guarded against a mix of wheels.

A torchvision wheel linked to CUDA cannot load its compiled operations beside a CPU build of torch. Its import then
stops at ``operator torchvision::nms does not exist``, and timm's with it, although neither needs those operations for
image transforms. Declaring the missing operators (no implementation) lets the import pass; calling them still fails, as
it should.
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
    """Make ``import torchvision`` pass where its wheel is for another torch; return whether that was needed.

    transformers, timm and Lightning import torchvision themselves: call this before them. Nothing happens where
    torchvision fits, or is not installed.
    """
    if find_spec("torchvision") is not None:
        torchvision()
    return bool(_declared)


def torchvision(submodule: str = "") -> ModuleType:
    """``torchvision``, or ``torchvision.<submodule>``; ConfigError names the extra to install where it is absent."""
    return _guarded("torchvision", submodule)


def timm(submodule: str = "") -> ModuleType:
    """``timm``, or ``timm.<submodule>``; ConfigError names the extra to install where it is absent."""
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
        _drop(package)
        torch.library.define(f"torchvision::{operator[1]}", _SCHEMA)
        _declared.add(operator[1])
    return _guarded(package, submodule, tried | {operator[1]})


def _drop(package: str) -> None:
    """Forget the half-imported modules, so that the next import starts anew."""
    for module in [name for name in sys.modules if name.split(".")[0] in (package, "torchvision")]:
        del sys.modules[module]
