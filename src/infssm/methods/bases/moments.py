"""Second moments of what layers are given, over the data of a task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from infssm._batch import run_model
from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.core.contract import Context, Loader, model_input
from infssm.methods.core.passes import capture, evaluating
from infssm.ssm import unwrap


class Inputs:
    """What a layer is given in the forwards of a block."""

    def __init__(self, name: str, layer: nn.Module, stack: contextlib.ExitStack) -> None:
        self.name = name
        self._seen = stack.enter_context(capture(layer, inputs=True))

    def take(self) -> Tensor:
        """The input of the last forward, ``[b, ..., D]``."""
        if len(self._seen) != 1:
            raise ConfigError(f"a forward of the model called {self.name} {len(self._seen)} times instead of once")
        taken: Tensor = self._seen.pop()
        return taken


Take = Callable[[Tensor | None], Iterable[tuple[str, Tensor]]]
"""From the mask of a batch, ``[b, tokens]``, to second moments by name, summed over its samples."""


@torch.no_grad()
def gather(
    context: Context, loader: Loader, widths: Mapping[str, int], prepare: Callable[[contextlib.ExitStack], Take]
) -> dict[str, Tensor]:
    """Second moments by name, summed over all samples of ``loader``, in evaluation mode: float64 ``[D, D]``.

    ``prepare`` places its hooks on the stack and returns what is called after each forward; ``widths`` are the D.
    """
    device = context.device
    found = {name: torch.zeros(d, d, dtype=torch.float64, device=device) for name, d in widths.items()}
    with evaluating(unwrap(context.module)) as module, contextlib.ExitStack() as stack:
        take = prepare(stack)
        for batch in loader:
            x = model_input(batch, device)
            run_model(module, x)
            for name, moment in take(x.get("mask") if isinstance(x, Mapping) else None):
                found[name] += moment
    total = dict(zip(found, sum_over_processes(list(found.values())), strict=True))
    if not all(moment.any() for moment in total.values()):
        raise ConfigError("the loader of the task gave no sample; pass one that can be iterated again")
    return total


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x: [b, tokens, D]`` with zeros where ``mask: [b, tokens]`` has padding."""
    return x if mask is None else x * mask[..., None].to(x.dtype)


def second_moment(x: Tensor, mask: Tensor | None) -> Tensor:
    """``Σ_samples mean_tokens x xᵀ`` of ``x: [b, tokens, D]``: ``[D, D]``."""
    if mask is None:
        rows = x.flatten(0, 1)
        return rows.T @ rows / x.shape[1]
    tokens = mask.sum(dim=1).clamp(min=1).to(x.dtype)
    rows = (x / tokens.sqrt()[:, None, None]).flatten(0, 1)
    return rows.T @ rows
