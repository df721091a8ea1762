"""`fraction`: the penalty on a random part of each batch, the old model on those rows alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Method, attach, build_method
from infssm.methods.core.context import num_rows, take_rows
from infssm.ssm import OldModel
from tests.methods import toys
from tests.methods.test_conformance import batch, begin, optimizer_of, run, start, step
from tests.methods.toys import TASKS
from tests.ssm import hf

COMPARING = ["inf-ssm", "inf-ssm+", "inf-ssm-exact", "lwf-ac", "lwf-abc", "lwf", "lwf-f"]
FIXED: dict[str, dict[str, Any]] = {"inf-ssm-exact": {"weight": 1.0}}


def second_task(name: str, model: nn.Module | None = None, **options: Any) -> Method:
    method = build_method(model or toys.vim(), name, num_classes=toys.CLASSES, **FIXED.get(name, {}), **options)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1])
    toys.nudge(method.module, 0.05)
    return method


def drawn(method: Method, count: int) -> Tensor:
    """The order of rows that the next step will draw."""
    twin = torch.Generator()
    twin.set_state(method.context.generator.get_state())
    return torch.randperm(count, generator=twin)


@pytest.fixture
def old_inputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What old models are run on."""
    calls: list[Any] = []
    original = OldModel.observe
    monkeypatch.setattr(OldModel, "observe", lambda self, x, **kw: calls.append(x) or original(self, x, **kw))
    return calls


@pytest.mark.parametrize("name", COMPARING)
def test_the_penalty_is_that_of_the_drawn_rows(name: str, old_inputs: list[Any]) -> None:
    method, whole = second_task(name, fraction=0.4), second_task(name)
    one = toys.batch(TASKS[1], 6)
    rows = drawn(method, 6)[:3]  # 0.4 of 6, rounded up
    found = method.loss(one)
    (x,) = old_inputs
    assert torch.equal(x, one.x[rows])
    expected = whole.loss(type(one)(one.x[rows], one.y[rows]))
    for key in found:
        if key != "ce":
            torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-12)
    assert any(float(v.detach()) > 0 for key, v in found.items() if key != "ce")


