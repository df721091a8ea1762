"""`lwf` and `lwf-f` against their equations, written out one number at a time."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import ModelPair, Regularizer, TaskInfo, attach, build_method
from infssm.methods.regularizers.lwf import kl_divergence, mean_over_tokens
from infssm.ssm import Observation, OldModel
from tests.methods import toys
from tests.methods.test_conformance import start
from tests.methods.toys import TASKS
from tests.ssm import hf


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kl_by_hand(old: list[float], new: list[float], temperature: float) -> float:
    p, q = ([math.exp(z / temperature) for z in row] for row in (old, new))
    p, q = [a / sum(p) for a in p], [b / sum(q) for b in q]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def moved(name: str, **options: object) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Tensor]:
    """Old model, new model, the method's terms on a batch of the second task, and its images."""
    model = toys.vim()
    method = build_method(model, name, **options)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1])
    old = copy.deepcopy(model)
    toys.nudge(model, 0.05)
    batch = toys.batch(TASKS[1])
    return old, model, method.loss(batch), batch.x


def features(model: nn.Module, x: Tensor) -> Tensor:
    return model.forward_head(model.forward_features(x), pre_logits=True)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_lwf_is_the_divergence_over_past_classes(temperature: float) -> None:
    old, new, terms, x = moved("lwf", weight=0.7, temperature=temperature)
    rows = zip(old(x)[:, :2].tolist(), new(x)[:, :2].tolist(), strict=True)
    expected = 0.7 * sum(kl_by_hand(a, b, temperature) for a, b in rows) / len(x)
    assert expected > 0
    assert float(terms["lwf/logits"].detach()) == pytest.approx(expected, rel=1e-8)


def test_lwf_f_is_the_mean_squared_difference_or_the_cosine() -> None:
    for distance in ("mse", "cosine"):
        old, new, terms, x = moved("lwf-f", weight=3.0, distance=distance)
        pairs = list(zip(features(old, x).tolist(), features(new, x).tolist(), strict=True))
        if distance == "mse":
            each = [sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) / len(pair[0]) for pair in pairs]
        else:
            lengths = [math.prod(math.hypot(*f) for f in pair) for pair in pairs]
            dots = [sum(a * b for a, b in zip(*pair, strict=True)) for pair in pairs]
            each = [1 - dot / length for dot, length in zip(dots, lengths, strict=True)]
        assert sum(each) > 0
        assert float(terms["lwf-f/features"].detach()) == pytest.approx(3.0 * sum(each) / len(x), rel=1e-8)


@pytest.mark.parametrize("name", ["lwf", "lwf-f"])
def test_penalty_and_gradient_are_zero_at_the_old_model(name: str) -> None:
    model = toys.vim()
    method = attach(model, name)
    method.begin_task(1)
    x = toys.batch(TASKS[1]).x
    model(x)
    penalty = method.penalty(x)
    penalty.backward()
    assert abs(float(penalty.detach())) < 1e-14
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-12 for p in model.parameters())


def test_gradients_of_the_divergence_and_the_distances() -> None:
    old, new = normal(3, 5), normal(3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: kl_divergence(old, z, 2.0), new)
    for distance in ("mse", "cosine"):
        method = build_method(toys.vim(), "lwf-f", distance=distance)
        (regularizer,) = method.regularizers

        def penalty(z: Tensor, regularizer: Regularizer = regularizer) -> Tensor:
            return regularizer.penalty(ModelPair(Observation([], old), Observation([], z)))["features"]

        assert torch.autograd.gradcheck(penalty, new)


