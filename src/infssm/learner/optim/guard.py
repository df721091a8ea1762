"""Stop at the first value that is not finite, and say where it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import DivergedError


def health(total: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Return ``total`` if it and all gradients are finite, else a value that is not; a scalar, no synchronisation."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return total.detach()
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, torch.inf)])
    return total.detach().float() + 0.0 * norms.max()


def diagnose(module: nn.Module, terms: Mapping[str, Tensor], repeat: Callable[[], Any], where: str) -> DivergedError:
    """Build the error for a step that was not finite: the loss term, and the first layer at fault.

    ``repeat`` runs the step's forward again, so that layer outputs can be inspected; training has ended by then.
    """
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    gradient = next((name for name, value in gradients if not torch.isfinite(value).all()), None)
    bad_terms = [name for name, value in terms.items() if not torch.isfinite(value).all()]
    layer = _first_bad_output(module, repeat) if bad_terms else None
    loss = f"loss term {' and '.join(map(repr, bad_terms))} is not finite" if bad_terms else "all loss terms are finite"
    if layer is not None:
        place = f"first layer with an output that is not finite: {layer}"
    elif gradient is not None:
        place = f"first layer with a gradient that is not finite: {gradient}"
    else:
        place = "all layer outputs and gradients are finite"
    return DivergedError(
        f"training diverged at {where}: {loss}; {place}. The last good checkpoint is kept; "
        "lower train.lr or the method's weight, or use train.precision=32-true"
    )


def _first_bad_output(module: nn.Module, repeat: Callable[[], Any]) -> str | None:
    """Name of the first module, in order of execution, whose output holds NaN or infinity."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(name)

        return hook

    leaves = [(name, child) for name, child in module.named_modules() if name]
    handles = [child.register_forward_hook(watch(name)) for name, child in leaves]
    try:
        repeat()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _finite(output: Any) -> bool:
    tensors = output if isinstance(output, (tuple, list)) else [output]
    return all(bool(torch.isfinite(t).all()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
