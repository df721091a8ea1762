"""Two processes that share each batch compute what one process computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infssm._seeding import seed_all
from infssm.bench.experiment import resolve
from infssm.bench.running import run
from infssm.data import ImageLoader, Task
from infssm.errors import ConfigError, DivergedError
from infssm.learner import setup as modeling
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import to_yaml
from infssm.learner.devices import launch
from infssm.learner.events import Control
from infssm.learner.loop import Loop
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.optim import decay_groups
from infssm.learner.saving import Position, Progress, rng_state
from infssm.learner.setup import build
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Transforms, parse_name
from tests.learner.tiny import tiny_config
from tests.methods.toys import FOR_IMAGES

METHODS = (*FOR_IMAGES, "er+inf-ssm-exact")
EVERYTHING = {"buffer_size": 100, "replay_batch": 100}
"""Replay all that is stored: processes store the images of a batch in another order, so smaller draws would differ."""
# Weights with which every term takes part in the gradient.
OPTIONS: dict[str, dict[str, Any]] = {
    "ewc": {"weight": 1e9, "fisher_samples": None},
    "si": {"weight": 1e9},
    "mas": {"weight": 1e7},
    "inf-ssm": {"weight": 30.0},
    "inf-ssm+": {"weight": 30.0},
    "inf-ssm-exact": {"weight": 100.0},
    "er+inf-ssm-exact": {**EVERYTHING, "weight": 100.0},
    "clfd": {**EVERYTHING, "flip": False},
    "lucir": {**EVERYTHING, "lambda_rule": "paper", "finetune_epochs": 2, "margin": 2.0},
    "x-der": {**EVERYTHING, "simclr_batch_size": 100, "dp_weight": 1e4, "past_constraint": True},
    **dict.fromkeys(("er", "der", "der++", "l2p-r"), EVERYTHING),
}
TOLERANCE = 1e-5


class Recording(torch.optim.SGD):
    """Keeps the gradients of a step and changes nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.gradients = [p.grad.clone() for g in self.param_groups for p in g["params"] if p.grad is not None]


def gradients(fabric: Any, config: RunConfig) -> tuple[list[Tensor], dict[str, float]]:
    """Averaged gradients and loss terms of the first step of task 1, the model moved away from the old one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "Transforms", plain_transforms)
        setup = build(config, fabric.device)
    state = Progress(Position(), AccuracyMatrix(config.data.num_tasks))
    loop = Loop(fabric, setup, state, RunDirectory(Path(config.out)), None, lambda _: None, Control())
    trained(loop, setup.task(0))
    task = begun(loop, setup.task(1))
    seed_all("noise")
    for parameter in setup.method.module.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    optimizer = Recording(setup.method.param_groups(decay_groups(setup.method.module, 0.0)), lr=0.0)
    batch = next(iter(batches(loop, task)))
    terms = loop.step(batch, task, optimizer)
    assert len(batch) * fabric.world_size == config.train.batch_size
    means = fabric.all_reduce(torch.stack([t.detach() for t in terms.values()]), reduce_op="mean").tolist()
    return optimizer.gradients, dict(zip(terms, means, strict=True))


def plain_transforms(_: Any, evaluation: Any, __: Any) -> Transforms:
    """Random crops are drawn per process, as they should be: the images of the buffer are taken as they are."""
    return Transforms(lambda raw, _: evaluation(raw), evaluation, lambda raw, _: evaluation(raw))


def begun(loop: Loop, task: Task) -> Task:
    """The task as an epoch of it begins."""
    method = loop.setup.method
    seed_all(0, task.index, "begin")
    method.module.train()
    method.begin_task(task, loop.setup.statistics_loader(task))
    method.begin_epoch(0, 1)
    return task


def trained(loop: Loop, task: Task) -> None:
    """An epoch of the task, by SGD: Adam would turn rounding errors of tiny gradients into steps."""
    method = loop.setup.method
    begun(loop, task)
    optimizer = torch.optim.SGD(method.param_groups(decay_groups(method.module, 0.0)), lr=0.05)
    for batch in batches(loop, task):
        loop.step(batch, task, optimizer)
    method.end_epoch(0, 1)
    method.end_task(task, loop.setup.statistics_loader(task))


def batches(loop: Loop, task: Task) -> ImageLoader:
    return loop.setup.train_loader(task, 0)


def of_all_methods(fabric: Any, configs: list[RunConfig], path: Path) -> None:
    """Through a file: what a started process returns must be small."""
    torch.set_num_threads(1)
    found = [gradients(fabric, config) for config in configs]
    if fabric.is_global_zero:
        torch.save(found, path)


def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    """All methods: for each parameter the difference is at most 1e-5 of its gradient's norm."""
    data, soft = {"num_tasks": 5, "train_per_class": 16}, {"mixing": "deit", "label_smoothing": 0.1}
    targets = [soft if parse_name(m)[0].supports_soft_labels else {} for m in METHODS]
    configs = [
        tiny_config(tmp_path, m, OPTIONS.get(m), data=data, train={"batch_size": 16, **t})
        for m, t in zip(METHODS, targets, strict=True)
    ]
    found = []
    for devices in (1, 2):
        path = tmp_path / f"{devices}.pt"
        launch(configs[0].train.model_copy(update={"devices": devices}), of_all_methods, configs, path)
        found.append(torch.load(path))
    one, two = found
    for method, (expected, terms), (got, got_terms) in zip(METHODS, one, two, strict=True):
        assert terms.keys() == got_terms.keys()
        for name, value in terms.items():
            assert value != 0, (method, name)
            assert got_terms[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-7), (method, name)
        assert len(got) == len(expected)
        if parse_name(method).base.freezes:
            assert len(got) == 2  # weight and bias of the classifier
        else:
            assert len(got) > {"nullspace": 5, "inflora": 4}.get(method, 10)  # which train a few matrices of each layer
        for a, b in zip(got, expected, strict=True):
            assert (a - b).norm() <= TOLERANCE * b.norm(), method


