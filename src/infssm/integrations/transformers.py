"""transformers: its Mamba layers on our CPU scan, and any method in its Trainer (which needs ``accelerate``)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infssm._optional import require
from infssm._processes import sum_over_processes, this_share
from infssm.errors import CheckpointError, ConfigError
from infssm.methods.bases.seq import Seq
from infssm.methods.core.build import check_suits
from infssm.methods.core.tasks import TaskInfo
from infssm.ssm.accelerate import accelerate, accelerated, restore

METHOD_FILE = "infssm_method.pt"
"""File of a Trainer's checkpoint that holds the method's state."""


class ContinualTrainerMixin:
    """Adds a method's penalty to a Trainer's loss: ``class MyTrainer(ContinualTrainerMixin, Trainer)``.

    ``MyTrainer(model=model, method=infssm.attach(model, name), ...)``; then one :meth:`train_task` per task. Every task
    has an optimizer and a scheduler of its own, and its checkpoints are in ``output_dir/task-<index>``. They hold the
    method's state, so a task that was interrupted continues in a new process with ``resume_from_checkpoint=True``.
    The penalty's terms are in the Trainer's logs.

    The Trainer forms the loss, so methods that form their own (replay, prompts) are refused.
    """

    def __init__(self, *args: Any, method: Any, **kwargs: Any) -> None:
        if not isinstance(method.base, Seq) or method.base.joint:
            raise ConfigError(
                f"{method.base.name} forms the loss itself, and in transformers' Trainer the Trainer does: attach a "
                "method without it, or train with method.loss(batch) in a loop of your own, or with infssm.run"
            )
        super().__init__(*args, **kwargs)
        self.method = method
        self._task: TaskInfo | None = None  # the task in training
        self._checked_logits = False
        self._term_sums: dict[str, Any] = {}  # penalty terms, summed over the batches since the last log
        self._batches = 0
        self._created_optimizer: Any = None
        self._used_optimizer: Any = None
        self._trained_steps = 0
        self.add_callback(_step_callback(self))  # type: ignore[attr-defined]

    def train_task(
        self,
        task: Any,
        train_dataset: Any = None,
        *,
        loader: Any = None,
        resume_from_checkpoint: bool | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train one task and return what ``Trainer.train`` returns.

        Args:
            task: the task's 0-based index, or an object with ``index`` and ``classes``.
            train_dataset: the task's training data; None keeps the Trainer's.
            loader: the task's training samples as batches ``(x, y)``, with ``model(x)`` giving logits, for methods
                that measure on a task's data when it ends (``ewc``, ``mas``, fitted heads); others ignore it.
            resume_from_checkpoint: a checkpoint's folder, or True for the task's last complete checkpoint. With True, a
                task without a checkpoint that follows another task of this trainer starts from its beginning, so the
                same loop over tasks can be run again after a crash.
            kwargs: further arguments of ``Trainer.train``.
        """
        info = TaskInfo.of(task)
        measuring = [component.name for component in self.method.components if component.needs_loader]
        if measuring and loader is None:
            raise ConfigError(
                f"{measuring[0]} measures on the task's data when the task ends: call train_task({info.index}, "
                "dataset, loader=loader) with a loader of batches (x, y)"
            )
        if train_dataset is not None:
            self.train_dataset = train_dataset
        arguments: Any = self.args  # type: ignore[attr-defined]
        root = arguments.output_dir
        folder = Path(root, f"task-{info.index}")
        checkpoint = self._find_checkpoint(folder, resume_from_checkpoint)
        self._prepare_optimizer()
        if checkpoint is None:
            self.method.begin_task(task, loader)
        else:
            self._load_method(checkpoint, info)
        created = self.optimizer is None
        self._task, self._trained_steps, self._term_sums, self._batches = info, 0, {}, 0
        arguments.output_dir = str(folder)
        try:
            result = self.train(resume_from_checkpoint=checkpoint, **kwargs)
            if checkpoint is not None and self._trained_steps == 0:
                # The task was complete. The Trainer restores random numbers only where it continues an epoch.
                self._load_rng_state(checkpoint)  # type: ignore[attr-defined]
        finally:
            self._task = None
            arguments.output_dir = root
            self._created_optimizer, self._used_optimizer = self.optimizer if created else None, self.optimizer
        self.method.end_task(task, loader)
        return result

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Refused outside of :meth:`train_task`: the method must know the task."""
        if self._task is None:
            raise ConfigError("call trainer.train_task(task, dataset) instead of trainer.train()")
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """One epoch, unless the task is complete: the Trainer makes one step too many where ``max_steps`` is set."""
        state: Any = self.state  # type: ignore[attr-defined]
        if state.global_step < state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _prepare_optimizer(self) -> None:
        """A new optimizer and scheduler for the task.

        The Trainer keeps those of the last ``train`` call, whose moments belong to another loss and which do not know
        parameters that were added or unfrozen since.
        """
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and optimizer is self._created_optimizer:
            self.optimizer = self.lr_scheduler = None
        elif optimizer is not None and optimizer is self._used_optimizer:
            raise ConfigError(
                "the optimizer given to the Trainer was used for the last task: set trainer.optimizer and "
                "trainer.lr_scheduler to new ones before each task, or give optimizer_cls_and_kwargs instead"
            )
        self.model_wrapped = self.model  # type: ignore[attr-defined]  # DDP does not see new parameters either

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss, plus the penalty of the same forward while training."""
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            self._check_logits(outputs)
            terms = self.method.penalty_terms(inputs)
            self._batches += 1
            for name, term in terms.items():
                self._term_sums[name] = self._term_sums.get(name, 0) + term.detach()
            penalty: Any = sum(terms.values())
            if self._is_scaled(num_items_in_batch):
                penalty = penalty / self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def _check_logits(self, outputs: Any) -> None:
        """Refuse methods that need classes on language models at the first batch, not when the first task ends."""
        if not self._checked_logits:
            logits = outputs.get("logits") if isinstance(outputs, dict) else None
            if isinstance(logits, Tensor) and logits.ndim == 3:
                check_suits(self.method.name, "language", domains=False)
            self._checked_logits = True

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is normalised over all accumulated batches already, so that the Trainer leaves it alone."""
        if (scaled := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(scaled)
        by_model = getattr(self, "model_accepts_loss_kwargs", False) and num_items_in_batch is not None
        return by_model or getattr(self, "compute_loss_func", None) is not None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mean of every penalty term since the last log to the training logs."""
        if "loss" in logs and self._term_sums:
            count = self._batches * this_share().world
            totals = sum_over_processes(list(self._term_sums.values()))
            logs |= {name: float(total) / count for name, total in zip(self._term_sums, totals, strict=True)}
            self._term_sums, self._batches = {}, 0
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the method's state first: ``trainer_state.json``, the last file, then marks a complete checkpoint."""
        if self.args.should_save:  # type: ignore[attr-defined]
            root = self._get_output_dir(trial)  # type: ignore[attr-defined]
            folder = Path(root, f"checkpoint-{self.state.global_step}")  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "trainer_state.json").unlink(missing_ok=True)  # of an earlier run
            torch.save(self.method.state_dict(), folder / METHOD_FILE)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _find_checkpoint(self, folder: Path, resume: bool | str | None) -> str | None:
        """The checkpoint to continue from: the one that was named, or the last complete one in the task's folder."""
        if not resume:
            return None
        if resume is not True:
            return os.fspath(resume)
        complete = [
            (int(number[1]), str(path))
            for path in folder.glob("checkpoint-*")
            if (number := re.fullmatch(r"checkpoint-(\d+)", path.name))
            and all((path / name).is_file() for name in ("trainer_state.json", METHOD_FILE))
        ]
        if complete:
            return max(complete)[1]
        # Without any checkpoint the process ended before the first one was written: start from the beginning. Where
        # other tasks have some, this process lacks what the method kept of them.
        if self.method.context.task is None and any(folder.parent.glob("task-*/checkpoint-*/trainer_state.json")):
            raise ConfigError(f"there is no complete checkpoint in {folder}: train without resume_from_checkpoint")
        return None

    def _load_method(self, checkpoint: str, task: TaskInfo) -> None:
        file = Path(checkpoint, METHOD_FILE)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            index = state["task"]["index"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} has no {METHOD_FILE}: only checkpoints of train_task can be continued"
            ) from None
        except Exception as error:  # torch.load raises many kinds for damaged files
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}; use another checkpoint") from error
        if index != task.index:
            raise ConfigError(f"{checkpoint} is a checkpoint of task {index}, not of task {task.index}")
        self.method.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights; every adapter of peft, where the Trainer activates and loads only some of several."""
        module: Any = self.model if model is None else model  # type: ignore[attr-defined]
        adapters = list(module.active_adapters) if hasattr(module, "peft_config") else []
        trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        if not adapters:
            return
        if "default" in module.peft_config and Path(resume_from_checkpoint, "adapter_model.safetensors").is_file():
            module.load_adapter(resume_from_checkpoint, "default")
        module.base_model.set_adapter(adapters)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def _step_callback(trainer: ContinualTrainerMixin) -> Any:
    library = require("transformers.trainer_callback", install="pip install 'infssm[hf]'")

    class AfterStep(library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Notifies the method of every optimizer step."""

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
            """Called after the step, before the gradients are zeroed."""
            trainer._trained_steps += 1
            trainer.method.after_step()

    return AfterStep()


__all__ = ["ContinualTrainerMixin", "accelerate", "accelerated", "restore"]
