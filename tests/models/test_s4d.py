"""S4D against a direct summation of its kernel and against the recurrence it stands for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from infssm.models import S4DMixer, create_model
from infssm.models.s4d import S4DKernel
from tests.compare import identical
from tests.models.small import scramble


def discretize(mixer: S4DMixer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Discrete (a, b, c) of all n states, conjugates included, in complex128."""
    kernel = mixer.kernel
    dt = kernel.log_dt.double().exp()[:, None]
    a = torch.complex(-kernel.log_A_real.double().exp(), kernel.A_imag.double())
    if kernel.discretization == "zoh":
        bar, factor = torch.exp(dt * a), (torch.exp(dt * a) - 1) / a
    else:
        bar, factor = (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)
    c = torch.view_as_complex(kernel.C.double())
    return tuple(torch.cat((half, half.conj()), dim=-1) for half in (bar, factor, c))


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_layer_equals_the_kernel_summed_directly_and_the_recurrence(discretization):
    mixer = S4DMixer(6, d_state=8, discretization=discretization)
    scramble(mixer)
    u = torch.randn(2, 13, 6)
    a, b, c = discretize(mixer)
    kernel = torch.stack([(c * b * a**t).sum(-1).real for t in range(13)], dim=-1)
    torch.testing.assert_close(mixer.kernel(13).double(), kernel, rtol=1e-4, atol=1e-5)
    state = torch.zeros(2, 6, 8, dtype=torch.complex128)
    outputs = []
    for t in range(13):
        state = a * state + b * u[:, t, :, None].double()
        summed = sum(kernel[:, t - s] * u[:, s].double() for s in range(t + 1))
        y = (c * state).sum(-1)
        torch.testing.assert_close(y.real, summed)
        assert y.imag.abs().max() < 1e-10
        outputs.append(y.real + mixer.D.double() * u[:, t])
    y = F.gelu(torch.stack(outputs, dim=1))
    projection = mixer.output_linear[0]
    y = y @ projection.weight[..., 0].double().T + projection.bias.double()
    expected = y[..., :6] * torch.sigmoid(y[..., 6:])
    torch.testing.assert_close(mixer(u).double(), expected, rtol=1e-4, atol=1e-5)


def test_model_is_a_stack_of_residual_layers_with_norms():
    model = create_model("s4d_nano", d_model=8, n_layer=2, d_state=4, in_dim=3, num_classes=5)
    scramble(model, 0.1)
    x = torch.randn(2, 7, 3)
    hidden = x @ model.encoder.weight.T + model.encoder.bias
    prenorm = hidden
    for layer, norm in zip(model.s4_layers, model.norms, strict=True):
        hidden = F.layer_norm(hidden + layer(hidden), (8,), norm.weight, norm.bias)
        prenorm = prenorm + layer(F.layer_norm(prenorm, (8,), norm.weight, norm.bias))
    torch.testing.assert_close(model(x), hidden.mean(1) @ model.head.weight.T + model.head.bias)
    model.prenorm = True
    torch.testing.assert_close(model.forward_features(x), prenorm)


def test_checkpoints_of_the_public_example_load(tmp_path):
    layer = {
        "D": (128,), "kernel.C": (128, 32, 2), "kernel.log_dt": (128,), "kernel.log_A_real": (128, 32),
        "kernel.A_imag": (128, 32), "output_linear.0.weight": (256, 128, 1), "output_linear.0.bias": (256,),
    }  # fmt: skip
    shapes = {"encoder.weight": (128, 3), "encoder.bias": (128,), "decoder.weight": (10, 128), "decoder.bias": (10,)}
    for i in range(4):
        shapes |= {f"s4_layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes |= {f"norms.{i}.weight": (128,), f"norms.{i}.bias": (128,)}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    torch.save({"model": state, "acc": 88.0}, tmp_path / "ckpt.pth")
    model = create_model("s4d_base", weights=tmp_path / "ckpt.pth")
    assert identical(model.head.weight, state["decoder.weight"])
    assert identical(model.s4_layers[3].kernel.C, state["s4_layers.3.kernel.C"])
    assert len(model.state_dict()) == len(state)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17, 30])
