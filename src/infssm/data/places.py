"""Where data sets are, and where infssm keeps what it can find out again."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | Path | None = None) -> Path:
    """The folder that holds data sets: ``root``, else ``$INFSSM_DATA``, else ``~/.cache/infssm/data``."""
    chosen = root or os.environ.get("INFSSM_DATA") or Path("~/.cache/infssm/data")
    return Path(os.path.expanduser(chosen))


def cache_root() -> Path:
    """The folder for what infssm finds out and can find out again: ``$INFSSM_CACHE``, else ``~/.cache/infssm``."""
    return Path(os.environ.get("INFSSM_CACHE") or "~/.cache/infssm").expanduser()
