from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from infssm.methods import Method, build_method
from infssm.methods.regularizers.ucl import UCL, inverse_sigma, sigma
from tests.compare import assert_rounding, identical
from tests.methods import toys
from tests.methods.toys import TASKS

BETA, ALPHA, WIDTH = 0.3, 0.7, 0.05
X_PROJ, DT, BIAS, A_LOG = (
    f"layers.0.mixer.{n}" for n in ("x_proj_b.weight", "dt_proj_b.weight", "dt_proj_b.bias", "A_b_log")
)


def build(model: nn.Module, **options: Any) -> tuple[Method, UCL]:
    method = build_method(model, "ucl", beta=BETA, alpha=ALPHA, width=WIDTH, **options)
    (ucl,) = method.regularizers
    assert isinstance(ucl, UCL)
    return method, ucl


def widen(ucl: UCL, seed: int) -> None:
    """Change every width, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in ucl.weights.values():
            weight.rho.add_(0.3 * torch.randn(weight.rho.shape, generator=generator))


def softplus(rho: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(rho))


def rms(row: Tensor) -> float:
    return math.sqrt(float((row**2).mean()))


def second_task(**options: Any) -> tuple[nn.Module, Method, UCL, dict[str, Tensor], dict[str, Tensor]]:
    """A model in its second task, away from the snapshot; with the initial weights and the snapshot by name."""
    model = toys.vim(embed_dim=32)
    method, ucl = build(model, **options)
    initial = copy.deepcopy(dict(model.named_parameters()))
    method.begin_task(TASKS[0])
    toys.nudge(model, seed=1)
    widen(ucl, 2)
    method.end_task(TASKS[0])
    snapshot = {n: p.detach().clone() for n, p in model.named_parameters()}
    snapshot |= {f"{n}/rho": w.rho.detach().clone() for n, w in ucl.weights.items()}
    method.begin_task(TASKS[1])
    toys.nudge(model, seed=3)
    widen(ucl, 4)
    method.context.begin_step(8)
    return model, method, ucl, {n: p.detach() for n, p in initial.items()}, snapshot


def sigma_init(initial: dict[str, Tensor], name: str, unit: int) -> float:
    return WIDTH * rms(initial[name][unit])


def test_mean_term_by_loops() -> None:
    model, _, ucl, initial, old = second_task()

    def strength(name: str, unit: int) -> float:
        return sigma_init(initial, name, unit) / float(softplus(old[f"{name}/rho"][unit, 0]))

    expected = 0.0
    for name, parameter in model.named_parameters():
        weight = name.replace("dt_proj.bias", "dt_proj.weight").replace("dt_proj_b.bias", "dt_proj_b.weight")
        if weight not in ucl.weights:
            continue
        for index in torch.cartesian_prod(torch.arange(len(parameter)), torch.arange(parameter[0].numel())).tolist():
            i, j = index
            held = strength(weight, i)
            if "dt_proj" in name and name == weight:  # input j of dt_proj is unit j of x_proj
                held = max(held, strength(name.replace("dt_proj", "x_proj"), j))
            moved = float(parameter[i].detach().flatten()[j] - old[name][i].flatten()[j])
            expected += (held * moved) ** 2
    torch.testing.assert_close(float(ucl.penalty(None)["mean"].detach()), expected / (2 * 8))
    assert {n.rpartition(".mixer.")[2] for n in ucl.biases} == {"dt_proj.bias", "dt_proj_b.bias"}


def test_magnitude_term_by_loops() -> None:
    model, _, ucl, initial, old = second_task()
    expected = 0.0
    for name, parameter in model.named_parameters():
        weight = name.replace("dt_proj.bias", "dt_proj.weight").replace("dt_proj_b.bias", "dt_proj_b.weight")
        if weight not in ucl.weights:
            continue
        for i in range(len(parameter)):
            s0, s = sigma_init(initial, weight, i), float(softplus(old[f"{weight}/rho"][i, 0]))
            row = old[name][i].flatten() ** 2 / s**2 * (parameter.detach()[i] - old[name][i]).flatten()
            expected += s0**2 * float(row.abs().sum())
    torch.testing.assert_close(float(ucl.penalty(None)["magnitude"].detach()), expected / 8)


def test_width_term_by_loops() -> None:
    _, _, ucl, _, old = second_task()
    expected = 0.0
    for name, weight in ucl.weights.items():
        for new, before in zip(weight.rho.detach().flatten(), old[f"{name}/rho"].flatten(), strict=True):
            variance, ratio = float(softplus(new)) ** 2, (float(softplus(new)) / float(softplus(before))) ** 2
            expected += ratio - math.log(ratio) + variance - math.log(variance)
    torch.testing.assert_close(float(ucl.penalty(None)["width"].detach()), BETA / 16 * expected)


def test_rows_outside_the_set_are_free() -> None:
    model, _, ucl, _, _ = second_task(params="AC-direct")
    sum(ucl.penalty(None).values()).backward()
    weight = model.layers[0].mixer.x_proj.weight
    rank, n = 2, 4
    assert not weight.grad[rank : rank + n].any()
    assert weight.grad[:rank].all()
    assert weight.grad[rank + n :].all()
    rho = ucl.weights["layers.0.mixer.x_proj.weight"].rho
    assert not rho.grad[rank : rank + n].any()
    assert rho.grad[rank + n :].all()


def test_first_task_is_plain_unless_asked() -> None:
    model = toys.vim()
    method, ucl = build(model)
    plain = copy.deepcopy(model)
    method.begin_task(TASKS[0])
    batch = toys.batch(TASKS[0])
    model.train()
    assert_rounding(model(batch.x), plain(batch.x))  # no sampling
    assert set(method.loss(batch)) == {"ce"}

    method, ucl = build(model, first_task=True)
    method.begin_task(TASKS[0])
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    toys.nudge(model)
    terms = method.loss(batch)
    assert set(terms) == {"ce", "ucl/mean", "ucl/width"}
    held = {name: (weight.mean, weight.mask) for name, weight in ucl.weights.items()}
    held |= {name: (bias.value, bias.mask) for name, bias in ucl.biases.items()}
    moved = sum((mask * (value.detach() - start[name])).square().sum() for name, (value, mask) in held.items())
    torch.testing.assert_close(terms["ucl/mean"].detach(), ALPHA / (2 * 4) * moved)


def test_training_samples_around_the_mean_and_evaluation_is_the_mean() -> None:
    model, _, ucl, _, _ = second_task()
    x = toys.batch(TASKS[1]).x
    plain = toys.vim(embed_dim=32)
    plain.load_state_dict(model.state_dict())
    model.eval()
    assert_rounding(model(x), plain(x))

    model.train()
    torch.manual_seed(5)
    sampled = model(x)
    torch.manual_seed(5)
    draws = {}
    for name, weight in ucl.weights.items():  # mixers run in order, and so do their weights
        draws[name] = torch.randn_like(weight.mean)
    weights = {n: w.mean + softplus(w.rho) * draws[n] for n, w in ucl.weights.items()}
    expected = functional_call(plain, {**dict(plain.named_parameters()), **weights}, (x,))
    torch.testing.assert_close(sampled, expected)
    assert not torch.allclose(sampled, model(x)), "every forward draws afresh"

    name = A_LOG
    loss = functional_call(plain, {**dict(plain.named_parameters()), **weights}, (x,)).square().sum()
    (by_hand,) = torch.autograd.grad(loss, weights[name])
    torch.manual_seed(5)
    model.zero_grad()
    model(x).square().sum().backward()
    mean, rho = ucl.weights[name].mean, ucl.weights[name].rho
    torch.testing.assert_close(mean.grad, by_hand)
    torch.testing.assert_close(rho.grad, (by_hand * draws[name]).sum(1, keepdim=True) * torch.sigmoid(rho.detach()))


def test_the_model_keeps_its_names_and_its_parameters() -> None:
    model = toys.vim()
    names, parameters = list(model.state_dict()), list(model.parameters())
    method, _ = build(model)
    method.begin_task(TASKS[1])
    model.train()
    with pytest.raises(Exception, match=r"shape|size|expand|images of"):
        model(torch.zeros(2, 3, 8, 8).double())
    model(toys.batch(TASKS[1]).x)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_means_come_back_when_a_forward_fails() -> None:
    model = toys.vim()
    method, _ = build(model)
    method.begin_task(TASKS[1])
    mixer = model.layers[0].mixer
    a_log = mixer.A_log
    mixer.train()
    with pytest.raises(RuntimeError):
        mixer(torch.zeros(2, 5, 3).double())
    assert mixer.A_log is a_log


def test_copies_sample_by_themselves() -> None:
    model, _, ucl, _, _ = second_task()
    twin = copy.deepcopy(model).train()
    x = toys.batch(TASKS[1]).x
    torch.manual_seed(1)
    ours = model.train()(x)
    torch.manual_seed(1)
    theirs = twin(x)
    assert_rounding(ours, theirs)
    theirs.sum().backward()
    assert all(w.rho.grad is None for w in ucl.weights.values())
    with torch.no_grad():
        for weight in ucl.weights.values():
            weight.rho.fill_(-30.0)
    torch.manual_seed(1)
    assert identical(twin(x), theirs)


def test_widths_have_a_parameter_group_of_their_own() -> None:
    model = toys.vim()
    method, ucl = build(model, rho_lr_scale=4.0)
    groups = method.param_groups([{"params": list(model.parameters()), "weight_decay": 0.1, "lr": 0.01}])
    assert groups[0]["weight_decay"] == 0.1
    assert groups[1]["weight_decay"] == 0.0
    assert groups[1]["lr_scale"] == 4.0
    assert groups[1]["lr"] == pytest.approx(0.04)
    assert {id(p) for p in groups[1]["params"]} == {id(w.rho) for w in ucl.weights.values()}
    torch.optim.AdamW(groups, lr=1.0)


@pytest.mark.parametrize("name", list(toys.MODELS))
def test_every_model_can_be_sampled(name: str) -> None:
    model = toys.model(name)
    method = build_method(model, "ucl", params="ABC-full")
    (ucl,) = method.regularizers
    method.begin_task(1)
    x = toys.inputs(name)
    model.train()
    assert not torch.allclose(model(x), model(x))
    model(x).square().sum().backward()
    assert all(w.rho.grad is not None and w.rho.grad.any() for w in ucl.weights.values())
    model.eval()
    assert identical(model(x), model(x))


def test_resume_continues_the_same_draws_and_terms() -> None:
    model, method, _, _, _ = second_task()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "method": method.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = toys.vim(embed_dim=32, seed=9)
    other.load_state_dict(saved["model"])
    resumed, _ = build(other)
    resumed.load_state_dict(saved["method"])
    batch = toys.batch(TASKS[1])
    results = []
    for one in (method, resumed):
        one.module.train()
        torch.manual_seed(3)
        results.append(one.loss(batch))
    assert results[0].keys() == results[1].keys()
    assert all(identical(results[0][k], results[1][k]) for k in results[0])


def test_sigma_and_its_inverse() -> None:
    widths = torch.tensor([1e-8, 1e-5, 0.02, 1.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(sigma(inverse_sigma(widths)), widths, rtol=1e-9, atol=0)
    assert float(sigma(torch.tensor(-1e4))) > 0
