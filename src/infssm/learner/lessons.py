"""One lesson: model and method for all classes, old and new, trained on what is taught and examined afterwards."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infssm._batch import model_input, run_model
from infssm._seeding import seed_all
from infssm._timing import num_threads
from infssm.data import Task, TaskData
from infssm.data.loader import Part
from infssm.errors import ConfigError
from infssm.learner.calibration import HeldOut, held_out_scores, kept_rows
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.resolve import check_growing, task0_config
from infssm.learner.devices import launch
from infssm.learner.events import Control, Listener, RunBegan, RunEnded
from infssm.learner.knowledge import Knowledge
from infssm.learner.loop import Loop, weights_of
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.modeling import known_facts
from infssm.learner.saving import Position, Progress
from infssm.learner.scoring import Bits
from infssm.learner.setup import Setup, make_setup
from infssm.learner.store.directory import RunDirectory
from infssm.learner.teaching import TaughtTask
from infssm.methods import parse_name
from infssm.ssm import logits_of


def check_method(config: RunConfig, taught: TaughtTask) -> None:
    """Raise for a method that cannot learn what is taught."""
    base, *others = parse_name(config.method.name).classes
    if getattr(base, "joint", False):
        raise ConfigError(
            f"{base.name} cannot be taught at any time, since it trains on the data of all tasks, and earlier "
            "lessons are no longer available: choose another method, or use it with `infssm run`"
        )
    more = taught.task.past and taught.task.classes.start == 0
    check_growing(config.method.name)
    for component in (base, *others):
        if more and not component.supports_domains:
            raise ConfigError(f"{component.name} cannot learn more samples of known classes: teach only new classes")


def teach(
    now: Knowledge, config: RunConfig, taught: TaughtTask, device: str, listen: Listener, control: Control
) -> tuple[Knowledge, Setup]:
    """The knowledge after a task. ``now``, the knowledge before it, does not change."""
    check_method(config, taught)
    task, before, place = taught.task, now.method, torch.device(device)
    facts = known_facts(config, taught.facts, task.index)
    # Sums depend on the number of threads in their last digits, so it is that of the settings.
    with num_threads(config.train.threads), tempfile.TemporaryDirectory() as folder:
        task0 = None
        if before is None and config.train.task0 == "plain":
            plain = make_setup(task0_config(config), taught, facts, place, own=now.own)
            launch(plain.config.train, _train, plain, task, listen, control)
            task0 = Path(folder) / "task0.safetensors"
            task0.write_bytes(weights_of(plain.method.weights()))
        setup = make_setup(config, taught, facts, place, weights=before is None, task0=task0, own=now.own)
        if before is not None:
            setup.method.grow_from(before.state_dict(), before.module.state_dict())
        method, epochs = setup.method, setup.epochs(task.index)
        if epochs:
            launch(config.train, _train, setup, task, listen, control)
        else:
            seed_all(config.seed, task.index, "begin")
            method.module.train()
            method.begin_task(task, setup.statistics_loader(task))
        seed_all(config.seed, task.index, "end")
        images = setup.plain_loader(taught.everything or task)
        method.end_task(task, setup.statistics_loader(task), images)
        method.module.eval()
    trained = now.trained or bool(epochs) or task0 is not None
    return replace(now, config=config, facts=taught.facts, method=method, recipe=setup.recipe, trained=trained), setup


@torch.no_grad()
def examine(now: Knowledge, setup: Setup, taught: TaughtTask, unknown: float) -> tuple[Knowledge, float | None]:
    """Calibrate on the held-out samples of all lessons; how right the model is on those of the classes taught."""
    task, head = taught.task, setup.method.head
    if not now.has_classes:
        part: Part = "test" if len(task.test) else "val"
        return now, bits_of(setup, task, part).value if len(task.test) or len(task.val) else None
    held_out = now.held_out
    if not (setup.method.base.freezes or head.fitted):
        held_out = None  # features of earlier lessons are those of another backbone
    if taught.everything is None or not len(task.val):
        return now.calibrated(held_out, unknown=unknown), None
    if head.fitted and not (setup.epochs(task.index) or (task.index == 0 and now.trained)):
        whole = taught.everything.train  # nothing was trained on them, and a fitted head can do without any of them
        kept = kept_rows(whole.labels)
        task = replace(task, val=TaskData(whole.dataset, whole.indices[kept.numpy()], whole.labels[kept]))
    rows, labels = now.features_of(setup.eval_loader(task, "val"))
    held_out = (held_out or HeldOut.empty(rows.shape[1])).after_task(head, rows, labels)
    logits, _, asked = held_out_scores(head, held_out, labels)
    right = logits.cpu().argmax(1) == held_out.labels[asked]
    return now.calibrated(held_out, unknown=unknown), float(right.double().mean())


def _train(fabric: Any, setup: Setup, task: Task, listen: Listener, control: Control) -> None:
    """Train one task as a run does, without its checkpoints: after a failure the version before is still there."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.make()
        progress = Progress(Position(task=task.index), AccuracyMatrix(1, setup.measure))
        loop = Loop(fabric, setup, progress, run, None, listen, control)
        epochs, steps = setup.epochs(task.index), len(setup.train_loader(task, 0))
        listen(RunBegan(f"lesson {task.index + 1}", epochs * min(steps, setup.config.train.limit_batches or steps), 0))
        try:
            loop.begin_task(task)
            loop.train_task(task, epochs)
        finally:
            listen(RunEnded())


def sample_counts(taught: TaughtTask) -> dict[str, int]:
    """Samples of each class that is taught, held-out ones included; of language of the domain."""
    task = taught.task
    labels = {
        index: label
        for part in (task.train, task.val)
        for index, label in zip(part.indices.tolist(), part.labels.tolist(), strict=True)
    }
    if taught.domains:
        return {taught.domains[-1]: len(labels)}
    counts = Counter(labels.values())
    return {taught.facts.classes[label]: counts[label] for label in sorted(counts)}


@torch.no_grad()
def bits_of(setup: Setup, task: Task, part: Part) -> Bits:
    """Bits of a part of a task's text."""
    method, counts = setup.method, []
    for batch in setup.eval_loader(task, part):
        batch = batch.to(method.context.device)
        logits = logits_of(run_model(method.module, model_input(batch)))
        counts.append(Bits.counts(logits, batch, task, setup.facts.num_outputs))
    return Bits.of(torch.stack(counts).sum(0).tolist())
