"""One file per head. Every module of this folder is imported, so that a new head is registered by its file."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
