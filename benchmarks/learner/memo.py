"""Results of parts of a benchmark, each in a file of its own, so that a stopped benchmark continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def memo(path: Path, measure: Callable[[], Any]) -> Any:
    """What the file holds; measured and written first where it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = json.dumps(measure(), indent=1)
        path.write_text(found + "\n")
        print(f"{path.parent.name}/{path.stem}: measured", flush=True)
    return json.loads(path.read_text())
