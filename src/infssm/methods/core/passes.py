"""Passes over a task's data and through a model, for methods that measure or store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.tasks import Loader


def require_loader(loader: Loader | None, method: str, why: str) -> Loader:
    """The loader, or an error that explains what it is needed for and how to pass one."""
    if loader is None:
        raise ConfigError(
            f"{method} {why}: call begin_task(task, loader) and end_task(task, loader) with a loader of the task's "
            "training batches (x, y), without mixup"
        )
    return loader


def samples(loader: Loader, limit: int | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Single samples ``x: [1, ...], y: [1]``: all of them, or ``limit`` spread evenly over the batches.

    Sequences come without the padding of their batch.
    """
    batches = 0
    if limit is not None:
        try:
            batches = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise ConfigError("fisher_samples needs a loader with a length; use fisher_samples=None") from None
    for index, batch in enumerate(loader):
        x, y = batch.x.to(device), batch.y.to(device)
        count, mask = len(y), getattr(batch, "mask", None)
        if limit is not None:
            count = min(count, (index + 1) * limit // batches - index * limit // batches)
        for i in range(count):
            one = x[i : i + 1]
            yield one if mask is None else one[:, : int(mask[i].sum())], y[i : i + 1]


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


@contextlib.contextmanager
def capture(module: nn.Module, *, inputs: bool = False) -> Iterator[list[Any]]:
    """Collect what ``module`` returns (or its first argument) in the forwards of the block.

    Works below any wrapper around the model (DDP, Fabric), whose forward gives logits alone.
    """
    seen: list[Any] = []
    if inputs:
        handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    else:
        handle = module.register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()
