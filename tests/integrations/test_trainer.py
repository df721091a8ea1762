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
from infssm.methods import attach
from tests.integrations.loops import STEPS, Spy, assert_same, calls_of, data, model_and_method

torchvision()  # transformers imports it

from transformers import MambaConfig, MambaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from infssm.integrations.transformers import ContinualTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's own, about pinned memory and the like


class MyTrainer(ContinualTrainerMixin, Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)


def trainer(model: nn.Module, method: Any, folder: Path, accumulate: int = 1) -> MyTrainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return MyTrainer(model=model, method=method, args=arguments)


class WithLoss(nn.Module):
    """A classifier as the Trainer wants it; without ``**kwargs`` that averages over accumulated batches itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


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
