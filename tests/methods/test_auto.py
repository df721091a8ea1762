"""`weight="auto"`: the penalty's gradient as long as a set share of the loss's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Batch, Method, attach, build_method
from infssm.methods.core.losses import cross_entropy
from infssm.methods.regularizers.auto_weight import SHARE
from infssm.models import create_model
from infssm.ssm import record_states
from tests.compare import identical
from tests.methods import toys
from tests.methods.test_inf_ssm import sn
from tests.methods.toys import TASKS

FIRST = 3
MEASURED = [3, 6, 12]
"""Steps of a task that are measured, of its first 15: ever fewer, so that they cost less and less."""
OPTIONS: dict[str, Any] = {"distance": "c", "measure_at": FIRST}


def second_task(model: nn.Module | None = None, **options: Any) -> Method:
    method = build_method(model or toys.vim(), "inf-ssm-exact", num_classes=toys.CLASSES, **{**OPTIONS, **options})
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1])
    return method


def own_loop(model: nn.Module | None = None, **options: Any) -> Method:
    method = attach(model or toys.vim(), "inf-ssm-exact", **{**OPTIONS, **options})
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1)
    return method


def weight(method: Method) -> float:
    found = method.state_dict()["components"]["inf-ssm-exact"]["weight"]
    assert isinstance(found, float)
    return found


def drift(old: nn.Module, new: nn.Module, x: Tensor) -> Tensor:
    """The distance ``c``, written out."""
    with torch.no_grad(), record_states(old) as before:
        old(x)
    with record_states(new) as after:
        new(x)
    pairs = list(zip(before.flat(), after.flat(), strict=True))
    return sum((sn(o.c) - sn(n.c)).square().mean() for o, n in pairs) / len(pairs)


def squares(old: nn.Module, new: nn.Module, x: Tensor, loss: Callable[[nn.Module], Tensor]) -> tuple[float, float]:
    """Squared lengths of the gradients of loss and penalty, over the parameters that the penalty reaches."""
    parameters = list(new.parameters())
    own = torch.autograd.grad(drift(old, new, x), parameters, allow_unused=True)
    of_loss = torch.autograd.grad(loss(new), parameters, allow_unused=True, materialize_grads=True)
    reached = [(a, b) for a, b in zip(of_loss, own, strict=True) if b is not None]
    assert len(reached) < len(parameters), "the classifier is not among them"
    return tuple(float(sum(g.square().sum() for g in part)) for part in zip(*reached, strict=True))  # type: ignore[return-value]


def sgd(method: Method, backward: Callable[[], None], lr: float = 0.1) -> None:
    backward()
    torch.optim.SGD(method.module.parameters(), lr=lr).step()
    method.module.zero_grad()
    method.after_step()


@pytest.mark.parametrize(("mask", "columns"), [("current", slice(2, 4)), ("seen", slice(0, 4)), ("full", slice(0, 6))])
def test_the_weight_is_a_share_of_the_ratio_of_gradients(mask: str, columns: slice) -> None:
    method = second_task(mask=mask)
    old = copy.deepcopy(method.module)
    seen, expected, sums = [], [], (0.0, 0.0)
    for step in range(5 * FIRST):
        one = toys.batch(TASKS[1], seed=step)
        if step + 1 in MEASURED:
            new = squares(old, method.module, one.x, lambda m, b=one: cross_entropy(m(b.x), b, columns))
            sums = (sums[0] + new[0], sums[1] + new[1])
            expected.append(SHARE * math.sqrt(sums[0] / sums[1]))
        sgd(method, lambda b=one: toys.total(method.loss(b)).backward())
        seen.append(weight(method))
    assert seen[: FIRST - 1] == [0.0] * (FIRST - 1)
    assert [seen[step - 1] for step in MEASURED] == pytest.approx(expected, rel=1e-6)
    changed = [step + 1 for step, (a, b) in enumerate(zip([0.0, *seen], seen, strict=False)) if a != b]
    assert changed == MEASURED, "it changes with measurements alone"


def test_one_measurement_makes_the_gradients_that_share() -> None:
    method = second_task()
    batches = [toys.batch(TASKS[1], seed=step) for step in range(FIRST)]
    for one in batches[:-1]:
        sgd(method, lambda b=one: toys.total(method.loss(b)).backward())
    sgd(method, lambda: toys.total(method.loss(batches[-1])).backward(), lr=0.0)
    terms = method.loss(batches[-1])
    parameters = list(method.module.parameters())
    ce, held = (
        torch.autograd.grad(terms[key], parameters, allow_unused=True, materialize_grads=True, retain_graph=True)
        for key in ("ce", "inf-ssm-exact/distance")
    )
    reached = [(a, b) for a, b in zip(ce, held, strict=True) if float(b.abs().max()) > 0]
    lengths = [float(torch.cat([g.flatten() for g in part]).norm()) for part in zip(*reached, strict=True)]
    assert lengths[1] == pytest.approx(SHARE * lengths[0], rel=1e-3)
    inner = sum(float((a * (a + b)).sum()) for a, b in reached)
    assert inner >= (1 - 1.01 * SHARE) * lengths[0] ** 2, "the loss still goes down"


def test_a_measured_step_is_like_any_other() -> None:
    measured, fixed = second_task(measure_at=1), second_task(weight=5.0)
    state = measured.state_dict()
    state["components"]["inf-ssm-exact"] |= {"weight": 5.0, "level": 1e6}  # the penalty is far below
    measured.load_state_dict(state)
    one = toys.batch(TASKS[1])
    before = torch.get_rng_state()
    for method in (measured, fixed):
        toys.nudge(method.module, 0.05)
        toys.total(method.loss(one)).backward()
    assert identical(torch.get_rng_state(), before)
    for a, b in zip(measured.module.parameters(), fixed.module.parameters(), strict=True):
        assert identical(a.grad, b.grad)
    measured.after_step()
    assert weight(measured) not in (0.0, 5.0)
    assert not any(p._backward_hooks for p in measured.module.parameters())


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def one_step(parts: Sequence[Batch], scale: float = 1.0, *, together: bool = False) -> float:
    """The weight after one measured step over the parts, each with an equal share in the loss."""
    method = own_loop(measure_at=1)
    model = method.module
    toys.nudge(model, 0.05)
    summed: list[Tensor] = []
    for part in parts:
        total = scale * (losses(model, part.x, part.y) + method.penalty(part.x)) / len(parts)
        summed.append(total)
        if not together:
            total.backward()
    if together:
        torch.stack(summed).sum().backward()
    model.zero_grad()
    method.after_step()
    return weight(method)


@pytest.mark.parametrize("together", [False, True])
def test_accumulated_batches_count_as_one(together: bool) -> None:
    whole = toys.batch(TASKS[1], 6)
    halves = [Batch(whole.x[rows], whole.y[rows]) for rows in (slice(0, 3), slice(3, 6))]
    assert one_step(halves, together=together) == pytest.approx(one_step([whole]), rel=1e-9)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    one = [toys.batch(TASKS[1])]
    assert one_step(one, 1024.0) == pytest.approx(one_step(one), rel=1e-12)


def test_the_scale_of_the_distance_does_not_matter_either() -> None:
    """Weighted, a distance ten times as large is the same penalty."""
    found = []
    for kind in ("c", "10*c"):
        method = second_task(distance=kind, measure_at=1)
        toys.nudge(method.module, 0.05)
        sgd(method, lambda m=method: toys.total(m.loss(toys.batch(TASKS[1]))).backward(), lr=0.0)
        found.append(float(method.loss(toys.batch(TASKS[1]))["inf-ssm-exact/distance"].detach()))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_what_rounding_leaves_at_the_old_model_makes_no_jump() -> None:
    """There the ratio of the gradients says nothing, and may be of any size."""
    method = second_task(measure_at=1)
    one = toys.batch(TASKS[1])
    sgd(method, lambda: toys.total(method.loss(one)).backward(), lr=0.0)
    toys.nudge(method.module, 0.05)
    terms = method.loss(one)
    assert float(terms["inf-ssm-exact/distance"].detach()) < float(terms["ce"].detach())


def test_a_penalty_that_grows_between_measurements_keeps_its_pull() -> None:
    """The weight falls with the penalty's square root, and does not rise above the measured one."""
    method = second_task(measure_at=1)
    toys.nudge(method.module, 0.05)
    sgd(method, lambda: toys.total(method.loss(toys.batch(TASKS[1]))).backward(), lr=0.0)
    auto = method.regularizers[0]
    level = float(drift(method.context.old.module, method.module, toys.batch(TASKS[1]).x).detach())  # type: ignore[union-attr]
    for factor, expected in ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (4.0, 2.0), (1e6, 1e3)):
        found = float(auto.weigh(torch.tensor(factor * level, dtype=torch.float64)))
        assert found == pytest.approx(expected * weight(method) * level, rel=1e-9)


