"""Passes over a task's data before and after training, for methods that measure or store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.contract import Batch, BatchLike, Loader


class Batches:
    """A loader whose batches have ``x`` and ``y``: plain ``(x, y)`` pairs, as most loaders give, become a Batch."""

    def __init__(self, loader: Any) -> None:
        self.source = loader
        """The loader as it was given, for those who know what else its batches may be."""

    def __iter__(self) -> Iterator[BatchLike]:
        for batch in self.source:
            yield batch if hasattr(batch, "x") else _from_pair(batch)

    def __len__(self) -> int:
        return len(self.source)


def as_batch(batch: Any, device: torch.device) -> Batch:
    """A pair ``(x, y)`` or anything with ``x`` and ``y`` on the device, without raw images."""
    one = batch if hasattr(batch, "x") else _from_pair(batch)
    soft, mask = (getattr(one, name, None) for name in ("soft", "mask"))
    soft, mask = (None if part is None else part.to(device) for part in (soft, mask))
    return Batch(one.x.to(device), one.y.to(device), soft, mask=mask)


def _from_pair(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigError(f"a loader must give (x, y) pairs or batches with .x and .y, got {type(batch).__name__}")
    return Batch(batch[0], batch[1])


def require_loader(loader: Loader | None, method: str, why: str) -> Loader:
    """The loader, or an error that says what for and how to give one."""
    if loader is None:
        raise ConfigError(
            f"{method} {why}: call begin_task(task, loader) and end_task(task, loader) with a loader of the task's "
            "training batches (x, y), without mixup"
        )
    return loader


def samples(loader: Loader, limit: int | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Single samples ``x: [1, ...], y: [1]``: all of them, or ``limit`` spread evenly over the batches."""
    quota = None if limit is None else _quota(loader, limit)
    for index, batch in enumerate(loader):
        x, y = batch.x.to(device), batch.y.to(device)
        for i in range(len(y) if quota is None else min(len(y), quota(index))):
            yield x[i : i + 1], y[i : i + 1]


def _quota(loader: Loader, limit: int) -> Any:
    try:
        total = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError("fisher_samples needs a loader with a length; use fisher_samples=None") from None
    return lambda index: (index + 1) * limit // total - index * limit // total


@contextlib.contextmanager
def evaluating(module: nn.Module, *, gradients: bool = False) -> Iterator[nn.Module]:
    """Evaluation mode for the block, without gradients unless asked for; afterwards every submodule is as it was."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield module
    finally:
        for child, training in modes:
            child.training = training
