"""Models with adapters of peft: the old model costs the adapter alone, and holds as a whole copy would."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infssm.errors import ConfigError
from infssm.integrations import mend_torchvision
from infssm.integrations.transformers import accelerate
from infssm.methods import Method, attach
from infssm.ssm import OldModel
from tests.compare import identical
from tests.ssm import hf

mend_torchvision()  # peft imports transformers, which imports torchvision

import peft  # noqa: E402

NAME = "lwf+lwf-ac+inf-ssm-exact"
WEIGHTS = {"inf-ssm-exact.weight": 10.0, "lwf-ac.weight": 10.0}
TARGETS = {"mamba": ["in_proj", "x_proj"], "mamba2": ["in_proj"], "bamba": ["in_proj", "q_proj"], "zamba2": ["in_proj"]}


def config(family: str = "mamba", **options: Any) -> Any:
    chosen = {"r": 2, "target_modules": TARGETS[family], "init_lora_weights": False, "lora_dropout": 0.2, **options}
    return peft.LoraConfig(**chosen)


def adapted(family: str = "mamba", **options: Any) -> Any:
    """A model whose adapter is random on both sides, so that it matters from the start."""
    model = hf.make(family).double()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(family, **options)).train()


def inputs(seed: int = 0) -> dict[str, Tensor]:
    ids = hf.tokens(seed=seed, batch=3)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, method: Method, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss = model(**inputs(seed)).loss
    penalty = method.penalty(inputs(seed))
    optimizer.zero_grad()
    (loss + penalty).backward()
    optimizer.step()
    method.after_step()
    return penalty.detach()


def train(model: nn.Module, method: Method, seeds: range = range(2)) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return [step(model, method, optimizer, seed) for seed in seeds]


def penalty(model: nn.Module, method: Method) -> Tensor:
    """The penalty of one forward, always with the same dropout."""
    torch.manual_seed(5)
    model(**inputs(5))
    return method.penalty(inputs(5))


def assert_as_with(reference: nn.Module, model: nn.Module, method: Method) -> None:
    """Penalty and gradient are those with a whole copy of ``reference`` as the old model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    old = method.context.old
    assert old is not None
    found = []
    for each in (old, OldModel(reference.requires_grad_(True))):
        method.context.old = each
        value = penalty(model, method)
        found.append([value.detach(), *torch.autograd.grad(value, trained, allow_unused=True, materialize_grads=True)])
    method.context.old = old
    assert found[1][0] > 1e-6
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("fast", [False, True], ids=["", "accelerated"])
@pytest.mark.parametrize("family", list(TARGETS))
def test_the_old_model_is_the_adapter_alone(family: str, fast: bool) -> None:
    model = adapted(family)
    if fast:
        accelerate(model)
    method = attach(model, NAME, **WEIGHTS)
    method.begin_task(0)
    train(model, method)
    method.end_task(0)
    reference = copy.deepcopy(model)
    method.begin_task(1)
    train(model, method)
    assert_as_with(reference, model, method)
    old = method.context.old
    assert old is not None
    mine = {id(p) for p in model.parameters()}
    own = [name for name, p in old.module.named_parameters() if id(p) not in mine]
    assert own == [name for name, p in model.named_parameters() if p.requires_grad]
    state = method.state_dict()["old"]
    assert (
        sum(t.numel() for t in state.values() if isinstance(t, Tensor)) < sum(p.numel() for p in model.parameters()) / 4
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: adapted(use_dora=True),
        lambda: adapted(modules_to_save=["lm_head"]),
        lambda: adapted(bias="all"),
        lambda: peft.get_peft_model(hf.make("mamba").double(), peft.LoHaConfig(r=2, target_modules=TARGETS["mamba"])),
        lambda: peft.get_peft_model(
            hf.make("mamba").double(), peft.IA3Config(target_modules=TARGETS["mamba"], feedforward_modules=[])
        ),
    ],
    ids=["dora", "modules_to_save", "bias", "loha", "ia3"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_other_adapters(make: Callable[[], Any]) -> None:
    model = make()
    method = attach(model, NAME, **WEIGHTS)
    reference = copy.deepcopy(model)
    method.begin_task(1)
    train(model, method)
    assert_as_with(reference, model, method)


def after_a_task() -> tuple[Any, Any, Any]:
    """A model with an adapter that has learned task 0, its method, and a deep copy to compare the old model with."""
    model = adapted()
    method = attach(model, NAME, **WEIGHTS)
    method.begin_task(0)
    train(model, method)
    method.end_task(0)
    return model, method, copy.deepcopy(model)


def test_an_adapter_for_every_task() -> None:
    """Stacked: the old ones stay active, and frozen; then the first is trained again."""
    model, method, reference = after_a_task()
    model.add_adapter("second", config())
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".second" in name)
    method.begin_task(1)
    train(model, method)
    assert_as_with(reference, model, method)
    method.end_task(1)
    reference = copy.deepcopy(model)
    model.set_adapter("default")
    method.begin_task(2)
    train(model, method)
    assert_as_with(reference, model, method)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_between_tasks(safe: bool) -> None:
    """Merged weights are what the old model shares: it is taken anew, of the same function."""
    model, method, reference = after_a_task()
    model.merge_adapter(safe_merge=safe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("A_log"))  # merged adapters do not train
    method.begin_task(1)
    train(model, method)
    assert_as_with(reference, model, method)


