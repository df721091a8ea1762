"""`attach` in a loop of one's own: any model, any loader, any moment to stop."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Method, attach
from infssm.ssm import OldModel, record_states
from tests.compare import identical
from tests.methods import toys
from tests.methods.toys import TASKS
from tests.ssm import hf

FAMILIES = ["mamba", "falcon-mamba", "jamba", "mamba2", "bamba", "falcon-h1", "zamba", "zamba2", "nemotron-h"]


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return result if isinstance(result, Tensor) else result.logits.mean(1)


def drift(old: nn.Module, new: nn.Module, x: Tensor) -> float:
    """Mean absolute change of the soft-normalised a and c."""
    pairs = zip(OldModel(old).states(x), OldModel(new).states(x), strict=True)
    soft = [(o.soft_normalized(), n.soft_normalized()) for o, n in pairs]
    return float(sum((o.a - n.a).abs().mean() + (o.c - n.c).abs().mean() for o, n in soft)) / len(soft)


def held(method: Method, model: nn.Module, x: Tensor) -> Tensor:
    outputs(model, x)
    return method.penalty(x)


def check_gradient(model: nn.Module, x: Tensor, **options: Any) -> None:
    """The penalty's gradient against central differences along three directions, in float64."""
    method = attach(model, "inf-ssm-exact", weight=10.0, **options)
    method.begin_task(1)
    toys.nudge(model, 0.05)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(held(method, model, x), parameters, allow_unused=True, materialize_grads=True)
    start = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
        expected = float(sum((g * d).sum() for g, d in zip(found, direction, strict=True)))
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                for p, s, d in zip(parameters, start, direction, strict=True):
                    p.copy_(s + step * d)
            values.append(float(held(method, model, x).detach()))
        assert abs(expected) > 0
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(expected, rel=1e-5)


