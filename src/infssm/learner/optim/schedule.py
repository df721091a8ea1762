"""Learning rates as pure functions of task, epoch and step (the release's, and a plain one)."""

from __future__ import annotations

import math

from infssm.learner.config.fields import TrainConfig


def task_lr(config: TrainConfig, task: int) -> float:
    """Base learning rate of a task: the release multiplies before every task, task 0 included."""
    power = {"authors": task + 1, "plain": task, "once": min(task, 1)}[config.lr_scale_variant]
    return config.lr * config.lr_scale**power


def learning_rate(config: TrainConfig, task: int, epoch: int, *, epochs: int, progress: float = 0.0) -> float:
    """Learning rate in ``epoch`` of ``epochs``, at ``progress`` in [0, 1) of that epoch."""
    base = task_lr(config, task)
    if config.schedule == "authors":
        return _authors(config, base, epoch, epochs)
    return _plain(config, base, epoch + progress, epochs)


def _authors(config: TrainConfig, base: float, epoch: int, epochs: int) -> float:
    """timm's cosine as the release steps it: with the index of the epoch just finished, so one epoch behind."""
    done = epoch - 1
    warmup, low = config.warmup_epochs, config.min_lr
    if epoch == 0:
        return config.warmup_lr if warmup else base
    if done < warmup:
        return config.warmup_lr + done * (base - config.warmup_lr) / warmup
    return low + 0.5 * (base - low) * (1 + math.cos(math.pi * done / epochs))


def _plain(config: TrainConfig, base: float, epoch: float, epochs: int) -> float:
    """Warm-up as a prefix, then cosine over the rest; neither end lies above the base."""
    warmup = min(config.warmup_epochs, epochs)
    start, low = min(config.warmup_lr, base), min(config.min_lr, base)
    if epoch < warmup:
        return start + (base - start) * epoch / warmup
    return low + 0.5 * (base - low) * (1 + math.cos(math.pi * (epoch - warmup) / max(epochs - warmup, 1e-9)))