def test_merging_in_the_middle_of_a_task_is_refused() -> None:
    """The old model shares the weights that the adapter is merged into."""
    model, method, reference = after_a_task()
    method.begin_task(1)
    train(model, method)
    model.merge_adapter()
    with pytest.raises(ConfigError, match=r"merge_adapter\(\) between end_task and begin_task"):
        penalty(model, method)
    model.unmerge_adapter()
    assert_as_with(reference, model, method)


@pytest.mark.parametrize("fast", [False, True], ids=["", "accelerated"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_model_in_bfloat16(family: str, fast: bool) -> None:
    """The base weights are bfloat16 and the adapter float32, as peft makes them."""
    model = peft.get_peft_model(hf.make(family).bfloat16(), config(family, lora_dropout=0.0)).train()
    if fast:
        accelerate(model)
    method = attach(model, "inf-ssm-exact+lwf-ac", **WEIGHTS)
    method.begin_task(1)
    values = train(model, method, range(3))
    assert values[-1] > 0
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_merged_model_with_a_new_adapter() -> None:
    first, _, reference = after_a_task()
    model = peft.get_peft_model(first.merge_and_unload(), config(init_lora_weights=True)).train()
    method = attach(model, NAME, **WEIGHTS)
    method.begin_task(1)
    train(model, method)
    assert_as_with(reference, model, method)


def test_training_goes_on_from_a_checkpoint() -> None:
    """In the middle of a task whose adapter is not the one that the old model uses."""

    def start() -> tuple[Any, Method, torch.optim.Optimizer]:
        model = adapted()
        model.add_adapter("second", config())
        method = attach(model, NAME, **WEIGHTS)
        return model, method, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, method, optimizer = start()
    method.begin_task(0)
    step(model, method, optimizer, 0)
    method.end_task(0)
    model.set_adapter("second")
    method.begin_task(1)
    step(model, method, optimizer, 1)
    file = io.BytesIO()
    torch.save([peft.get_peft_model_state_dict(model, adapter_name=name) for name in ("default", "second")], file)
    rest = io.BytesIO()
    torch.save({"method": method.state_dict(), "optimizer": optimizer.state_dict()}, rest)
    assert len(rest.getvalue()) < sum(p.numel() * p.element_size() for p in model.parameters())
    expected = [step(model, method, optimizer, seed) for seed in (2, 3)]

    model, method, optimizer = start()
    torch.manual_seed(7)
    file.seek(0)
    for name, state in zip(("default", "second"), torch.load(file, weights_only=True), strict=True):
        peft.set_peft_model_state_dict(model, state, adapter_name=name)
    model.set_adapter("second")
    rest.seek(0)
    saved = torch.load(rest, weights_only=True)
    method.load_state_dict(saved["method"])
    optimizer.load_state_dict(saved["optimizer"])
    found = [step(model, method, optimizer, seed) for seed in (2, 3)]
    assert min(found) > 1e-6
    assert all(identical(mine, wanted) for mine, wanted in zip(found, expected, strict=True))


def test_gradient_checkpointing() -> None:
    """Values and gradients are those without it."""
    found = []
    for checkpoints in (False, True):
        model = adapted(lora_dropout=0.0)
        if checkpoints:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        method = attach(model, NAME, **WEIGHTS)
        method.begin_task(1)
        train(model, method)
        value = penalty(model, method)
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert found[0][0] > 1e-6
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-9)


def test_autocast() -> None:
    model = adapted().float()
    method = attach(model, NAME, **WEIGHTS)
    reference = copy.deepcopy(model)
    method.begin_task(1)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, method)
        assert_as_with(reference, model, method)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    values = []
    for wrap in (lambda model: model, DistributedDataParallel):
        model = wrap(adapted())
        method = attach(model, NAME, **WEIGHTS)
        method.begin_task(1)
        values.append(torch.stack(train(model, method, range(3))))
    assert values[0][-1] > 1e-6
    torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=1e-9)


def plain_loop() -> dict[str, Tensor]:
    model = adapted(lora_dropout=0.0)
    method = attach(model, NAME, **WEIGHTS)
    for task in range(2):
        method.begin_task(task)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for seed in range(2):
            step(model, method, optimizer, 2 * task + seed)
        method.end_task(task)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")  # the Trainer's own, about pinned memory and the like
def test_the_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from infssm.integrations.transformers import ContinualTrainerMixin

    class MyTrainer(ContinualTrainerMixin, Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    model = adapted(lora_dropout=0.0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = MyTrainer(model=model, method=attach(model, NAME, **WEIGHTS), args=arguments)
    for task in range(2):
        batches = [inputs(2 * task + seed) for seed in range(2)]
        trainer.train_task(task, [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(3)])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), plain_loop()[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_loop_of_accelerate(checkpoints: bool) -> None:
    """As TRL's trainers run: a prepared model, gradient checkpointing, and the accelerator's backward."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = adapted(lora_dropout=0.0)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    method = attach(model, NAME, **WEIGHTS)
    for task in range(2):
        method.begin_task(task)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for seed in range(2):
            batch = inputs(2 * task + seed)
            loss = prepared(**batch).loss + method.penalty(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        method.end_task(task)
    expected = plain_loop()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6, atol=1e-9)


def test_the_automatic_weight() -> None:
    model = adapted(lora_dropout=0.0)
    method = attach(model, "inf-ssm-exact", measure_at=2)
    method.begin_task(1)
    assert float(train(model, method, range(5))[-1]) > 0
