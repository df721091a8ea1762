"""The runs behind docs/results/heads.md: train an arm once and keep features, from which all heads are fitted.

A run is what ``infssm.run`` does (its model, method, loader, optimizer and schedule) without the evaluations inside
it: a task ends, and the features of its own images under the model before and after it are kept. Validation and test
features are taken under the last model; runs that search get no test features at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pages import remembered_tensors, write_whole
from benchmarks.results.digits import BASE
from infssm._seeding import seed_all
from infssm.data import Task
from infssm.errors import DivergedError
from infssm.learner.config.load import load_config, merge
from infssm.learner.optim import build_optimizer, decay_groups, learning_rate, set_learning_rate, task_lr
from infssm.learner.setup import Setup, build
from infssm.methods import train_step
from infssm.models import create_model

SEARCHED = 0
"""The base, or seed, that settings are searched on."""
B50: dict[str, Any] = {
    "benchmark": "b50-5",
    "data": {
        "name": "cifar100",
        "num_tasks": 6,
        "base_classes": 50,
        "train_per_class": 200,
        "test_per_class": 50,
        "recipe": "light",
    },
    "model": {"name": "vim_nano", "options": {"patch_size": 8, "embed_dim": 96, "depth": 4, "stem": "conv"}},
    "train": {"epochs": 1, "batch_size": 40, "eval_batch_size": 250, "num_workers": 0, "threads": 1},
}
DIGITS = merge(BASE, {"train": {"num_workers": 0, "threads": 1}})
TASK0_RATES = {"digits": 1e-3, "digits-omniglot": 1e-4}
"""Task 0 of digits has two classes: at the rate for a model from scratch it would undo what a start knows."""


class Spec(NamedTuple):
    """One run: protocol, base (class order of b50-5) or seed (digits), arm, method name and options, learning rate."""

    protocol: str
    seed: int
    arm: str
    options: Mapping[str, Any]
    rate: float
    tasks: int = 6
    """Tasks to learn: a search may stop early."""
    epochs: int | None = None
    """Epochs of a new task, if not the protocol's."""

    @property
    def label(self) -> str:
        """Its name in tables and of its file."""
        weight = self.options.get("weight")
        name = f"{self.protocol}/{self.seed}/{self.arm}/lr{self.rate:g}" + ("" if weight is None else f"-w{weight:g}")
        name += f"-{self.options['buffer_size']}images" if "buffer_size" in self.options else ""
        name += "" if self.epochs is None else f"-{self.epochs}epochs"
        return name if self.tasks == 6 else f"{name}-{self.tasks}tasks"


class Place(NamedTuple):
    """Where data and results are, and the weights of the base of each class order."""

    data_root: str | None
    out: Path
    bases: Mapping[int, str]

    def file(self, spec: Spec) -> Path:
        """Where a run's features are kept."""
        return self.out / f"{spec.label}.pt"


def setup_of(spec: Spec, place: Place) -> Setup:
    """Stream, recipe, model and method as ``infssm.run`` would build them."""
    start = B50 if spec.protocol == "b50-5" else DIGITS
    chosen: dict[str, Any] = {
        "seed": spec.seed,
        "data": {"root": place.data_root},
        "method": dict(spec.options),
        "train": {"lr": spec.rate, "min_lr": spec.rate / 100, "warmup_lr": spec.rate / 100},
    }
    if spec.protocol == "b50-5":
        chosen["data"]["class_order_seed"] = spec.seed
        chosen["model"] = {"weights": place.bases[spec.seed]}
        chosen["train"]["task0"] = str(_task0_weights(place, spec.seed))
    elif spec.protocol == "digits-omniglot":
        chosen["model"] = {"weights": "omniglot"}
    return build(load_config(merge(start, chosen)), torch.device("cpu"))


def _task0_weights(place: Place, seed: int) -> Path:
    """The base as the file that a run would have saved after task 0."""
    from safetensors.torch import save_file

    path = place.out / f"base{seed}.safetensors"
    if not path.exists():
        options = B50["model"]["options"]
        model = create_model("vim_nano", num_classes=100, img_size=32, in_chans=3, weights=place.bases[seed], **options)
        write_whole(path, partial(save_file, {k: v.contiguous() for k, v in model.state_dict().items()}))
    return path


def train(spec: Spec, place: Place) -> str:
    """Train a run unless its file is there; its label."""
    torch.set_num_threads(1)
    remembered_tensors(place.file(spec), lambda: _trained(spec, place))
    return spec.label


