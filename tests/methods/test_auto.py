from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from infssm.errors import ConfigError
from infssm.methods import Method, attach, build_method
from infssm.methods._auto import TARGET
from infssm.methods._losses import cross_entropy
from infssm.states import record_states
from tests.compare import identical
from tests.methods import toys
from tests.methods.test_inf_ssm import sn
from tests.methods.toys import TASKS

STEPS = 8


def second_task(loader: object = None, **options: object) -> tuple[nn.Module, Method]:
    model = toys.vim(dtype=torch.float32)
    method = build_method(model, "inf-ssm-exact", probe_steps=STEPS, **{"distance": "c", **options})
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1], loader, lr=2e-3)
    return model, method


def drift(old: nn.Module, new: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        with record_states(old) as before:
            old(x)
        with record_states(new) as after:
            new(x)
    pairs = list(zip(before.flat(), after.flat(), strict=True))
    return float(sum((sn(o.c) - sn(n.c)).square().mean() for o, n in pairs)) / len(pairs)


@pytest.mark.parametrize(("mask", "columns"), [("current", slice(2, 4)), ("seen", slice(0, 4)), ("full", slice(0, 6))])
def test_probe_measures_what_plain_training_reaches(mask: str, columns: slice) -> None:
    data = toys.loader(TASKS[1], batches=3, dtype=torch.float32)
    model, method = second_task(data, mask=mask)
    weights = copy.deepcopy(model.state_dict())
    new = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(new.parameters(), lr=2e-3)
    drifts = []
    for step in range(STEPS):
        batch = data[step % 3]
        drifts.append(drift(model, new, batch.x))
        cross_entropy(new(batch.x), batch, columns).backward()
        optimizer.step()
        optimizer.zero_grad()
    auto = method.regularizers[0].auto
    assert auto.weight == pytest.approx(TARGET / (sum(drifts[-5:]) / 5), rel=1e-3)
    assert all(identical(v, weights[k]) for k, v in model.state_dict().items()), "only the copy is trained"
    assert all(p.grad is None for p in model.parameters())


def test_probe_leaves_the_random_state_alone() -> None:
    class Shuffled(list):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter([self[i] for i in torch.randperm(len(self))])

    torch.manual_seed(3)
    before = torch.get_rng_state()
    _, method = second_task()
    torch.set_rng_state(before)
    method.begin_task(TASKS[1], Shuffled(toys.loader(TASKS[1], batches=3, dtype=torch.float32)))
    assert method.regularizers[0].auto.weight is not None
    assert identical(torch.get_rng_state(), before)


def test_the_weight_is_measured_once_and_used() -> None:
    data = toys.loader(TASKS[1], dtype=torch.float32)
    model, method = second_task(data)
    weight = method.regularizers[0].auto.weight
    old = copy.deepcopy(model)
    toys.nudge(model, 0.05)
    value = method.loss(data[0])["inf-ssm-exact/distance"]
    assert float(value.detach()) == pytest.approx(weight * drift(old, model, data[0].x), rel=1e-3)
    method.end_task(TASKS[1])
    method.begin_task(TASKS[2], toys.loader(TASKS[2], dtype=torch.float32))
    assert method.regularizers[0].auto.weight == weight


def own_loop(method: Method, model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = toys.loader(TASKS[1], dtype=torch.float32)
    values = []
    for step in range(steps):
        batch = data[step % 2]
        loss = nn.functional.cross_entropy(model(batch.x), batch.y)
        penalty = method.penalty(batch.x)
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
        values.append(float(penalty.detach()))
    return values


def test_without_a_loader_the_first_steps_are_the_probe() -> None:
    model = toys.vim(dtype=torch.float32)
    method = attach(model, "inf-ssm-exact", probe_steps=STEPS)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1)
    values = own_loop(method, model, STEPS)
    assert values == [0.0] * STEPS
    assert method.regularizers[0].auto.weight is not None
    assert all(v > 0 for v in own_loop(method, model, 2))


def test_measurements_survive_a_restart() -> None:
    model = toys.vim(dtype=torch.float32)
    method = attach(model, "inf-ssm-exact", probe_steps=STEPS)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1)
    own_loop(method, model, STEPS - 2)
    other = toys.vim(dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    resumed = attach(other, "inf-ssm-exact", probe_steps=STEPS)
    resumed.load_state_dict(copy.deepcopy(method.state_dict()))
    assert own_loop(method, model, 4) == own_loop(resumed, other, 4)
    assert method.regularizers[0].auto.weight == resumed.regularizers[0].auto.weight is not None


def test_states_that_do_not_move_are_reported() -> None:
    _, method = second_task()
    (exact,) = method.regularizers
    for _ in range(STEPS - 1):
        exact.auto.weigh(torch.zeros(()))
    with pytest.warns(UserWarning, match="did not move"):
        exact.auto.weigh(torch.zeros(()))
    assert exact.auto.weight == 0.0


def test_diverged_states_are_an_error() -> None:
    _, method = second_task()
    (exact,) = method.regularizers
    for _ in range(STEPS - 1):
        exact.auto.weigh(torch.tensor(torch.nan))
    with pytest.raises(ConfigError, match="set weight to a number"):
        exact.auto.weigh(torch.tensor(torch.nan))


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(ConfigError, match="gave no batch"):
        second_task([])
