"""Python files of the user that register methods, models, data sets or distances: ``infssm run --import my.py``."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from infssm.errors import ConfigError

_VARIABLE = "INFSSM_IMPORT"
"""Environment variable that tells the processes of a run which files to import."""


def import_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Import Python files once, under the names that ``import`` would give them; processes started later do so too."""
    for path in map(Path, paths):
        file = path.resolve()
        known = sys.modules.get(file.stem)
        if known is not None and getattr(known, "__file__", None) == str(file):
            continue
        if known is not None or file.suffix != ".py" or not file.is_file():
            reason = "a module of that name is imported already" if known is not None else "there is no such .py file"
            raise ConfigError(f"--import {path}: {reason}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[file.stem]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            where = f", line {lines[-1]}" if lines else ""
            raise ConfigError(f"--import {path}{where}: {type(error).__name__}: {error}") from error
        earlier = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(file) if not earlier else f"{earlier}{os.pathsep}{file}"


def import_files_of_parent() -> None:
    """In a worker process: import the user code that the main process imported."""
    import_files(filter(None, os.environ.get(_VARIABLE, "").split(os.pathsep)))
