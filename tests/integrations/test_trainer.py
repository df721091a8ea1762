"""The mixin in transformers' own Trainer: the weights and calls of a plain loop over the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from infssm._torchvision import torchvision
from infssm.errors import CheckpointError, ConfigError
from infssm.methods import attach
from tests.integrations.loops import STEPS, Spy, assert_same, calls_of, data, model_and_method

torchvision()  # transformers imports it

import peft  # noqa: E402
from transformers import (  # noqa: E402
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from infssm.integrations.transformers import ContinualTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's own, about pinned memory and the like


class MyTrainer(ContinualTrainerMixin, Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)


def trainer(model: nn.Module, method: Any, folder: Path, accumulate: int = 1, **options: Any) -> MyTrainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=1,
        learning_rate=0.1,
        optim=options.pop("optim", "sgd"),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **({"save_strategy": "no", "logging_steps": 1} | options),
    )
    return MyTrainer(model=model, method=method, args=arguments)


class WithLoss(nn.Module):
    """A classifier as the Trainer wants it; without ``**kwargs`` that averages over accumulated batches itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_classifier(self) -> nn.Module:
        return self.model.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.model(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_tasks(expected: dict[str, Tensor], accumulate: int, tmp_path: Path) -> None:
    model, _ = model_and_method()
    whole = WithLoss(model)
    spy = Spy(attach(whole, "inf-ssm-exact", num_classes=4, num_tasks=2, weight=10.0))
    run = trainer(whole, spy, tmp_path, accumulate)
    for task in range(2):
        repeated = [batch for batch in data(task) for _ in range(accumulate)]
        rows = [{"x": x, "labels": y} for batch in repeated for x, y in zip(*batch, strict=True)]
        run.train_task(task, rows)
    assert_same(model, expected)
    assert spy.calls.count("after_step") == 2 * STEPS
    assert accumulate > 1 or spy.calls == calls_of(0) + calls_of(1)
    whole.eval()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert logs[-1]["inf-ssm-exact/distance"] > 1e-6
    before = len(spy.calls)
    loss, _ = run.compute_loss(whole, {"x": data(0)[0][0], "labels": data(0)[0][1]}, return_outputs=True)
    assert len(spy.calls) == before  # no penalty in evaluation
    assert loss.ndim == 0


def language_model() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4))
    return model, attach(model, "inf-ssm-exact", num_tasks=2, weight=10.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_normalises_its_loss_over_accumulated_batches(accumulate: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tasks = [torch.randint(0, 20, (STEPS, 4, 7), generator=generator) for _ in range(2)]
    model, method = language_model()
    for task, batches in enumerate(tasks):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method.begin_task(task)
        for ids in batches:
            model.train()
            inputs = {"input_ids": ids, "labels": ids}
            loss = model(**inputs).loss
            penalty = method.penalty(inputs)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
            method.after_step()
        method.end_task(task)
    assert penalty > 1e-6
    other, method = language_model()
    run = trainer(other, method, tmp_path, accumulate)
    for task, batches in enumerate(tasks):
        rows = [{"input_ids": ids, "labels": ids} for batch in batches for _ in range(accumulate) for ids in batch]
        run.train_task(task, rows)
    assert_same(other, model.state_dict())


LORA = {"r": 2, "target_modules": ["in_proj", "x_proj"], "init_lora_weights": False, "lora_dropout": 0.2}
ROWS = [
    [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 20, (24, 7), generator=generator)]
    for generator in (torch.Generator().manual_seed(task) for task in range(3))
]


def language_trainer(folder: Path, *, lora: bool, name: str = "inf-ssm-exact", **options: Any) -> MyTrainer:
    """A trainer of a small Mamba whose automatic weight is measured at every second step; all made anew."""
    torch.manual_seed(0)
    model: Any = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    given: dict[str, Any] = {"measure_at": 2} if "inf-ssm-exact" in name else {}
    if "self-replay" in name:
        given |= {"sequences": 6, "replay_batch": 2, "length": 5}
    torch.manual_seed(1)
    return trainer(model, attach(model, name, num_tasks=3, **given), folder, optim="adamw_torch", **options)


def add_adapter(model: Any) -> None:
    """Stack a second adapter on the first one, which stays active and is frozen."""
    model.add_adapter("second", peft.LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".second" in name)


class Crash(TrainerCallback):
    def __init__(self, task: int, step: int) -> None:
        self.task, self.step = f"task-{task}", step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step and args.output_dir.endswith(self.task):
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "name", "crash_at"),
    [
        ("lora", "inf-ssm-exact", (1, 5)),
        ("stacked", "inf-ssm-exact", (1, 5)),
        ("lora", "self-replay+inf-ssm-exact", (1, 5)),
        ("full", "inf-ssm-exact+si", (2, 2)),  # before the first checkpoint of a task
    ],
)
def test_resuming_equals_an_uninterrupted_run(kind: str, name: str, crash_at: tuple[int, int], tmp_path: Path) -> None:
    """Old model, automatic weight, importances, optimizer and random numbers all come from the checkpoint."""
    found: list[Any] = []
    for crash in (False, True):
        for attempt in range(1 + crash):
            options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
            run = language_trainer(tmp_path / str(crash), lora=kind != "full", name=name, **options)
            if crash and attempt == 0:
                run.add_callback(Crash(*crash_at))
            resume = attempt == 1 or None
            run.train_task(0, ROWS[0], resume_from_checkpoint=resume)
            torch.manual_seed(2)
            if kind == "stacked":
                add_adapter(run.model)
            try:
                run.train_task(1, ROWS[1], resume_from_checkpoint=resume)
                run.train_task(2, ROWS[2], resume_from_checkpoint=resume)
            except KeyboardInterrupt:
                assert crash
                assert attempt == 0
        assert sorted(p.name for p in (tmp_path / str(crash)).iterdir()) == ["task-0", "task-1", "task-2"]
        found.append((run.method.automatic_options(), run.model.state_dict()))
    (weight, tensors), (resumed_weight, resumed) = found
    assert weight["inf-ssm-exact.weight"] > 0
    assert resumed_weight == pytest.approx(weight, rel=1e-4)
    for key, value in tensors.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_resuming_without_the_tasks_before(tmp_path: Path) -> None:
    """A new process may continue with the interrupted task at once: the checkpoint holds the old model."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
    first = language_trainer(tmp_path, lora=True, **options)
    for task in range(2):
        first.train_task(task, ROWS[task])
    second = language_trainer(tmp_path, lora=True, **options)
    second.train_task(1, ROWS[1], resume_from_checkpoint=str(tmp_path / "task-1" / "checkpoint-3"))
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="is a checkpoint of task 1, not of task 2"):
        second.train_task(2, ROWS[2], resume_from_checkpoint=str(tmp_path / "task-1" / "checkpoint-3"))
    (tmp_path / "task-1" / "checkpoint-3" / "infssm_method.pt").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"infssm_method\.pt is damaged"):
        second.train_task(1, ROWS[1], resume_from_checkpoint=str(tmp_path / "task-1" / "checkpoint-3"))
    with pytest.raises(ConfigError, match="there is no complete checkpoint in"):
        language_trainer(tmp_path, lora=True).train_task(2, ROWS[2], resume_from_checkpoint=True)
    fresh = language_trainer(tmp_path / "empty", lora=True, max_steps=1)  # killed before its first checkpoint
    fresh.train_task(0, ROWS[0], resume_from_checkpoint=True)
    assert fresh.state.global_step == 1


def test_every_task_has_its_own_optimizer(tmp_path: Path) -> None:
    run = language_trainer(tmp_path, lora=True, name="lwf-ac", max_steps=2)
    run.train_task(0, ROWS[0])
    add_adapter(run.model)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    run.train_task(1, ROWS[1])
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".second" in name}
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {2}  # moments of this task alone
    given = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
    run.optimizer, run.lr_scheduler = given, None
    run.train_task(2, ROWS[2])
    with pytest.raises(ConfigError, match=r"set trainer\.optimizer"):
        run.train_task(3, ROWS[2])


def test_what_the_trainer_cannot_do_is_refused_before_training(tmp_path: Path) -> None:
    run = language_trainer(tmp_path, lora=False, name="lwf-ac")
    with pytest.raises(ConfigError, match="train_task"):
        run.train()
    with pytest.raises(ConfigError, match="er forms the loss itself"):
        language_trainer(tmp_path, lora=False, name="er")
    run = language_trainer(tmp_path, lora=False, name="ewc")
    before = [parameter.clone() for parameter in run.model.parameters()]
    with pytest.raises(ConfigError, match=r"ewc measures .* loader=loader"):
        run.train_task(0, ROWS[0])
    with pytest.raises(ConfigError, match="'ewc' does not work on language"):
        run.train_task(0, ROWS[0], loader=[])
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["ewc", "mas", "inf-ssm-exact+ncm"])
def test_methods_that_measure_on_a_tasks_data(name: str, tmp_path: Path) -> None:
    model = WithLoss(model_and_method()[0])
    method = attach(model, name, num_classes=4, num_tasks=2)
    run = trainer(model, method, tmp_path)
    for task in range(2):
        rows = [{"x": x, "labels": y} for batch in data(task) for x, y in zip(*batch, strict=True)]
        run.train_task(task, rows, loader=data(task))
    if name.endswith("ncm"):
        assert not any(p.requires_grad for p in model.get_classifier().parameters())  # the fitted head is in its place
        assert bool(torch.isfinite(model(data(0)[0][0])).all())
    else:
        assert run.state.log_history[0][f"{name}/penalty"] >= 0
