"""Optional libraries, imported only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from infssm._torchvision import mend
from infssm.errors import ConfigError


def made_on_first_use(module: dict[str, Any], name: str, make: Callable[[], Any]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that makes the attribute ``name`` when it is first used, and keeps it."""

    def __getattr__(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {asked!r}")
        made = module[name] = make()
        made.__module__, made.__qualname__ = module["__name__"], name
        return made

    return __getattr__


def require(*names: str, install: str) -> ModuleType:
    """The first of these modules that is installed; raises ConfigError with the command to install it if none is."""
    for name in names:
        if find_spec(name.split(".")[0]) is not None:
            mend()
            return importlib.import_module(name)
    raise ConfigError(f"{names[0].split('.')[0]} is not installed: {install}")