def test_a_step_that_overflowed_is_not_counted() -> None:
    method = second_task(measure_at=1)
    toys.nudge(method.module, 0.05)
    (math.inf * toys.total(method.loss(toys.batch(TASKS[1])))).backward()
    method.module.zero_grad()
    method.after_step()
    assert weight(method) == 0.0
    sgd(method, lambda: toys.total(method.loss(toys.batch(TASKS[1]))).backward(), lr=0.0)
    assert weight(method) > 0


def test_the_weight_stays_until_the_next_task_is_measured() -> None:
    """And that measurement has nothing of the last task in it."""
    method = second_task()
    for step in range(FIRST + 1):
        sgd(method, lambda s=step: toys.total(method.loss(toys.batch(TASKS[1], seed=s))).backward())
    before = weight(method)
    assert before > 0
    method.end_task(TASKS[1])
    method.begin_task(TASKS[2])
    old = copy.deepcopy(method.module)
    for step in range(FIRST - 1):
        sgd(method, lambda s=step: toys.total(method.loss(toys.batch(TASKS[2], seed=s))).backward())
        assert weight(method) == before
    one = toys.batch(TASKS[2], seed=9)
    columns = slice(4, 6)
    new = squares(old, method.module, one.x, lambda m: cross_entropy(m(one.x), one, columns))
    sgd(method, lambda: toys.total(method.loss(one)).backward())
    assert weight(method) == pytest.approx(SHARE * math.sqrt(new[0] / new[1]), rel=1e-6)


