"""Seeds derived from the place where random numbers are used, never from what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all ``parts``, such as (run seed, task, epoch, "shuffle")."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A torch generator seeded with :func:`derive`."""
    return torch.Generator().manual_seed(derive(*parts))


def seed_all(*parts: int | str) -> None:
    """Seed torch (all devices), NumPy and Python from ``parts``.

    The loop calls this before every phase (start of a task, epoch, end of a task), so a phase repeated after a crash
    draws the same numbers, on every process.
    """
    seed = derive(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - code outside this library may draw from the global generator
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with the global generators of random, NumPy and torch seeded, and put them back after."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - timm draws from the legacy global generator
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
