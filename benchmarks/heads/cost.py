"""The time of a step of each arm of docs/results/heads.md relative to plain training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from benchmarks.heads.runs import SEARCHED, Place, Spec, setup_of
from benchmarks.heads.search import ARMS, REPLAY
from benchmarks.kernels.measure import Method, interleaved
from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.methods import train_step

STEPS = 20


def costs(place: Place, arms: list[str]) -> dict[str, float]:
    """Processor time of a step on b50-5's second task, divided by plain training's: medians, the arms in turn."""
    steps = {name: Method(_stepper(name, place)) for name in dict.fromkeys(["plain", *arms])}
    found = interleaved(steps, STEPS, time.process_time)
    return {name: timing.median / found["plain"].median for name, timing in found.items()}


def _stepper(name: str, place: Place) -> Callable[[], object]:
    """A step of an arm in the middle of its second task."""
    arm = (ARMS | REPLAY)[name]
    weight = {"weight": arm.weights[0]} if arm.weights else {}
    setup = setup_of(Spec("b50-5", SEARCHED, name, arm.options | weight, 3e-4), place)
    method, first, second = setup.method, setup.stream[0], setup.stream[1]
    method.begin_task(first, setup.statistics_loader(first))
    method.end_task(first, setup.statistics_loader(first))
    method.begin_task(second, setup.statistics_loader(second), lr=3e-4)
    method.module.train()
    optimizer = build_optimizer(method.param_groups(decay_groups(method.module, 0.05)))
    set_learning_rate(optimizer, 3e-4)
    batches = itertools.cycle(setup.train_loader(second, 0))
    method.begin_epoch(0, 1)

    def step() -> object:
        batch = next(batches)
        return train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step)

    return step
