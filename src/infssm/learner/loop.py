"""The one training loop, top to bottom: tasks, epochs, steps.

Order of a task (methods rely on it): ``begin_task`` -> new optimizer -> epochs of (``begin_epoch``, steps of (learning
rate set, ``loss``, backward, optimizer step, ``after_step``), ``end_epoch``, validation) -> best epoch restored (model
and method) -> ``end_task`` -> test. With ``train.select_best`` every epoch is validated and the best one is restored;
without it, only the last epoch is validated and its weights are kept.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from infssm._batch import model_input, run_model
from infssm._seeding import seed_all
from infssm.data import Batch, Task
from infssm.learner.devices import average_gradients
from infssm.learner.evaluate import evaluate, evaluate_ahead, evaluate_seen
from infssm.learner.events import Control, EpochDone, Interrupted, Listener, Note, StepDone, TaskBegan, TaskEnded
from infssm.learner.log import Log
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, Confusion
from infssm.learner.optim import build_optimizer, decay_groups, diagnose, is_finite, learning_rate, set_learning_rate
from infssm.learner.saving import Progress, load_checkpoint, load_method, save_best, save_progress, set_rng_state
from infssm.learner.scoring import Accuracy, Bits, Errors, score_of
from infssm.learner.setup import Setup
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory
from infssm.methods import train_step
from infssm.ssm import logits_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric


_REPORT_EVERY = 0.5
"""Least seconds between two ``StepDone`` events; each reads all loss terms from the device."""


@dataclass
class Loop:
    """The training of one run: ``train`` is the loop, ``train_task0`` runs only the first task."""

    fabric: Fabric
    setup: Setup
    progress: Progress
    run: RunDirectory
    log: Log | None
    listen: Listener
    control: Control

    def __post_init__(self) -> None:
        self.reported = -_REPORT_EVERY
        self.started = time.monotonic()
        self.images = 0
        best = self.progress.position.best
        self.best_files_in_use: deque[str | None] = deque([best["file"] if best else None], maxlen=2)

    def train(self) -> None:
        """Train all tasks that are left."""
        tasks = self.setup.stream.num_tasks
        if self.progress.position.task == 0 and not self.progress.position.begun and self.setup.stream.domains:
            # Forward transfer compares a task just before its training with guessing, the first row of the matrix.
            stream, part = self.setup.stream, self.setup.config.data.evaluate
            self.progress.matrix.begin(score_of(stream).guess(stream, part))
        while self.progress.position.task < tasks:
            task = self.setup.task(self.progress.position.task)
            self.begin_task(task)
            if epochs := self.setup.epochs(task.index):
                self.train_task(task, epochs)
            else:
                self.save(None)  # resume needs a checkpoint before `end_task` writes weights
            self.end_task(task)

    def train_task0(self) -> None:
        """Only task 0, up to the model that other runs start from: validated and saved, but not ended or tested."""
        task = self.setup.task(0)
        self.begin_task(task)
        self.train_task(task, self.setup.epochs(0))
        if self.fabric.is_global_zero:
            self.run.write_weights(0, weights_of(self.setup.method.weights()))
        self.fabric.barrier()

    def begin_task(self, task: Task) -> None:
        """Add the task's classes and call the method's ``begin_task``, unless the run resumes inside the task."""
        position = self.progress.position
        if not position.begun:
            self.setup = self.setup.grown(task.index)
        setup = self.setup
        self.listen(TaskBegan(task.index, task.num_tasks, setup.epochs(task.index)))
        if position.begun:
            return
        seed_all(setup.config.seed, task.index, "begin")
        setup.method.module.train()
        setup.method.begin_task(task, setup.statistics_loader(task))
        position.begun = True

    def train_task(self, task: Task, epochs: int) -> None:
        """Train the epochs that are left, with a new or restored optimizer, then load the best if one was selected."""
        method, train = self.setup.method, self.setup.config.train
        optimizer = build_optimizer(method.param_groups(decay_groups(method.module, train.weight_decay)))
        if self.progress.optimizer is not None:
            optimizer.load_state_dict(self.progress.optimizer)
        for epoch in range(self.progress.position.epoch, epochs):
            self.train_epoch(task, epoch, epochs, optimizer)
            method.end_epoch(epoch, epochs)
            self.validate(task, epoch, optimizer)
            self.progress.next_epoch()
            self.save(optimizer)
            self.stop_if_asked(optimizer, saved=True)
        if self.progress.position.best is not None:
            load_method(load_checkpoint(self.run.checkpoints / self.progress.position.best["file"]), self.setup)

    def train_epoch(self, task: Task, epoch: int, epochs: int, optimizer: torch.optim.Optimizer) -> None:
        """Train all steps of an epoch; where the run resumes inside it, those that are left."""
        setup, progress, train = self.setup, self.progress, self.setup.config.train
        skip = progress.position.step
        if progress.rng is not None:
            set_rng_state(progress.rng)
        else:
            seed_all(setup.config.seed, task.index, epoch)
            setup.method.begin_epoch(epoch, epochs)
        setup.method.module.train()
        loader = setup.train_loader(task, epoch, skip=skip)
        steps = min(len(loader) + skip, train.limit_batches or len(loader) + skip)
        self.started = time.monotonic()
        self.images = 0
        for batch in itertools.islice(loader, steps - skip):
            done = progress.position.step / steps
            lr = learning_rate(train, task.index, epoch, epochs=epochs, progress=done)
            set_learning_rate(optimizer, lr)
            if setup.config.data.online:
                self.test_batch(batch)
            terms = self.step(batch, task, optimizer)
            progress.position.step += 1
            progress.position.at += 1
            for name, value in terms.items():
                progress.sums[name] = progress.sums.get(name, 0.0) + value.detach()
                progress.counts[name] += 1
            self.images += len(batch) * self.fabric.world_size
            due, now = progress.position.at % train.log_every == 0, time.monotonic()
            if due or now - self.reported >= _REPORT_EVERY:
                values = {name: float(value.detach()) for name, value in terms.items()}
                if due:
                    step = {"kind": "step", "task": task.index, "epoch": epoch, "step": progress.position.step}
                    self.write(step | {"lr": lr, "loss": values})
                if now - self.reported >= _REPORT_EVERY:
                    self.reported, speed = now, self.images / max(now - self.started, 1e-9)
                    at = progress.position.at
                    self.listen(StepDone(at, task.index, task.num_tasks, epoch, epochs, values, speed))
            self.stop_if_asked(optimizer)

    @torch.no_grad()
    def test_batch(self, batch: Batch) -> None:
        """Count the right answers on a batch of an online stream, among all classes, before it is trained on."""
        module, batch = self.setup.method.module, batch.to(self.fabric.device)
        module.eval()
        with self.fabric.autocast():
            logits = logits_of(run_model(module, model_input(batch)))
        module.train()
        right = int((logits.argmax(1) == batch.y).sum())
        self.progress.matrix.add_online(right, len(batch))
        self.write({"kind": "online", "step": self.progress.position.step, "right": right, "samples": len(batch)})

    def step(self, batch: Batch, task: Task, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Forward, backward, update: the weighted loss terms of the step."""
        method = self.setup.method
        batch = batch.to(self.fabric.device)
        parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]

        def check(total: Tensor, terms: dict[str, Tensor]) -> None:
            if self.fabric.world_size > 1:
                average_gradients(self.fabric, parameters)
            if not is_finite(total, parameters):
                position = self.progress.position
                where = f"task {task.index}, epoch {position.epoch}, step {position.step}"
                raise diagnose(method.module, terms, lambda: method.loss(batch), where)

        return train_step(
            lambda: method.loss(batch),
            optimizer,
            precision=self.fabric.autocast,
            backward=self.fabric.backward,
            before_update=check,
            after_update=method.after_step,
        )

    def validate(self, task: Task, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Validate on the current task, log the epoch, and with ``select_best`` save it if it is the best so far."""
        position, train = self.progress.position, self.setup.config.train
        seconds, value = max(time.monotonic() - self.started, 1e-9), math.nan
        if train.select_best or epoch == self.setup.epochs(task.index) - 1:
            value = evaluate(self.fabric, self.setup, task, seen=task.classes.stop, part="val").value
        loss = {name: float(total) / self.progress.counts[name] for name, total in self.progress.sums.items()}
        if self.fabric.world_size > 1 and loss:
            terms = torch.tensor(list(loss.values()), device=self.fabric.device)
            loss = dict(zip(loss, self.fabric.all_reduce(terms, reduce_op="mean").tolist(), strict=True))
        self.write(
            {
                "kind": "epoch",
                "task": task.index,
                "epoch": epoch,
                "loss": loss,
                "val": None if math.isnan(value) else value,
                "lr": optimizer.param_groups[0]["lr"],
                "images_per_s": self.images / seconds,
                "seconds": seconds,
            }
        )
        self.listen(EpochDone(task.index, epoch, value))
        best = position.best["value"] if position.best else None
        if train.select_best and self.setup.quantity.improves(value, best):
            name = f"best_{task.index:02}_{epoch:03}.ckpt"
            if self.fabric.is_global_zero:
                save_best(self.run.checkpoints / name, self.setup)
            position.best = {"file": name, "value": value, "epoch": epoch}
            self.fabric.barrier()

    def end_task(self, task: Task) -> None:
        """Let the method consolidate, test on all tasks so far, save."""
        setup, progress = self.setup, self.progress
        seed_all(setup.config.seed, task.index, "end")
        setup.method.end_task(task, setup.statistics_loader(task), setup.plain_loader(task))
        seen, confusion = setup.stream[task.index].classes.stop, None
        if score_of(setup.stream).has_classes:
            confusion = torch.zeros(seen, seen, dtype=torch.int64, device=self.fabric.device)

        def count(_: Task, batch: Batch, logits: Tensor) -> None:
            if confusion is not None:
                places = batch.y * seen + logits.argmax(1)
                confusion.add_(torch.bincount(places, minlength=seen * seen).view(seen, seen))

        row = evaluate_seen(self.fabric, setup, task.index, count)
        if confusion is not None:
            confusion = self.fabric.all_reduce(confusion, reduce_op="sum")
        quantity = setup.quantity
        values = [s.value for s in row]
        inside = [s.task_incremental for s in row if isinstance(s, Accuracy)]
        ahead = evaluate_ahead(self.fabric, setup, task.index)
        bits = [s for s in row if isinstance(s, Bits)]
        errors = [s for s in row if isinstance(s, Errors)]
        progress.matrix.update(
            values,
            inside or None,
            samples=[s.count for s in row],
            ahead=ahead,
            tokens=[s.tokens for s in bits] if quantity == BITS_PER_BYTE else None,
        )
        progress.tick()
        self.write(
            {
                "kind": "task",
                "task": task.index,
                quantity.key: values,
                **({"task_accuracy": inside} if inside else {}),
                **({"bits_per_token": [s.bits_per_token for s in bits]} if bits else {}),
                **({"r2": [s.r2 for s in errors]} if errors else {}),
                "aa": progress.matrix.aa,
                **({"chosen": chosen} if (chosen := setup.method.automatic_options()) else {}),
                "best_epoch": progress.position.best["epoch"] if progress.position.best else None,
                "seconds": progress.position.seconds,
            }
        )
        self.report_task(task, values, chosen)
        progress.next_task()
        if self.fabric.is_global_zero:
            self.write_task(task, confusion)
        self.save(None)
        self.listen(TaskEnded(task.index, progress.matrix.aa))
        self.stop_if_asked(None, saved=True)

    def report_task(self, task: Task, values: Sequence[float], chosen: Mapping[str, float]) -> None:
        """Tell the listener what was measured of each task so far, and what the method chose automatically."""
        quantity, aa = self.setup.quantity, self.progress.matrix.aa
        part = "validation " if self.setup.config.data.evaluate == "val" else ""
        shown = " ".join(f"{100 * v:.1f}" if quantity == ACCURACY else quantity.show(v) for v in values)
        mean = f"AA {100 * aa:.2f} %" if quantity == ACCURACY else f"mean {quantity.show(aa)}"
        if self.setup.config.data.online:
            mean += f", along the stream {100 * self.progress.matrix.online:.2f} %"
        self.listen(Note(f"task {task.index + 1} done: {part}{quantity.title} per task {shown}, {mean}"))
        if chosen:
            options = ", ".join(f"{name} {value:.3g}" for name, value in chosen.items())
            self.listen(Note(f"  chosen automatically: {options}"))

    def write_task(self, task: Task, confusion: Tensor | None) -> None:
        """Write the matrix, the confusions ``[seen, seen]`` and the weights after a task."""
        setup = self.setup
        self.run.write_text(layout.MATRIX, self.progress.matrix.to_csv())
        if confusion is not None:
            sizes = (setup.stream.num_classes,) if setup.stream.domains else setup.stream.task_sizes
            found = Confusion.of(confusion.tolist(), setup.stream.class_names, sizes)
            self.run.write_json(layout.CONFUSION, found.to_json())
        self.run.write_weights(task.index, weights_of(setup.method.weights()))

    def save(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Write the checkpoint to resume from; delete best epochs that neither it nor the previous checkpoint names."""
        self.progress.optimizer = None if optimizer is None else optimizer.state_dict()
        if self.log is not None:
            save_progress(self.run, self.setup, self.progress, self.log)
            best = self.progress.position.best
            self.best_files_in_use.append(best["file"] if best else None)
            for path in layout.best_files(self.run.path):
                if path.name not in self.best_files_in_use:
                    path.unlink(missing_ok=True)
        self.fabric.barrier()

    def stop_if_asked(self, optimizer: torch.optim.Optimizer | None, *, saved: bool = False) -> None:
        """If any process was asked to stop, save on all processes and raise ``Interrupted``."""
        pending = self.control.stopping
        if self.fabric.world_size > 1:
            flag = torch.tensor(float(pending), device=self.fabric.device)
            pending = self.fabric.all_reduce(flag, reduce_op="sum").item() > 0
        if not pending:
            return
        if not saved:
            self.save(optimizer)
        raise Interrupted(f"interrupted and saved; continue with: infssm resume {self.run.path}")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the log, on process 0."""
        if self.log is not None:
            self.log.write(line | {"at": self.progress.position.at})


def weights_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name as the content of a safetensors file."""
    owned: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():  # safetensors has no shared tensors, such as tied embeddings
        alone[name] = tensor.clone() if tensor.data_ptr() in owned else tensor.contiguous()
        owned.add(tensor.data_ptr())
    return save(alone)
