"""One small job, its plain loop, and a spy: what every adapter has to reproduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.methods import attach
from infssm.models import create_model

STEPS = 3


def model_and_method() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = create_model("vim_nano", num_classes=4, img_size=8, patch_size=4, depth=1, embed_dim=16)
    return model, attach(model, "inf-ssm-exact", num_classes=4, num_tasks=2, weight=10.0)


def data(task: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(task)
    draw = [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(STEPS)]
    return [(x, torch.arange(4) % 2 + 2 * task) for x in draw]


def plain_loop() -> dict[str, Tensor]:
    model, method = model_and_method()
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method.begin_task(task)
        for x, y in data(task):
            loss = F.cross_entropy(model(x), y)
            penalty = method.penalty(x)
            loss = loss + penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.after_step()
        method.end_task(task)
    assert penalty > 1e-6  # the adapters below would be equal without one, too
    return model.state_dict()


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


class Spy:
    """Counts the method's calls and passes them on."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.method, name)

        def call(*args: Any) -> Any:
            kind = name.removesuffix("_terms")
            self.calls.append(kind if kind in ("penalty", "after_step") else (name, args[0]))
            return target(*args)

        return call if callable(target) else target


def calls_of(task: int) -> list[Any]:
    return [("begin_task", task), *(["penalty", "after_step"] * STEPS), ("end_task", task)]
