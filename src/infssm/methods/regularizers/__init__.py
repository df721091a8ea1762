"""One file or folder per regularizer: a term that is added to the loss of a base.

Every module of this folder is imported, so that a new one is registered by its file alone.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
