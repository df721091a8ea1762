"""Accuracy on tasks, class-incremental and task-incremental, while a run works and of one that is saved."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from infssm.data import Split, Task
from infssm.data.loader import Part
from infssm.runs import RunDirectory
from infssm.train.config import RunConfig, load_config, merge
from infssm.train.devices import launch
from infssm.train.setup import Setup, build, load_weights

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Accuracy(NamedTuple):
    """Fractions of ``images`` that are right: among all ``seen`` classes, and inside the image's own task."""

    class_incremental: float
    task_incremental: float
    images: int


@torch.no_grad()
def evaluate(
    fabric: Fabric, setup: Setup, task: Task, *, seen: int, part: Part = "test", confusion: Tensor | None = None
) -> Accuracy:
    """Accuracy of the method's module on one part of a task, with logits [0, seen) to choose from.

    ``confusion: [seen, seen]``, where given, is added to: images of this process by true and predicted class.
    """
    module = setup.method.module
    was_training = module.training
    module.eval()
    counts = torch.zeros(3, dtype=torch.int64, device=fabric.device)
    loader = setup.eval_loader(task, part)
    for batch in itertools.islice(loader, setup.config.train.limit_batches):
        x, y = (t.to(fabric.device) for t in batch)
        with fabric.autocast():
            logits = module(x)
        inside = logits[:, task.classes.start : task.classes.stop].argmax(1) + task.classes.start
        predicted = logits[:, :seen].argmax(1)
        counts += torch.stack([(predicted == y).sum(), (inside == y).sum(), y.new_tensor(len(y))])
        if confusion is not None:
            confusion += torch.bincount(y * seen + predicted, minlength=seen * seen).view(seen, seen)
    module.train(was_training)
    right, inside_right, images = fabric.all_reduce(counts, reduce_op="sum").tolist()
    if not images:
        return Accuracy(float("nan"), float("nan"), 0)
    return Accuracy(right / images, inside_right / images, images)


def evaluate_seen(fabric: Fabric, setup: Setup, last: int, confusion: Tensor | None = None) -> list[Accuracy]:
    """Accuracy on tasks 0..last after training task ``last``, on test images unless ``data.evaluate`` says otherwise.

    ``confusion`` as for :func:`evaluate`.
    """
    seen, part = setup.stream[last].classes.stop, setup.config.data.evaluate
    tasks = (setup.stream[j] for j in range(last + 1))
    return [evaluate(fabric, setup, task, seen=seen, part=part, confusion=confusion) for task in tasks]


def evaluate_run(
    path: str | os.PathLike[str], task: int | None = None, *, data_root: str | None = None
) -> list[Accuracy]:
    """Test accuracy on tasks 0..task of the weights a run saved after ``task`` (its last task unless given)."""
    run = RunDirectory.open(path)
    wanted = run.saved_task(task)
    changes = {} if data_root is None else {"data": {"root": data_root}}
    config = load_config(merge(run.config(), changes))
    return launch(config.train, _evaluate_saved, config, run, wanted)  # type: ignore[no-any-return]


def _evaluate_saved(fabric: Fabric, config: RunConfig, run: RunDirectory, task: int) -> list[Accuracy]:
    setup = build(config, fabric.device, Split.load(run.split_path), weights=False)
    load_weights(setup.method, run.weights_path(task))
    return evaluate_seen(fabric, setup, task)
