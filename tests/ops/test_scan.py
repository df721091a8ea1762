"""The selective scan: every backend against float64, against a loop in NumPy, and its contract."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import ScanStates, mean_states, selective_scan
from tests.compare import identical
from tests.ops.cases import OPTIONAL, ScanCase, assert_equivalent, assert_near, flatten, scan_cases

ALL = frozenset(OPTIONAL)
FULL = ScanCase(2, 29, 40, 16, options=ALL, states="zoh")


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=scan_cases())
def test_equals_float64_reference(backend: str, case: ScanCase) -> None:
    assert_equivalent(selective_scan, case.tensors(), backend=backend, **case.settings())


@pytest.mark.parametrize(
    "case",
    [
        ScanCase(1, 1, 1, 1),
        ScanCase(2, 24, 64, 16, options=ALL),
        ScanCase(1, 13, 97, 5, options=ALL, reverse=True, states="zoh"),
        ScanCase(3, 300, 33, 64, options=frozenset({"z"})),
        ScanCase(2, 25, 96, 4, groups=3, options=ALL, reverse=True),
        ScanCase(2, 40, 48, 16, scalar=True, options=ALL),
        ScanCase(1, 7, 4, 256, options=ALL),
        ScanCase(16, 5, 130, 3, states=False, softplus=False),
    ],
)
def test_equals_float64_reference_at_the_edges(backend: str, case: ScanCase) -> None:
    assert_equivalent(selective_scan, case.tensors(), backend=backend, **case.settings())


def numpy_scan(case: ScanCase) -> tuple[np.ndarray, ...]:
    """The definition, one number at a time."""
    x = {name: tensor.double().numpy() for name, tensor in case.tensors().items()}
    u, delta, A = x["u"], x["delta"] + x.get("delta_bias", 0.0), x["A"]
    delta = np.log1p(np.exp(delta)) if case.softplus else delta
    B, C = (x[name] if case.groups else x[name][:, :, None] for name in ("B", "C"))
    size = case.channels // (case.groups or 1)
    y = np.zeros_like(u)
    last = x.get("initial_state", np.zeros((case.batch, case.channels, case.n))).copy()
    a = np.zeros((case.batch, case.tokens, case.groups or 1, case.n))
    order = range(case.tokens)[:: -1 if case.reverse else 1]
    for b in range(case.batch):
        for c in range(case.channels):
            for t in order:
                for j in range(case.n):
                    abar = np.exp(delta[b, t, c] * A[c, j])
                    a[b, t, c // size, j] += abar / size
                    last[b, c, j] = abar * last[b, c, j] + delta[b, t, c] * u[b, t, c] * B[b, t, c // size, j]
                    y[b, t, c] += C[b, t, c // size, j] * last[b, c, j]
                y[b, t, c] += x["D"][c] * u[b, t, c] if "D" in x else 0.0
                if "z" in x:
                    y[b, t, c] *= x["z"][b, t, c] / (1 + np.exp(-x["z"][b, t, c]))
    mean = delta.reshape(case.batch, case.tokens, case.groups or 1, size).mean(-1)
    return (y, last, a, mean) if case.groups else (y, last, a[:, :, 0], mean[:, :, 0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_equals_a_loop_in_numpy(backend: str, reverse: bool, groups: int | None) -> None:
    case = ScanCase(2, 15, 6, 3, groups=groups, reverse=reverse, options=ALL)
    outputs = flatten(selective_scan(**case.tensors(), **case.settings(), backend=backend))
    for i, (output, expected) in enumerate(zip(outputs, numpy_scan(case), strict=True)):
        assert_near(output, torch.from_numpy(expected), 1e-5, f"output {i}")


def test_reference_passes_gradcheck() -> None:
    for reverse in (False, True):
        case = ScanCase(1, 18, 4, 2, groups=2, reverse=reverse, options=ALL, states="zoh")
        names, tensors = zip(*case.tensors().items(), strict=True)

        def function(*values: Tensor, names=names, case=case) -> tuple[Tensor, ...]:
            return tuple(flatten(selective_scan(**dict(zip(names, values, strict=True)), **case.settings())))

        inputs = [tensor.double().clone().requires_grad_() for tensor in tensors]
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_reads_strided_inputs(backend: str) -> None:
    case = ScanCase(2, 20, 24, 8, options=ALL)
    tensors = case.tensors()
    wide = torch.cat([tensors["u"], tensors["z"]], dim=-1)
    strided = {
        **tensors,
        "u": wide[..., :24],
        "z": wide[..., 24:],
        "delta": tensors["delta"].mT.contiguous().mT,
        "B": torch.stack([tensors["B"], tensors["C"]], dim=-1)[..., 0],
        "A": tensors["A"].T.contiguous().T,
        "D": torch.stack([tensors["D"], tensors["D"]], dim=-1)[:, 0],
    }
    expected = flatten(selective_scan(**tensors, **case.settings(), backend=backend))
    actual = flatten(selective_scan(**strided, **case.settings(), backend=backend))
    for i, pair in enumerate(zip(actual, expected, strict=True)):
        assert_near(*pair, 1e-6, f"output {i}")
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (tensors["u"], tensors["z"])]
    y = selective_scan(**{**tensors, "u": leaves[0], "z": leaves[1]}, delta_softplus=True, backend=backend)
    contiguous = torch.autograd.grad(y, leaves, torch.ones_like(y))
    expanded = torch.autograd.grad(
        selective_scan(**{**tensors, "u": leaves[0], "z": leaves[1]}, delta_softplus=True, backend=backend).sum(),
        leaves,
    )
    for left, right in zip(contiguous, expanded, strict=True):
        assert_near(left, right, 1e-6, "gradient from an expanded tensor")


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4)])
def test_takes_empty_inputs(backend: str, shape: tuple[int, int, int]) -> None:
    case = ScanCase(*shape, 3, options=ALL, states="zoh")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.tensors().items()}
    y, last, states = selective_scan(**leaves, **case.settings(), backend=backend)
    assert y.shape == shape
    assert states.a.shape == (*shape[:2], 3)
    assert identical(last, leaves["initial_state"])
    grads = torch.autograd.grad(y.sum() + states.a.sum(), [leaves["u"], leaves["A"]], materialize_grads=True)
    assert [grad.shape for grad in grads] == [leaves["u"].shape, leaves["A"].shape]
    assert not grads[1].any()


def test_threads_do_not_change_the_result() -> None:
    case = ScanCase(3, 70, 197, 16, options=ALL, states="zoh")  # enough work for two threads

    def run() -> list[Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.tensors().items()}
        outputs = flatten(selective_scan(**leaves, **case.settings()))
        return [*outputs, *torch.autograd.grad(sum(output.sum() for output in outputs), list(leaves.values()))]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, again = run(), run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(before)
    for left, right, other in zip(one, again, two, strict=True):
        assert identical(left, right)
        assert_near(other, left.detach(), 1e-6, "two threads against one")


def test_states_are_those_of_mean_states(backend: str) -> None:
    case = ScanCase(2, 21, 30, 5, groups=3, reverse=True, options=ALL, states="zoh")
    x = case.tensors()
    _, _, states = selective_scan(**x, **case.settings(), backend=backend)
    alone = mean_states(
        x["delta"], x["A"], delta_bias=x["delta_bias"], delta_softplus=True, groups=3, zoh=True, backend=backend
    )
    for left, right in zip(states, alone, strict=True):
        assert_near(left, right, 1e-6, "states")
    _, plain = selective_scan(**x, delta_softplus=True, return_states=True, backend=backend)
    assert isinstance(plain, ScanStates)
    assert plain.zoh is None


@pytest.mark.parametrize("name", ["u", "delta", "B", "C", "A", "z", "initial_state"])
def test_nan_reaches_the_output(backend: str, name: str) -> None:
    case = ScanCase(1, 14, 5, 4, options=ALL)
    x = {key: tensor.clone() for key, tensor in case.tensors().items()}
    x[name].view(-1)[x[name].numel() // 2] = float("nan")
    y, last, states = selective_scan(**x, **case.settings(), backend=backend)
    assert y.isnan().any()
    assert states.a.isnan().any() == (name in ("delta", "A"))
    assert not y.isnan().all() or name in ("B", "A")
    assert last.isnan().any() == (name not in ("C", "z"))


def test_extreme_step_sizes(backend: str) -> None:
    x = ScanCase(1, 20, 4, 2).tensors()
    x["delta"] = torch.tensor([-200.0, -50.0, 30.0, 1e6]).expand(1, 20, 4).contiguous()
    x["A"] = torch.tensor([-1.0, -1e4]).expand(4, 2).contiguous()
    outputs = flatten(selective_scan(**x, delta_softplus=True, return_states=True, backend=backend))
    exact = flatten(
        selective_scan(
            **{k: v.double() for k, v in x.items()}, delta_softplus=True, return_states=True, backend="reference"
        )
    )
    for output, expected in zip(outputs, exact, strict=True):
        assert output.isfinite().all()
        assert_near(output, expected, 1e-5, "extreme steps")
    growing = selective_scan(x["u"], torch.full((1, 20, 4), 300.0), torch.ones(4, 2), x["B"], x["C"], backend=backend)
    assert not growing.isfinite().all()


def test_bfloat16_keeps_its_dtype(backend: str) -> None:
    case = ScanCase(2, 16, 12, 4, options=ALL)
    x = case.tensors()
    exact, *_ = selective_scan(**{k: v.double() for k, v in x.items()}, **case.settings(), backend="reference")
    half = {name: tensor.bfloat16() for name, tensor in x.items()}
    y, last, states = selective_scan(**half, **case.settings(), backend=backend)
    assert y.dtype == torch.bfloat16
    assert states.a.dtype == last.dtype == torch.float32
    assert_near(y, exact, 5e-2, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": (2, 9, 4)}, "delta has shape"),
        ({"A": (5, 3)}, "A has shape"),
        ({"B": (2, 8, 4)}, "B has shape"),
        ({"C": (2, 8, 1, 3)}, "C has shape"),
        ({"D": (3,)}, "D has shape"),
        ({"z": (2, 8, 5)}, "z has shape"),
        ({"delta_bias": (1, 4)}, "delta_bias has shape"),
        ({"initial_state": (2, 4, 4)}, "initial_state has shape"),
        ({"u": (8, 4)}, "u has shape"),
        ({"B": (2, 8, 3, 3), "C": (2, 8, 3, 3)}, "3 equal groups"),
    ],
)
def test_names_the_wrong_argument(change: dict[str, tuple[int, ...]], message: str) -> None:
    x = ScanCase(2, 8, 4, 3, options=ALL).tensors()
    x.update({name: torch.zeros(shape) for name, shape in change.items()})
    with pytest.raises(ConfigError, match=message):
        selective_scan(**x)


def test_names_unusable_options() -> None:
    x = ScanCase(1, 4, 4, 2).tensors()
    with pytest.raises(ConfigError, match="backend='gpu'"):
        selective_scan(**x, backend="gpu")
    with pytest.raises(ConfigError, match="return_states='b'"):
        selective_scan(**x, return_states="b")
    with pytest.raises(ConfigError, match="A is complex"):
        selective_scan(**{**x, "A": x["A"].to(torch.complex64)})
    with pytest.raises(ConfigError, match="backend='cpu'"):
        selective_scan(**{name: tensor.double() for name, tensor in x.items()}, backend="cpu")


def test_compiled_gradients_end_in_zero_not_in_denormals(backend: str) -> None:
    u, delta, z = torch.randn(3, 1, 300, 16)
    u.requires_grad_()
    A, B, C = -torch.rand(16, 4) - 0.5, torch.randn(1, 300, 4), torch.randn(1, 300, 4)
    y = selective_scan(u, delta, A, B, C, z=z, delta_softplus=True, backend=backend)
    (gradient,) = torch.autograd.grad(y[:, -1].sum(), u)
    assert gradient[:, -1].abs().min() > 0
    tiny = torch.finfo(torch.float32).tiny
    denormal = (gradient != 0) & (gradient.abs() < tiny)
    assert backend == "reference" or not denormal.any()  # the reference leaves them to PyTorch