def _trained(spec: Spec, place: Place) -> dict[str, Any]:
    setup = setup_of(spec, place)
    method, model, clock = setup.method, setup.method.module, [0.0, 0]
    found: dict[str, Any] = {"old": [], "new": [], "labels": [], "models": []}
    tasks = list(setup.stream)[: spec.tasks]
    for task in tasks:
        if task.index == 0 and spec.protocol != "b50-5":
            _first_task(setup, spec, place)
        rows = torch.from_numpy(task.train.indices)
        found["labels"].append(task.train.labels)
        found["old"].append(None if task.index == 0 else features(setup, model, rows))
        seed_all(spec.seed, task.index, "begin")
        model.train()
        method.begin_task(task, setup.statistics_loader(task), lr=task_lr(setup.config.train, task.index))
        if task.index > 0 and spec.arm != "frozen":
            train_epochs(setup, task, spec.epochs or setup.config.train.epochs, clock)
        seed_all(spec.seed, task.index, "end")
        measured = setup.statistics_loader(task)
        # Base images count twice, as those of two epochs do, so that buffers balance.
        method.end_task(task, _Twice(measured) if method.base.stores_data and task.index == 0 else measured)
        found["new"].append(_base_features(setup, spec, place) if task.index == 0 else features(setup, model, rows))
        found["models"].append({k: v.half() for k, v in model.state_dict().items()})
    for part in ("val",) if spec.seed == SEARCHED else ("test",):
        parts = [getattr(task, part) for task in tasks]
        found[part] = [features(setup, model, torch.from_numpy(p.indices)) for p in parts]
        found[f"{part}_labels"] = [p.labels for p in parts]
    return found | {"seconds_per_step": clock[0] / max(clock[1], 1), "label": spec.label}


def train_epochs(setup: Setup, task: Task, epochs: int, clock: list[float]) -> None:
    """Train on a task; ``clock`` adds up processor seconds and steps."""
    method, config = setup.method, setup.config.train
    optimizer = build_optimizer(method.param_groups(decay_groups(method.module, config.weight_decay)))
    for epoch in range(epochs):
        seed_all(setup.config.seed, task.index, epoch)
        method.begin_epoch(epoch, epochs)
        method.module.train()
        loader = setup.train_loader(task, epoch)
        for step, batch in enumerate(loader):
            lr = learning_rate(config, task.index, epoch, epochs=epochs, progress=step / len(loader))
            set_learning_rate(optimizer, lr)
            began = time.process_time()
            terms = train_step(lambda batch=batch: method.loss(batch), optimizer, after_update=method.after_step)
            clock[0] += time.process_time() - began
            clock[1] += 1
            if bad := [name for name, term in terms.items() if not bool(term.detach().isfinite())]:
                raise DivergedError(f"{method.name}, task {task.index}, step {step}: the term {bad[0]} is not finite")
        method.end_epoch(epoch, epochs)


def _first_task(setup: Setup, spec: Spec, place: Place) -> None:
    """Task 0 of digits, trained plainly once for all arms of a seed."""

    def trained() -> dict[str, Tensor]:
        plain = Spec(spec.protocol, spec.seed, "plain", {"name": "seq"}, TASK0_RATES[spec.protocol])
        first = setup_of(plain, place)
        first.method.begin_task(first.stream[0], lr=plain.rate)
        train_epochs(first, first.stream[0], first.epochs(0), [0.0, 0])
        return first.method.module.state_dict()

    path = place.out / spec.protocol / f"task0-{spec.seed}.pt"
    setup.method.module.load_state_dict(remembered_tensors(path, trained))


def _base_features(setup: Setup, spec: Spec, place: Place) -> Tensor:
    """Features of the first task's images, the same for all arms of a seed."""
    path = place.out / spec.protocol / f"features0-{spec.seed}.pt"
    rows = torch.from_numpy(setup.stream[0].train.indices)
    known: Tensor = remembered_tensors(path, lambda: features(setup, setup.method.module, rows))
    return known


class _Twice:
    """The batches of a loader, twice."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return itertools.chain(self.loader, self.loader)


@torch.no_grad()
def features(setup: Setup, model: nn.Module, rows: Tensor) -> Tensor:
    """Features ``[n, d]`` of images under a model, without augmentation."""
    training = model.training
    model.eval()
    pixels = setup.stream.dataset.images.pixels
    found = torch.cat([pooled(model, setup.recipe.eval(pixels[part])) for part in rows.split(250)])
    model.train(training)
    return found


def pooled(model: Any, images: Tensor) -> Tensor:
    result: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
    return result