def test_kernel_of_any_length_is_the_sum_of_powers(tokens):
    """Powers come from two short tables: lengths below, at and above squares, and gradients through both tables."""
    torch.manual_seed(3)
    kernel = S4DMixer(3, d_state=6).double().kernel
    a, factor = kernel.discretize()
    direct = torch.stack([2 * (kernel.complex_c() * factor * a**t).sum(-1).real for t in range(tokens)], dim=-1)
    torch.testing.assert_close(kernel(tokens), direct, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(direct)
    parameters = list(kernel.parameters())
    ours = torch.autograd.grad((kernel(tokens) * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad((direct * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def public_kernel(mixer: S4DMixer, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The kernel by the formula of state-spaces/s4: exponents from delta A, not from the logarithm of exp(delta A)."""
    own = mixer.kernel
    dt, c = own.log_dt.to(dtype).exp(), torch.view_as_complex(own.C.to(dtype))
    a = torch.complex(-own.log_A_real.to(dtype).exp(), own.A_imag.to(dtype))
    scaled = a * dt[:, None]
    powers = torch.exp(scaled[..., None] * torch.arange(tokens, dtype=dtype))
    return 2 * torch.einsum("hn,hnt->ht", c * (torch.exp(scaled) - 1) / a, powers).real


@pytest.mark.parametrize("dt", [1e-3, 1e-2, 1e-1])
def test_kernel_is_as_exact_as_the_public_one(dt: float) -> None:
    mixer = S4DMixer(16, d_state=64)
    with torch.no_grad():
        mixer.kernel.log_dt.fill_(math.log(dt))
        exact = public_kernel(mixer, 1024, torch.float64)
        errors = [
            float((kernel.double() - exact).abs().max())
            for kernel in (mixer.kernel(1024), public_kernel(mixer, 1024, torch.float32))
        ]
    # both round an exponent once and add up 32 terms
    assert errors[0] <= 2 * errors[1] + 64 * torch.finfo(torch.float32).eps * float(exact.abs().max()), errors


def test_bilinear_kernel_keeps_its_digits() -> None:
    mixer = S4DMixer(16, d_state=64, discretization="bilinear")
    with torch.no_grad():
        mixer.kernel.log_dt.fill_(math.log(1e-3))
        exact = copy.deepcopy(mixer).double().kernel(1024)
        error = float((mixer.kernel(1024).double() - exact).abs().max() / exact.abs().max())
    assert error < 32 * 100 * torch.finfo(torch.float32).eps  # 32 terms, exponents up to 100


def test_kernel_is_kept_in_evaluation_until_a_parameter_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = S4DMixer(4, d_state=8).eval()
    built: list[int] = []
    build = S4DKernel.forward
    monkeypatch.setattr(S4DKernel, "forward", lambda self, tokens: built.append(tokens) or build(self, tokens))
    u = torch.randn(2, 9, 4)
    with torch.no_grad():
        first, second = mixer(u), mixer(u)
    assert built == [9]
    assert identical(first, second)
    torch.testing.assert_close(mixer(u).detach(), first)  # with gradients: built for them
    with torch.no_grad():
        mixer(u)
        mixer(u[:, :5])
        mixer.kernel.C.data.mul_(2)  # no version counter sees this
        changed = mixer(u[:, :5])
    assert built == [9, 9, 9, 5, 5]
    torch.testing.assert_close(changed, mixer(u[:, :5]).detach())
    with torch.no_grad():
        mixer(u)
        assert copy.deepcopy(mixer).kernel._kept is None
        mixer.train()(u)
    assert mixer.kernel._kept is None
    mixer.eval()(u).sum().backward()
    assert mixer.kernel.C.grad is not None
