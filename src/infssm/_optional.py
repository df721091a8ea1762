"""Optional libraries, imported only when they are used."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from infssm._torchvision import mend
from infssm.errors import ConfigError


def require(*names: str, install: str) -> ModuleType:
    """The first of these modules that is installed; raises ConfigError with the command to install it if none is."""
    for name in names:
        if find_spec(name.split(".")[0]) is not None:
            mend()
            return importlib.import_module(name)
    raise ConfigError(f"{names[0].split('.')[0]} is not installed: {install}")
