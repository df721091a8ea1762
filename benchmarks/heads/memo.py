"""What was computed from a run's file is kept beside it, so that the page is made again without waiting."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def remembered(path: Path, key: str, make: Callable[[], Any]) -> Any:
    """What ``make`` returned for a run and a key when it was first asked, as JSON has it."""
    memo = path.with_suffix(".json")
    known: dict[str, Any] = json.loads(memo.read_text()) if memo.exists() else {}
    if key not in known:
        known[key] = make()
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known))
        os.replace(part, memo)
    return json.loads(json.dumps(known[key]))