def whole_run(fabric: Any, config: RunConfig) -> tuple[list[list[float]], list[list[float]]]:
    """A run, and what every process holds at its end: a sum over weights and buffer, and its generator."""
    from infssm.bench import running

    loops: list[Loop] = []
    train = Loop.train
    Loop.train = lambda self: (loops.append(self), train(self))[1]  # type: ignore[assignment,func-returns-value,return-value]
    running._work(
        fabric, resolve(config), "", running.run_path(config), overwrite=False, quiet=True, listen=None, control=None
    )
    method = loops[0].setup.method
    buffer: Any = method.base.buffer
    digest = torch.stack(
        [
            sum(p.double().abs().sum() for p in method.module.parameters()),
            buffer["image"].double().mul(torch.arange(len(buffer))[:, None, None, None] + 1).sum(),
            rng_state()["torch"].double().sum(),
        ]
    )
    gathered = fabric.all_gather(digest)
    return loops[0].progress.matrix.values.tolist(), gathered.tolist()


def test_processes_stay_in_step_through_a_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "er+lwf-ac", {"buffer_size": 20}, train={"devices": 2})
    matrix, digests = launch(config.train, whole_run, config)
    assert digests[0] == digests[1]
    assert len(matrix) == len(matrix[0]) == 2
    assert len(list((tmp_path).rglob("result.json"))) == 1


def test_batches_that_cannot_be_shared(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"devices": 2, "batch_size": 7})
    with pytest.raises(ConfigError, match="multiple of the 2 processes"):
        run(config, quiet=True)


def test_errors_of_processes_keep_their_kind(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"devices": 2, "lr": 1e30, "warmup_epochs": 0})
    with pytest.raises(DivergedError, match="task 0, epoch 0"):
        run(config, quiet=True)


def test_unknown_accelerator(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    with pytest.raises(ConfigError, match="cannot use train"):
        run(tiny_config(tmp_path, train={"accelerator": "cuda"}), quiet=True)


def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(to_yaml(tiny_config(tmp_path / "runs")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infssm", "run", "-c"]
    done = subprocess.run([*command, str(config)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert done.stdout.count("report:") == 1
    assert len(list(tmp_path.rglob("result.json"))) == 1
