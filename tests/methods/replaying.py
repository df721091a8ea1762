"""A small training loop over toy tasks, for methods with a memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infssm.methods import Method, build_method
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS, Task

EPOCHS = 2
HOSTS = ["er", "der", "der++", "lucir", "x-der", "l2p-r", "clfd"]
OPTIONS: dict[str, dict[str, Any]] = {
    "lucir": {"finetune_epochs": 2, "finetune_batch": 4},
    "x-der": {"simclr_batch_size": 3},
    "l2p-r": {"pool_size": 4, "length": 2, "select": 2},
}


def build(name: str, *, model: nn.Module | None = None, seed: int = 0, **options: Any) -> Method:
    """The named method on a fresh toy Vim, with a buffer of 12."""
    torch.manual_seed(seed)
    options = {"buffer_size": 12, **OPTIONS.get(name.split("+inf")[0], {}), **options}
    return build_method(
        toys.vim() if model is None else model, name, num_classes=CLASSES, num_tasks=len(TASKS), seed=seed, **options
    )


def optimizer_of(method: Method) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in method.module.parameters() if p.requires_grad], lr=1e-2)


def step(method: Method, batch: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    terms = method.loss(batch)
    optimizer.zero_grad()
    toys.total(terms).backward()
    optimizer.step()
    method.after_step()
    return {key: value.detach() for key, value in terms.items()}


def train(method: Method, task: Task, *, epochs: int = EPOCHS) -> list[dict[str, Tensor]]:
    """Run a whole task; the terms of every step."""
    batches = toys.loader(task)
    method.begin_task(task, batches)
    optimizer, history = optimizer_of(method), []
    for epoch in range(epochs):
        method.begin_epoch(epoch, epochs)
        history += [step(method, batch, optimizer) for batch in batches]
        method.end_epoch(epoch, epochs)
    method.end_task(task, batches)
    return history
