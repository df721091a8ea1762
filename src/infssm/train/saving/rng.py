"""Random generators whose state is a pure function of where the run stands."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_for(*parts: int | str) -> int:
    """Return a 63-bit seed from parts such as ``(seed, task, epoch)``; near parts give unrelated seeds."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed torch (all devices), NumPy and Python from ``parts``.

    The loop calls this before every phase (start of a task, epoch, end of a task), so a phase repeated after a crash
    draws the same numbers, on every process.
    """
    seed = seed_for(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - code outside this library may draw from the global generator
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of torch's, NumPy's and Python's generators as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": list(random.getstate()),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
