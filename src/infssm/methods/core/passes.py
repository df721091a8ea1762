"""Passes over a task's data and through a model, for methods that measure or store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infssm._batch import model_input, run_model
from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.core.context import Context
from infssm.methods.core.tasks import Loader
from infssm.ssm import unwrap


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
    """Evaluation mode for the block, without gradients unless requested; afterwards every submodule is as it was."""
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

    Works below any wrapper around the model (DDP, Fabric), whose forward gives only logits.
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


Moments = Callable[[Mapping[str, Tensor], "Tensor | None"], Mapping[str, Tensor]]
"""From what layers were given, ``[b, ..., D]`` by name, and the batch's mask ``[b, tokens]`` to second moments by name,
summed over the samples."""


@torch.no_grad()
def sum_moments(
    context: Context, loader: Loader, layers: Mapping[str, nn.Module], widths: Mapping[str, int], moments: Moments
) -> dict[str, Tensor]:
    """Second moments by name, summed over all samples of ``loader``, in evaluation mode: float64 ``[D, D]``.

    ``layers`` are those whose inputs ``moments`` is given; ``widths`` are the D.
    """
    device = context.device
    total = {name: torch.zeros(d, d, dtype=torch.float64, device=device) for name, d in widths.items()}
    with evaluating(unwrap(context.module)) as module, contextlib.ExitStack() as stack:
        seen = {name: stack.enter_context(capture(layer, inputs=True)) for name, layer in layers.items()}
        for batch in loader:
            x = model_input(batch, device)
            run_model(module, x)
            for name, inputs in seen.items():
                if len(inputs) != 1:
                    raise ConfigError(f"a forward of the model called {name} {len(inputs)} times instead of once")
            mask = x.get("mask") if isinstance(x, Mapping) else None
            for name, moment in moments({name: inputs.pop() for name, inputs in seen.items()}, mask).items():
                total[name] += moment
    total = dict(zip(total, sum_over_processes(list(total.values())), strict=True))
    if not all(moment.any() for moment in total.values()):
        raise ConfigError("the loader of the task gave no sample; pass one that can be iterated again")
    return total


def second_moment(x: Tensor, mask: Tensor | None) -> Tensor:
    """``Σ_samples mean_tokens x xᵀ`` of ``x: [b, tokens, D]``, padding left out: ``[D, D]``."""
    if mask is None:
        rows = x.flatten(0, 1)
        return rows.T @ rows / x.shape[1]
    tokens = mask.sum(dim=1).clamp(min=1).to(x.dtype)
    rows = (masked(x, mask) / tokens.sqrt()[:, None, None]).flatten(0, 1)
    return rows.T @ rows


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x: [b, tokens, D]`` with zeros where ``mask: [b, tokens]`` has padding."""
    return x if mask is None else x * mask[..., None].to(x.dtype)
