"""How weights move: the optimizer, its learning rate, and a guard against steps that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from infssm.errors import DivergedError
from infssm.learner.config.fields import TrainConfig


def task_lr(config: TrainConfig, task: int) -> float:
    """Base learning rate of a task: the release multiplies before every task, task 0 included."""
    power = {"authors": task + 1, "plain": task, "once": min(task, 1)}[config.lr_scale_variant]
    scale = 1.0 if config.lr_scale is None else config.lr_scale
    return config.lr * scale**power


def learning_rate(config: TrainConfig, task: int, epoch: int, *, epochs: int, progress: float = 0.0) -> float:
    """Learning rate in ``epoch`` of ``epochs``, at ``progress`` in [0, 1) of that epoch."""
    base, start, low, warmup = task_lr(config, task), config.warmup_lr, config.min_lr, config.warmup_epochs
    if config.schedule == "authors":
        # timm's cosine as the release steps it: with the index of the epoch just finished, so one epoch behind.
        if epoch == 0:
            return start if warmup else base
        if epoch - 1 < warmup:
            return start + (epoch - 1) * (base - start) / warmup
        return low + 0.5 * (base - low) * (1 + math.cos(math.pi * (epoch - 1) / epochs))
    # Warm-up as a prefix, then cosine over the rest; neither end lies above the base.
    now, warmup, start, low = epoch + progress, min(warmup, epochs), min(start, base), min(low, base)
    if now < warmup:
        return start + (base - start) * now / warmup
    return low + 0.5 * (base - low) * (1 + math.cos(math.pi * (now - warmup) / max(epochs - warmup, 1e-9)))


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters as timm does: no decay for 1-D parameters, ``.bias``, and ``module.no_weight_decay()``.

    ``A_log`` is 2-D and therefore decayed, as in the release, although Mamba's modules mark it as exempt.
    """
    exempt: set[str] = set()  # names that modules exempt, such as ``pos_embed``, as full parameter names
    for prefix, child in module.named_modules():
        if callable(rule := getattr(child, "no_weight_decay", None)):
            listed = cast("Callable[[], Collection[str]]", rule)()
            exempt |= {f"{prefix}.{name}" if prefix else name for name in listed}
    plain: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        free = parameter.ndim <= 1 or name.endswith(".bias") or name in exempt
        (plain if free else decayed).append(parameter)
    groups = [
        {"name": "no_decay", "params": plain, "weight_decay": 0.0},
        {"name": "decay", "params": decayed, "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """AdamW, betas (0.9, 0.999), eps 1e-8. A group's ``lr_scale`` (1 if absent) multiplies the scheduled rate."""
    kinds = {p.device.type for group in groups for p in group["params"]}
    fused = kinds <= {"cpu"} or kinds <= {"cuda"}
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the rate ``lr`` times its own ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def is_finite(total: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Whether the loss ``total`` and all gradients are finite; waits for the device once."""
    gradients = [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in parameters if p.grad is not None]
    found = torch.zeros((), device=total.device)
    if gradients:  # GradScaler's check, with a scale of 1: a quarter of the time of the gradients' norms
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones_like(found))
    return (0.0 * total.detach() + found).item() == 0


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
