from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from infssm.errors import ConfigError
from infssm.methods import Method, attach, build_method
from infssm.methods._shared.losses import cross_entropy
from infssm.methods.inf_ssm._auto import STRENGTH
from infssm.models import create_model
from infssm.states import find_mixers, record_states
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


def moved(old: nn.Module, new: nn.Module) -> float:
    before, after = (
        torch.cat([p.detach().double().flatten() for mixer in find_mixers(m).values() for p in mixer.parameters()])
        for m in (old, new)
    )
    return float((after - before).norm() / before.norm()) ** 2


@pytest.mark.parametrize(("mask", "columns"), [("current", slice(2, 4)), ("seen", slice(0, 4)), ("full", slice(0, 6))])
def test_probe_measures_what_plain_training_reaches(mask: str, columns: slice) -> None:
    data = toys.loader(TASKS[1], batches=3, dtype=torch.float32)
    model, method = second_task(data, mask=mask)
    weights = copy.deepcopy(model.state_dict())
    new = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(new.parameters(), lr=2e-3)
    measured = []
    for step in range(STEPS):
        batch = data[step % 3]
        measured.append((moved(model, new), drift(model, new, batch.x)))
        cross_entropy(new(batch.x), batch, columns).backward()
        optimizer.step()
        optimizer.zero_grad()
    auto = method.regularizers[0].auto
    movements, drifts = zip(*measured[-5:], strict=True)
    assert auto.weight == pytest.approx(STRENGTH * sum(movements) / sum(drifts), rel=1e-3)
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


def test_the_weight_does_not_follow_the_learning_rate() -> None:
    """Far below where the model changes its shape, penalty and movement both grow with the square of the rate."""
    data = toys.loader(TASKS[1], batches=3)
    weights = []
    for lr in (1e-5, 1e-6):
        method = build_method(toys.vim(), "inf-ssm-exact", probe_steps=STEPS)
        method.begin_task(TASKS[0])
        method.end_task(TASKS[0])
        method.begin_task(TASKS[1], data, lr=lr)
        weights.append(method.regularizers[0].auto.weight)
    assert weights[0] == pytest.approx(weights[1], rel=0.05)


def test_without_a_loader_the_weight_rises_step_by_step() -> None:
    model = toys.vim(dtype=torch.float32)
    method = attach(model, "inf-ssm-exact", probe_steps=STEPS)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1)
    own_loop(method, model, STEPS)
    auto = method.regularizers[0].auto
    shares = [float(auto.weigh(torch.ones(()))) / auto.weight for _ in range(4 * STEPS + 3)]
    expected = [(step + 1) / (4 * STEPS) for step in range(4 * STEPS)] + 3 * [1.0]
    assert shares == pytest.approx(expected, rel=1e-6)


class Keywords(nn.Module):
    """A model that takes keyword arguments and gives its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = toys.model("mamba_nano")
        self.num_classes = toys.CLASSES

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.model(input_ids)
        return SimpleNamespace(
            logits=logits, loss=None if labels is None else nn.functional.cross_entropy(logits, labels)
        )


def test_batches_of_keyword_arguments_are_measured_on_too() -> None:
    model, x, y = Keywords(), toys.inputs("mamba_nano"), torch.tensor([0, 1, 0, 1])
    method = attach(model, "inf-ssm-exact", probe_steps=STEPS)
    method.begin_task(0)
    method.end_task(0)
    with pytest.raises(ConfigError, match="need labels"):
        method.begin_task(1, [{"input_ids": x}])
    method.begin_task(1, [{"input_ids": x, "labels": y}])
    weight = method.regularizers[0].auto.weight
    assert weight > 0
    toys.nudge(model)
    model(input_ids=x)
    found = float(method.penalty({"input_ids": x}).detach())
    assert found > 0
    plain = attach(toys.model("mamba_nano"), "inf-ssm-exact", probe_steps=STEPS, mask="full")
    plain.begin_task(0)
    plain.end_task(0)
    plain.begin_task(1, [(x, y)])
    assert plain.regularizers[0].auto.weight == pytest.approx(weight, rel=1e-9)


def test_a_language_model_is_measured_on_every_token() -> None:
    torch.manual_seed(0)
    model = create_model("mamba_lm_130m", d_model=16, n_layer=1, vocab_size=20)
    ids = torch.randint(20, (3, 7))
    method = attach(model, "inf-ssm-exact", probe_steps=STEPS)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1, [(ids[:, :-1], ids[:, 1:])])
    assert method.regularizers[0].auto.weight > 0


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