@pytest.mark.parametrize("name", ["lwf", "lwf-f", "lwf+lwf-f+inf-ssm-exact"])
def test_the_gradient_through_a_whole_model(name: str) -> None:
    model = toys.vim()
    options = {"inf-ssm-exact.weight": 2.0} if "inf" in name else {}
    method = attach(model, name, **options)
    method.begin_task(TASKS[1])
    toys.nudge(model, 0.05)
    x, parameters = toys.batch(TASKS[1]).x, [p for p in model.parameters() if p.requires_grad]

    def penalty() -> Tensor:
        model(x)
        return method.penalty(x)

    found = torch.autograd.grad(penalty(), parameters, allow_unused=True, materialize_grads=True)
    begin = [p.detach().clone() for p in parameters]
    direction = [normal(*p.shape, seed=i) for i, p in enumerate(parameters)]
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            for p, s, d in zip(parameters, begin, direction, strict=True):
                p.copy_(s + step * d)
        values.append(float(penalty().detach()))
    expected = (values[0] - values[1]) / 2e-5
    assert abs(expected) > 0
    assert float(sum((g * d).sum() for g, d in zip(found, direction, strict=True))) == pytest.approx(expected, rel=1e-5)


def test_past_classes() -> None:
    assert TaskInfo(2, range(4, 6)).past_classes == slice(0, 4)
    assert TaskInfo(2, range(6), past=4).past_classes == slice(0, 4), "new samples of known classes"
    assert TaskInfo(2).past_classes == slice(None)
    assert TaskInfo(2, range(6)).past_classes == slice(None), "a stream of domains: all tasks share the classes"


def test_padding_is_left_out() -> None:
    values, mask = normal(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = (values[0, 0] + values[0, 1] + values[1, 0]) / 3
    torch.testing.assert_close(mean_over_tokens(values, mask), expected)
    torch.testing.assert_close(mean_over_tokens(values[:, 0], mask), values[:, 0].mean())


@pytest.mark.parametrize("name", ["lwf", "lwf-f"])
def test_language_models_per_token_without_padding(name: str) -> None:
    model = hf.make("mamba").double()
    method = attach(model, name, weight=1.0)
    method.begin_task(1)
    old = copy.deepcopy(model)
    toys.nudge(model, 0.05)
    ids = hf.tokens(batch=3)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    model(**batch)
    found = float(method.penalty(batch).detach())
    keep = mask.bool()
    if name == "lwf":
        pairs = [m(input_ids=ids, attention_mask=mask).logits[keep].tolist() for m in (old, model)]
        each = [kl_by_hand(a, b, 2.0) for a, b in zip(*pairs, strict=True)]
    else:
        hidden = [m.backbone(ids, attention_mask=mask).last_hidden_state[keep] for m in (old, model)]
        each = (hidden[0] - hidden[1]).square().mean(dim=-1).tolist()
    assert found == pytest.approx(sum(each) / int(mask.sum()), rel=1e-6)
    assert found > 0


def test_the_old_model_stops_where_its_features_are_known() -> None:
    model = toys.vim()
    old = OldModel(model)
    ran: list[str] = []
    old.module.head.register_forward_hook(lambda *_: ran.append("head"))
    x = toys.batch(TASKS[1]).x
    seen = old.observe(x, states=False, features=True)
    assert not ran
    torch.testing.assert_close(seen.features, features(model, x), rtol=1e-9, atol=1e-12)
    both = old.observe(x, states=True, features=True, logits=True)
    assert ran == ["head"]
    torch.testing.assert_close(both.logits, model(x), rtol=1e-9, atol=1e-12)
    assert len(both.states) == len(old.states(x)) == 4


def test_models_without_state_space_layers_can_be_distilled() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).tanh())

    model = Plain()
    method = attach(model, "lwf+lwf-f")
    method.begin_task(1)
    toys.nudge(model, 0.1)
    x = torch.randn(5, 3)
    model(x)
    assert float(method.penalty(x).detach()) > 0


def test_a_forgotten_forward_is_named() -> None:
    model = toys.vim()
    method = attach(model, "lwf")
    method.begin_task(1)
    x = toys.batch(TASKS[1]).x
    with pytest.raises(ConfigError, match="call penalty"):
        method.penalty(x)
    model(x)
    with pytest.raises(ConfigError, match="4 rows, the penalty is asked for 2"):
        method.penalty(x[:2])


@pytest.mark.parametrize("base", ["seq", "er", "der", "der++", "lucir", "x-der", "l2p-r", "clfd"])
def test_every_base_can_be_distilled(base: str) -> None:
    method = start(f"{base}+lwf+lwf-f")
    assert method.needs_old
