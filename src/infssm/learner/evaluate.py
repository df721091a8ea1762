"""Evaluation on the tasks of a stream, during a run or of a saved one: accuracy, bits of language or RMSE."""

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
from infssm.learner.scoring import Bits, Errors, Score, score_of
from infssm.learner.setup import Setup, build
from infssm.learner.store.directory import RunDirectory
from infssm.ssm import logits_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Prediction(NamedTuple):
    """The prediction of a model for one sample.

    Attributes:
        task: the sample's task, from 0.
        sample: its index in the data set.
        file: its path below the data's folder; empty if samples are not files.
        true: name of its class.
        predicted: name of the class with the highest score among all classes seen.
        probability: probability of that class, after a softmax over the classes seen.
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
    """The accuracy of a learner on samples with labels.

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
    record: Record | None = None,
) -> Score:
    """The score of the method's module on one part of a task, with logits [0, seen) to choose from."""
    module = setup.method.module
    was_training = module.training
    module.eval()
    score = score_of(setup.stream)
    counts = torch.zeros(score.size, dtype=torch.float64, device=fabric.device)
    for batch in itertools.islice(setup.eval_loader(task, part), setup.config.train.limit_batches):
        batch = batch.to(fabric.device)
        with fabric.autocast():
            logits = logits_of(run_model(module, model_input(batch)))
        if record is not None:
            record(task, batch, logits[:, :seen])
        counts += score.counts(logits, batch, task, seen)
    module.train(was_training)
    return score.of(fabric.all_reduce(counts, reduce_op="sum").tolist())


def evaluate_seen(fabric: Fabric, setup: Setup, last: int, record: Record | None = None) -> list[Score]:
    """Scores on tasks 0..last after training task ``last``, on test images unless ``data.evaluate`` says otherwise."""
    seen, part = setup.stream[last].classes.stop, setup.config.data.evaluate
    tasks = (setup.stream[j] for j in range(last + 1))
    return [evaluate(fabric, setup, task, seen=seen, part=part, record=record) for task in tasks]


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
    if not (score := score_of(setup.stream)).has_classes:
        what = "numbers" if score is Errors else "tokens"
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

    return evaluate_seen(fabric, setup, task, record)
