"""Tests on tasks, while a run works and of one that is saved: accuracy, or bits of language."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from infssm._batch import model_input, run_model
from infssm.data import Batch, Split, Task
from infssm.data.loader import Part
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.devices import launch
from infssm.learner.metrics import Confusion
from infssm.learner.modeling import load_weights
from infssm.learner.scoring import Accuracy, Bits, NumberScoring, Score, scoring_of
from infssm.learner.setup import Setup, build
from infssm.learner.store.directory import RunDirectory
from infssm.ssm import logits_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Accuracy", "Evaluation", "Prediction", "evaluate", "evaluate_ahead", "evaluate_run", "evaluate_seen"]


class Prediction(NamedTuple):
    """What a model predicted for one sample.

    Attributes:
        task: the sample's task, from 0.
        sample: its index in the data set.
        file: its path below the data's folder; empty where samples are not files.
        true: name of its class.
        predicted: name of the class with the highest score among all classes seen.
        probability: of that class, after a softmax over the classes seen.
        correct: whether the two are the same.
    """

    task: int
    sample: int
    file: str
    true: str
    predicted: str
    probability: float
    correct: bool


class Evaluation(NamedTuple):
    """What a learner reaches on samples with labels.

    Attributes:
        accuracy: share of samples that are classified right.
        per_class: the same of each class.
        confusion: samples by true and predicted class.
        unknown: share of samples that are called unknown, whatever class is predicted for them.
        bits: bits per byte and per token of text; None for samples with classes. Of text, all else is empty or NaN.
    """

    accuracy: float
    per_class: dict[str, float]
    confusion: Confusion
    unknown: float
    bits: Bits | None = None


Record = Callable[[Task, Batch, Tensor], None]
"""Called with every batch that is evaluated and its logits ``[b, seen]``."""


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    setup: Setup,
    task: Task,
    *,
    seen: int,
    part: Part = "test",
    confusion: Tensor | None = None,
    record: Record | None = None,
) -> Score:
    """What the method's module reaches on one part of a task, with logits [0, seen) to choose from.

    ``confusion: [seen, seen]``, where given, is added to: images of this process by true and predicted class.
    """
    module = setup.method.module
    was_training = module.training
    module.eval()
    scoring = scoring_of(setup.stream)(task, seen, confusion)
    counts: Tensor | None = None
    loader = setup.eval_loader(task, part)
    for batch in itertools.islice(loader, setup.config.train.limit_batches):
        batch = batch.to(fabric.device)
        with fabric.autocast():
            logits = logits_of(run_model(module, model_input(batch)))
        if record is not None:
            record(task, batch, logits[:, :seen])
        found = scoring.counts(logits, batch)
        counts = found if counts is None else counts + found
    module.train(was_training)
    zeros = torch.zeros(scoring.size, dtype=torch.float64, device=fabric.device)
    return scoring.score(fabric.all_reduce(zeros if counts is None else counts, reduce_op="sum"))


def evaluate_seen(
    fabric: Fabric, setup: Setup, last: int, confusion: Tensor | None = None, record: Record | None = None
) -> list[Score]:
    """Scores on tasks 0..last after training task ``last``, on test images unless ``data.evaluate`` says otherwise.

    ``confusion`` and ``record`` as for :func:`evaluate`.
    """
    seen, part = setup.stream[last].classes.stop, setup.config.data.evaluate
    tasks = (setup.stream[j] for j in range(last + 1))
    return [evaluate(fabric, setup, task, seen=seen, part=part, confusion=confusion, record=record) for task in tasks]


def evaluate_ahead(fabric: Fabric, setup: Setup, last: int) -> list[float]:
    """Test values on the tasks after ``last``, where tasks are domains; else none."""
    stream = setup.stream
    later = range(last + 1, stream.num_tasks) if stream.domains else range(0)
    part = setup.config.data.evaluate
    return [evaluate(fabric, setup, stream[j], seen=stream.num_classes, part=part).value for j in later]


def evaluate_run(
    path: str | os.PathLike[str],
    task: int | None = None,
    *,
    data_root: str | None = None,
    predictions: list[Prediction] | None = None,
) -> list[Score]:
    """Scores on tasks 0..task of the weights a run saved after ``task`` (its last task unless given).

    ``predictions``, where given, is extended by one entry per sample; the evaluation then uses one process.
    """
    run = RunDirectory.open(path)
    wanted = run.saved_task(task)
    changes: dict[str, Any] = {} if data_root is None else {"data": {"root": data_root}}
    if predictions is not None:
        changes["train"] = {"devices": 1}
    config = load_config(merge(run.config(), changes))
    return launch(config.train, _evaluate_saved, config, run, wanted, predictions)  # type: ignore[no-any-return]


def _evaluate_saved(
    fabric: Fabric, config: RunConfig, run: RunDirectory, task: int, predictions: list[Prediction] | None
) -> list[Score]:
    setup = build(config, fabric.device, Split.load(run.split_path), task=task, weights=False)
    load_weights(setup.method, run.weights_path(task))
    if predictions is None:
        return evaluate_seen(fabric, setup, task)
    if not scoring_of(setup.stream).has_classes:
        what = "numbers" if scoring_of(setup.stream) is NumberScoring else "tokens"
        raise ConfigError(f"{run.path} predicts {what}: only classes can be listed")
    names = setup.stream.class_names
    files = getattr(setup.stream.dataset.samples, "paths", None)

    def record(task: Task, batch: Batch, logits: Tensor) -> None:
        top = logits.float().softmax(1).max(1)
        indices = range(len(batch)) if batch.index is None else batch.index.tolist()
        labels = zip(indices, batch.y.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        for index, true, found, share in labels:
            file = files[index] if files else ""
            predictions.append(Prediction(task.index, index, file, names[true], names[found], share, true == found))

    return evaluate_seen(fabric, setup, task, record=record)
