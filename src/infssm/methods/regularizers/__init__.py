"""One file or folder per regularizer: a term that is added to the loss of a base.

Every module of this folder is imported, so that adding one touches its own file alone.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