def test_tasks_too_short_to_be_measured() -> None:
    """The first holds nothing, and says so; later ones have the weight of the last that was measured."""
    method = second_task()
    for step in range(FIRST - 1):
        terms = method.loss(toys.batch(TASKS[1], seed=step))
        assert float(terms["inf-ssm-exact/distance"].detach()) == 0.0
        sgd(method, lambda t=terms: toys.total(t).backward())
    with pytest.warns(UserWarning, match=r"held nothing: .* at step 3 of a task, and this one had 2; set measure_at"):
        method.end_task(TASKS[1])
    state = method.state_dict()
    state["components"]["inf-ssm-exact"] |= {"weight": 5.0, "level": 1.0}
    method.load_state_dict(state)
    method.begin_task(TASKS[2])
    sgd(method, lambda: toys.total(method.loss(toys.batch(TASKS[2]))).backward())
    assert float(method.loss(toys.batch(TASKS[2]))["inf-ssm-exact/distance"].detach()) > 0.0
    method.end_task(TASKS[2])


# torch's own compiler looks at .grad of whatever tensor a graph break hands over.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_compiled_models() -> None:
    """Refused in words as torch compiles by default; measured as any other where it keeps what a backward reads."""
    from torch._functorch import config

    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])

    def measured(call: Callable[[nn.Module], Any]) -> float:
        torch._dynamo.reset()
        torch.manual_seed(0)
        options = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "d_state": 4, "in_chans": 1}
        method = own_loop(
            create_model("vim_nano", num_classes=toys.CLASSES, **options), distance="output", measure_at=2
        )
        toys.nudge(method.module, 0.05)
        run = call(method.module)
        for _ in range(2):
            sgd(method, lambda: (nn.functional.cross_entropy(run(x), y) + method.penalty(x)).backward())
        return weight(method)

    compiled = partial(torch.compile, backend="aot_eager")
    with pytest.raises(ConfigError, match="donated_buffer = False before the compiled model first runs"):
        measured(compiled)
    # Not by monkeypatch: it deletes what it finds in no __dict__, and torch then hides the option from later tests.
    with config.patch(donated_buffer=False):
        assert measured(compiled) == pytest.approx(measured(lambda model: model), rel=1e-3)


def test_a_frozen_backbone_leaves_nothing_to_hold() -> None:
    model = toys.vim()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    method = second_task(model, measure_at=1)
    sgd(method, lambda: toys.total(method.loss(toys.batch(TASKS[1]))).backward())
    assert weight(method) == 0.0


class Keywords(nn.Module):
    """A model that takes keyword arguments and gives its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = toys.model("mamba_nano")
        self.num_classes = toys.CLASSES

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.model(input_ids)
        return SimpleNamespace(
            logits=logits, loss=None if labels is None else nn.functional.cross_entropy(logits, labels)
        )


def test_batches_of_keyword_arguments_in_ones_own_loop() -> None:
    x, y = toys.inputs("mamba_nano"), torch.tensor([0, 1, 0, 1])
    given = {"input_ids": x, "labels": y}
    keyword, plain = Keywords(), toys.model("mamba_nano")
    found = []
    for model, call in ((keyword, lambda: keyword(**given).loss), (plain, lambda: losses(plain, x, y))):
        method = attach(model, "inf-ssm-exact", measure_at=2)
        method.begin_task(0)
        method.end_task(0)
        method.begin_task(1, [given])
        inputs = given if model is keyword else x
        for _ in range(2):
            sgd(method, lambda m=method, c=call, i=inputs: (c() + m.penalty(i)).backward())
        found.append(weight(method))
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] > 0


@pytest.mark.parametrize("done", [FIRST - 1, FIRST, FIRST + 2])
def test_a_restart_goes_on_bit_for_bit(done: int) -> None:
    def steps(method: Method, numbers: range) -> list[float]:
        values = []
        for number in numbers:
            one = toys.batch(TASKS[1], seed=number)
            terms = method.loss(one)
            sgd(method, lambda t=terms: toys.total(t).backward())
            values.append(float(terms["inf-ssm-exact/distance"].detach()))
        return values

    method = second_task()
    steps(method, range(done))
    other = toys.vim()
    other.load_state_dict(method.module.state_dict())
    resumed = build_method(other, "inf-ssm-exact", num_classes=toys.CLASSES, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(method.state_dict()))
    rest = range(done, done + 2 * FIRST)
    assert steps(method, rest) == steps(resumed, rest)
    assert weight(method) == weight(resumed) > 0
