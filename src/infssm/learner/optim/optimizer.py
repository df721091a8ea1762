"""AdamW with timm's weight-decay rule."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import nn


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
