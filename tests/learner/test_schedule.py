from __future__ import annotations

import math

import pytest

from infssm.learner.config.fields import TrainConfig
from infssm.learner.optim import learning_rate, task_lr

IMAGENET_R = TrainConfig(
    lr=5e-4, lr_scale=0.25, lr_scale_variant="authors", schedule="authors", warmup_lr=1e-4, min_lr=1e-5, warmup_epochs=5
)
EPOCHS = 40


def trace(config: TrainConfig, task: int, epochs: int = EPOCHS) -> list[float]:
    return [learning_rate(config, task, epoch, epochs=epochs) for epoch in range(epochs)]


@pytest.mark.parametrize(
    ("lr", "scale", "expected"),
    [
        (5e-4, 0.25, [1.25e-4, 3.13e-5, 7.81e-6, 1.95e-6, 4.88e-7, 1.22e-7, 3.05e-8, 7.63e-9, 1.91e-9, 4.77e-10]),
        (1e-5, 0.5, [5e-6, 2.5e-6, 1.25e-6, 6.25e-7, 3.13e-7, 1.56e-7, 7.81e-8, 3.91e-8, 1.95e-8, 9.77e-9]),
        (1e-4, 0.5, [5e-5, 2.5e-5, 1.25e-5, 6.25e-6, 3.13e-6, 1.56e-6, 7.81e-7, 3.91e-7, 1.95e-7, 9.77e-8]),
    ],
)
def test_task_scaling_as_released(lr: float, scale: float, expected: list[float]) -> None:
    config = TrainConfig(lr=lr, lr_scale=scale, lr_scale_variant="authors")
    assert [task_lr(config, t) for t in range(10)] == pytest.approx(expected, rel=4e-3)


def test_other_task_scalings() -> None:
    plain = TrainConfig(lr=1.0, lr_scale=0.5, lr_scale_variant="plain")
    once = TrainConfig(lr=1.0, lr_scale=0.5, lr_scale_variant="once")
    assert [task_lr(plain, t) for t in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert [task_lr(once, t) for t in range(4)] == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("task", [1, 2, 4])
def test_released_schedule_starts_at_the_warmup_rate_twice(task: int) -> None:
    assert trace(IMAGENET_R, task)[:2] == [1e-4, 1e-4]


def test_released_schedule_of_the_last_task() -> None:
    rates = trace(IMAGENET_R, 4)
    assert rates[:6] == pytest.approx([1e-4, 1e-4, 8.0e-5, 6.0e-5, 4.0e-5, 2.0e-5], abs=5e-7)
    assert rates[6] == pytest.approx(8.5e-7, rel=2e-2)
    assert rates[39] == pytest.approx(9.94e-6, rel=1e-3)
    assert sum(rates[:6]) / sum(rates) == pytest.approx(0.68, abs=5e-3)


@pytest.mark.parametrize("task", [0, 1, 2, 4])
def test_released_schedule_is_timms_one_epoch_behind(task: int) -> None:
    base, w, m, warmup = 5e-4 * 0.25 ** (task + 1), 1e-4, 1e-5, 5

    def timm(s: int) -> float:
        if s < warmup:
            return w + s * (base - w) / warmup
        return m + 0.5 * (base - m) * (1 + math.cos(math.pi * s / EPOCHS))

    assert trace(IMAGENET_R, task) == pytest.approx([w, *(timm(e - 1) for e in range(1, EPOCHS))])


def test_plain_schedule_warms_up_then_falls_to_the_minimum() -> None:
    config = TrainConfig(lr=1e-3, warmup_lr=1e-5, min_lr=1e-6, warmup_epochs=2, schedule="plain")
    rates = [learning_rate(config, 0, e, epochs=6, progress=p / 10) for e in range(6) for p in range(10)]
    top = rates.index(max(rates))
    assert rates[0] == 1e-5
    assert top == 20
    assert max(rates) == pytest.approx(1e-3)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert learning_rate(config, 0, 6, epochs=6) == pytest.approx(1e-6)
    assert learning_rate(config, 0, 4, epochs=6) == pytest.approx(1e-6 + 0.5 * (1e-3 - 1e-6))


def test_plain_schedule_never_exceeds_the_base() -> None:
    config = TrainConfig(lr=1e-3, lr_scale=0.1, warmup_lr=1e-4, min_lr=1e-4, warmup_epochs=1, schedule="plain")
    rates = [learning_rate(config, 3, e, epochs=5, progress=p / 4) for e in range(5) for p in range(4)]
    assert max(rates) <= task_lr(config, 3) * (1 + 1e-12)


def test_plain_schedule_shorter_than_its_warmup() -> None:
    config = TrainConfig(lr=1e-3, warmup_epochs=5, schedule="plain")
    assert learning_rate(config, 0, 1, epochs=2) == pytest.approx(1e-5 + (1e-3 - 1e-5) / 2)