def check_hold(model: nn.Module, x: Tensor, y: Tensor, *, steps: int = 8, lr: float = 3e-3) -> None:
    """Training with a large weight ends nearer to the old states than training without."""
    old = copy.deepcopy(model)
    found = {}
    for weight in (0.0, 1e4):
        new = copy.deepcopy(old)
        method = attach(new, "inf-ssm-exact", distance="martin+c", weight=weight)
        method.begin_task(1)
        optimizer = torch.optim.Adam([p for p in new.parameters() if p.requires_grad], lr=lr)
        for _ in range(steps):
            loss = F.cross_entropy(outputs(new, x), y) + method.penalty(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        found[weight] = drift(old, new, x)
    assert found[1e4] < found[0.0], found


@pytest.mark.parametrize("distance", ["output", "martin+c"])
@pytest.mark.parametrize("name", list(toys.MODELS))
def test_gradient_of_our_models(name: str, distance: str) -> None:
    check_gradient(toys.model(name), toys.inputs(name), distance=distance)


@pytest.mark.parametrize("name", list(toys.MODELS))
def test_weight_holds_our_models(name: str) -> None:
    x = toys.inputs(name, dtype=torch.float32)
    check_hold(toys.model(name, dtype=torch.float32), x, torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_holds_transformers(family: str) -> None:
    check_hold(hf.make(family), hf.tokens(batch=3), torch.tensor([3, 1, 4]))


@pytest.mark.parametrize("name", ["inf-ssm-exact", "ewc", "si", "mas", "ucl", "lwf-abc"])
def test_the_loop_of_the_documentation(name: str) -> None:
    """Tasks as plain ints, loaders of (x, y), gradients cleared before after_step."""
    model = toys.vim(dtype=torch.float32)
    method = attach(model, name, **measured(name))
    optimizer = torch.optim.AdamW(method.param_groups([{"params": list(model.parameters())}]), lr=1e-3)
    for task in range(2):
        loader = [(b.x, b.y) for b in toys.loader(TASKS[task], dtype=torch.float32)]
        method.begin_task(task)
        for x, y in loader:
            penalty = None
            loss = F.cross_entropy(model(x), y) + (penalty := method.penalty(x))
            assert (float(penalty.detach()) == 0.0) or task == 1
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        method.end_task(task, loader)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def train(method: Method, optimizer: torch.optim.Optimizer, task: int, batches: range) -> list[Tensor]:
    penalties = []
    for i in batches:
        batch = toys.batch(TASKS[task], dtype=torch.float32, seed=i)
        loss = F.cross_entropy(method.module(batch.x), batch.y) + (penalty := method.penalty(batch.x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
        penalties.append(penalty.detach())
    return penalties


def measured(name: str) -> dict[str, Any]:
    """Options with which the automatic weight is found within a task of a few steps."""
    return {"inf-ssm-exact.measure_at": 1} if "inf-ssm-exact" in name else {}


def start(name: str, seed: int, **options: Any) -> tuple[Method, torch.optim.Optimizer]:
    model = toys.vim(dtype=torch.float32, seed=seed)
    method = attach(model, name, **measured(name), **options)
    return method, torch.optim.AdamW(method.param_groups([{"params": list(model.parameters())}]), lr=1e-3)


@pytest.mark.parametrize("again", [False, True], ids=["", "begin_task again"])
@pytest.mark.parametrize("name", ["lwf-ac", "inf-ssm-exact", "ewc+inf-ssm-exact", "si", "mas", "ucl", "si+ucl+lwf-abc"])
def test_going_on_in_the_middle_of_a_task(name: str, again: bool) -> None:
    method, optimizer = start(name, 0)
    method.begin_task(0)
    train(method, optimizer, 0, range(2))
    method.end_task(0, toys.loader(TASKS[0], dtype=torch.float32))
    method.begin_task(1)
    train(method, optimizer, 1, range(2))

    file = io.BytesIO()
    state = {"model": method.module.state_dict(), "method": method.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"rng": torch.get_rng_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    expected = train(method, optimizer, 1, range(2, 5))
    method.end_task(1, toys.loader(TASKS[1], dtype=torch.float32))

    resumed, optimizer = start(name, 1)
    resumed.module.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["method"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    if again:
        resumed.begin_task(1)
    found = train(resumed, optimizer, 1, range(2, 5))
    resumed.end_task(1, toys.loader(TASKS[1], dtype=torch.float32))
    assert all(identical(a, b) for a, b in zip(found, expected, strict=True))
    for key, value in method.module.state_dict().items():
        assert identical(resumed.module.state_dict()[key], value)
    assert_same(resumed.state_dict(), method.state_dict())


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, Tensor):
        assert identical(one, other)
    else:
        assert one == other


def test_a_model_trained_elsewhere_is_held_from_its_first_task_here() -> None:
    model = toys.vim()
    old = copy.deepcopy(model)
    method = attach(model, "lwf-ac", weight=1.0)
    method.begin_task(1)
    toys.nudge(model)
    x = toys.batch(TASKS[1]).x
    value = held(method, model, x)
    other = attach(old, "lwf-ac", weight=1.0)
    other.end_task(0)
    other.begin_task(1)
    old.load_state_dict(model.state_dict())
    torch.testing.assert_close(value, held(other, old, x))
    assert float(value.detach()) > 0


def test_evaluation_between_the_steps_does_no_harm() -> None:
    method = attach(model := toys.vim(), "lwf-ac")
    method.begin_task(1)
    toys.nudge(model)
    x = toys.batch(TASKS[1]).x
    expected = held(method, model, x).detach()
    with torch.no_grad():
        model(toys.batch(TASKS[1], 7, seed=3).x)
    torch.testing.assert_close(held(method, model, x).detach(), expected)


def test_misuse_is_explained() -> None:
    method = attach(model := toys.vim(), "lwf-ac")
    x = toys.batch(TASKS[1]).x
    with pytest.raises(ConfigError, match="begin_task"):
        method.penalty(x)
    with pytest.raises(ConfigError, match="0-based index"):
        method.begin_task("first")
    with pytest.raises(ConfigError, match="ascending block"):
        method.begin_task(toys.Task(1, (2, 4)))
    method.begin_task(1)
    with pytest.raises(ConfigError, match="no forward"):
        method.penalty(x)
    model(x)
    with pytest.raises(ConfigError, match=r"4 rows.*asked for 2"):
        method.penalty(x[:2])
    with pytest.raises(ConfigError, match="of method 'lwf-ac', not of 'seq'"):
        attach(toys.vim(), "seq").load_state_dict(method.state_dict())


def test_nothing_is_recorded_outside_a_task() -> None:
    method = attach(model := toys.vim(), "lwf-ac")
    method.begin_task(1)
    x = toys.batch(TASKS[1]).x
    held(method, model, x)
    method.end_task(1)
    with record_states(model) as states:
        model(x)
    assert len(states) == 2


def test_keyword_inputs_of_transformers() -> None:
    model = hf.make("mamba")
    method = attach(model, "inf-ssm-exact", weight=5.0)
    method.begin_task(1)
    toys.nudge(model, 0.05)
    ids = hf.tokens(batch=3)
    model(input_ids=ids)
    by_keyword = method.penalty({"input_ids": ids})
    model(ids)
    torch.testing.assert_close(by_keyword, method.penalty(ids))
    assert float(by_keyword.detach()) > 0


def test_the_old_model_runs_once_for_all_regularizers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = OldModel.observe
    monkeypatch.setattr(OldModel, "observe", lambda self, x, **kw: calls.append(1) or original(self, x, **kw))
    method = attach(model := toys.vim(), "lwf-ac+inf-ssm-exact+lwf+lwf-f", **{"inf-ssm-exact.weight": 1.0})
    method.begin_task(1)
    held(method, model, toys.batch(TASKS[1]).x)
    assert len(calls) == 1