@pytest.mark.parametrize("name", COMPARING)
def test_the_gradient_is_that_of_the_drawn_rows(name: str) -> None:
    method, whole = second_task(name, fraction=0.5), second_task(name)
    one = toys.batch(TASKS[1], 6)
    rows = drawn(method, 6)[:3]
    gradients = []
    for m, part in ((method, one), (whole, type(one)(one.x[rows], one.y[rows]))):
        terms = m.loss(part)
        penalty = toys.total({k: v for k, v in terms.items() if k != "ce"})
        parameters = list(m.module.parameters())
        gradients.append(torch.autograd.grad(penalty, parameters, allow_unused=True, materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7 * float(b.abs().max()) + 1e-18)


def test_all_regularizers_share_one_forward_and_nested_rows(old_inputs: list[Any]) -> None:
    options = {"lwf.fraction": 0.5, "lwf-ac.fraction": 0.25, "lwf-f.fraction": 0.5}
    method = second_task("lwf+lwf-ac+lwf-f", **options)
    one = toys.batch(TASKS[1], 8)
    rows = drawn(method, 8)
    found = method.loss(one)
    (x,) = old_inputs
    assert torch.equal(x, one.x[rows[:4]])
    for name, count in (("lwf", 4), ("lwf-f", 4), ("lwf-ac", 2)):
        terms = second_task(name).loss(type(one)(one.x[rows[:count]], one.y[rows[:count]]))
        for key in terms.keys() - {"ce"}:
            torch.testing.assert_close(found[key], terms[key], rtol=1e-9, atol=1e-12)


def test_a_whole_batch_beside_a_part_of_it(old_inputs: list[Any]) -> None:
    method = second_task("lwf+lwf-ac", **{"lwf-ac.fraction": 0.25})
    one = toys.batch(TASKS[1], 8)
    rows = drawn(method, 8)[:2]
    found = method.loss(one)
    assert torch.equal(old_inputs[0], one.x)
    part = second_task("lwf-ac").loss(type(one)(one.x[rows], one.y[rows]))
    whole = second_task("lwf").loss(one)
    torch.testing.assert_close(found["lwf-ac/a"], part["lwf-ac/a"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["lwf/logits"], whole["lwf/logits"], rtol=1e-9, atol=1e-12)


def test_without_a_fraction_nothing_is_drawn() -> None:
    method = second_task("lwf-ac")
    before = method.context.generator.get_state()
    method.loss(toys.batch(TASKS[1]))
    assert torch.equal(method.context.generator.get_state(), before)


def test_draws_follow_the_seed_and_differ_from_step_to_step(old_inputs: list[Any]) -> None:
    one = toys.batch(TASKS[1], 8)
    for seed in (0, 0, 1):
        method = second_task("lwf-ac", fraction=0.25, seed=seed)
        for _ in range(3):
            method.loss(one)
    draws = [x.flatten(1).tolist() for x in old_inputs]
    assert draws[:3] == draws[3:6]
    assert draws[:3] != draws[6:]
    assert any(draws[0] != later for later in draws[1:3])


@pytest.mark.parametrize("name", ["er+lwf-ac+lwf+lwf-f", "l2p-r+inf-ssm-exact", "clfd+lwf-ac"])
def test_a_saved_state_gives_the_identical_next_steps(name: str) -> None:
    fractions = {f"{part}.fraction": 0.5 for part in name.split("+")[1:]}
    method = start(name, **fractions)
    run(method, TASKS[0])
    optimizer = begin(method, TASKS[1])
    method.begin_epoch(0, 1)
    step(method, optimizer, batch(TASKS[1], 0))
    file = io.BytesIO()
    torch.save([method.module.state_dict(), method.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
    expected = [step(method, optimizer, batch(TASKS[1], seed)) for seed in (1, 2)]
    file.seek(0)
    module, state, moments, rng = torch.load(file, weights_only=True)
    resumed = start(name, seed=5, **fractions)
    resumed.load_state_dict(state)
    resumed.module.load_state_dict(module)
    optimizer = optimizer_of(resumed)
    optimizer.load_state_dict(moments)
    torch.set_rng_state(rng)
    found = [step(resumed, optimizer, batch(TASKS[1], seed)) for seed in (1, 2)]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_keyword_inputs_and_masks_are_cut(old_inputs: list[Any]) -> None:
    model = hf.make("mamba").double()
    method = attach(model, "lwf", fraction=0.5)
    method.begin_task(1)
    toys.nudge(model, 0.05)
    ids = hf.tokens(batch=4)
    mask = torch.ones_like(ids)
    mask[1:, -3:] = 0
    rows = drawn(method, 4)[:2]
    values = {"input_ids": ids, "attention_mask": mask}
    model(**values)
    found = method.penalty(values)
    assert torch.equal(old_inputs[0]["input_ids"], ids[rows])
    assert torch.equal(old_inputs[0]["attention_mask"], mask[rows])
    assert float(found.detach()) > 0


def test_states_that_do_not_depend_on_the_input_stay(old_inputs: list[Any]) -> None:
    model = toys.model("s4d_nano")
    method = second_task("lwf-ac", model, fraction=0.5)
    x = toys.inputs("s4d_nano", 4)
    method.context.forward(x)
    pair = method.context.compare([0.5])
    assert len(old_inputs[0]) == 2
    assert all(o.a.shape == n.a.shape for o, n in zip(pair.old.states, pair.new.states, strict=True))


def test_shares_and_rows() -> None:
    assert [num_rows(0.25, n) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert num_rows(1.0, 7) == 7
    assert num_rows(0.55, 100) == 55, "55.00000000000001 rows are 55"
    values = {"x": torch.arange(6).view(3, 2), "flag": True, "table": torch.zeros(4), "scale": torch.tensor(2.0)}
    taken = take_rows(values, torch.tensor([2, 0]), 3)
    assert taken["x"].tolist() == [[4, 5], [0, 1]]
    assert taken["flag"] is True
    assert taken["table"].shape == (4,)
    assert taken["scale"].ndim == 0


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        build_method(toys.vim(), "lwf-ac", fraction=fraction)
