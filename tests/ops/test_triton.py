"""The Triton kernels against the reference in float64: on the GPU where there is one, else in Triton's interpreter."""

import platform
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import ScanInputs, add_rms_norm, backend, backend_report, causal_conv1d, mean_states, selective_scan
from infssm.ops.backend import choose
from tests.compare import assert_rounding, identical
from tests.ops.cases import OPTIONAL, PACKED, ScanCase, assert_equivalent, assert_near, flatten, run_with_gradients
from tests.ops.test_fused import randn
from tests.ops.test_operators import block

_ops = torch.ops.infssm

needs_triton = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="Triton is released for Linux on x86-64"
)
pytestmark = needs_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = frozenset(OPTIONAL)
PACKED_TOO = ALL | {PACKED}


def moved(function, *, backend: str, **arguments):
    """Call on the device Triton runs on; the results come back."""
    device = DEVICE if backend == "triton" else "cpu"
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    return [tensor.cpu() for tensor in flatten(function(**there, backend=backend))]


scan, means, conv, norm = (
    partial(moved, function) for function in (selective_scan, mean_states, causal_conv1d, add_rms_norm)
)


@pytest.mark.parametrize(
    "case",
    [
        ScanCase(1, 1, 1, 1),
        ScanCase(2, 18, 5, 3, options=ALL, states="zoh"),
        ScanCase(1, 35, 4, 2, options=ALL, reverse=True, states="zoh"),
        ScanCase(1, 70, 3, 16, options=frozenset({"z", "delta_bias"})),
        ScanCase(1, 5, 40, 17, options=ALL),
        ScanCase(1, 17, 6, 4, groups=2, options=ALL, reverse=True),
        ScanCase(1, 9, 8, 6, scalar=True, options=ALL, states=False),
        ScanCase(3, 4, 33, 5, states=False, softplus=False),
        ScanCase(2, 40, 5, 3, options=PACKED_TOO, states="zoh"),
        ScanCase(1, 35, 4, 2, options=PACKED_TOO, reverse=True),
        ScanCase(1, 6, 7, 3, groups=1, softplus=False, options=frozenset({"delta_bias", "initial_state"})),
    ],
)
def test_scan(case: ScanCase) -> None:
    assert_equivalent(scan, case.tensors(), backend="triton", **case.settings())


def test_scan_without_gradients_of_every_output() -> None:
    tensors = ScanCase(1, 18, 3, 2, options=ALL).tensors()
    for name in ("last_state", "states"):
        only = {"return_last_state": name == "last_state", "return_states": name == "states"}

        def part(only=only, **arguments):
            return scan(**arguments, delta_softplus=True, **only)[1:]

        assert_equivalent(part, {k: v for k, v in tensors.items() if k not in ("D", "z")}, backend="triton")


def test_scan_twice_is_the_same_bit_for_bit() -> None:
    case = ScanCase(1, 17, 40, 3, options=ALL, states="zoh")
    runs = [run_with_gradients(scan, case.tensors(), torch.float32, backend="triton", **case.settings()) for _ in "12"]
    for left, right in zip(runs[0][0] + list(runs[0][1].values()), runs[1][0] + list(runs[1][1].values()), strict=True):
        assert identical(left, right)


def test_scan_reads_strided_inputs() -> None:
    case = ScanCase(2, 5, 6, 4, options=ALL)
    tensors = {name: tensor.to(DEVICE) for name, tensor in case.tensors().items()}
    wide = torch.cat([tensors["u"], tensors["z"]], dim=-1)
    strided = {
        **tensors,
        "u": wide[..., :6],
        "z": wide[..., 6:],
        "delta": tensors["delta"].mT.contiguous().mT,
        "B": torch.stack([tensors["B"], tensors["C"]], dim=-1)[..., 0],
        "A": tensors["A"].T.contiguous().T,
        "D": torch.stack([tensors["D"], tensors["D"]], dim=-1)[:, 0],
    }
    results = [selective_scan(**x, **case.settings(), backend="triton") for x in (tensors, strided)]
    for left, right in zip(*(flatten(result) for result in results), strict=True):
        assert_rounding(left, right)


def test_narrow_floats_keep_their_dtype() -> None:
    case = ScanCase(1, 6, 5, 4, options=ALL)
    x = case.tensors()
    exact = selective_scan(**{k: v.double() for k, v in x.items()}, **case.settings(), backend="reference")[0]
    for dtype in (torch.bfloat16, torch.float16):
        y, last, a, _ = scan(**{k: v.to(dtype) for k, v in x.items()}, **case.settings(), backend="triton")
        assert y.dtype == dtype
        assert a.dtype == last.dtype == torch.float32
        assert_near(y, exact, 5e-2, str(dtype))


def test_empty_inputs() -> None:
    case = ScanCase(2, 0, 4, 3, options=ALL)
    assert scan(**case.tensors(), **case.settings(), backend="triton")[0].shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("tokens", "channels", "n", "groups", "softplus", "zoh", "bias"),
    [
        (1, 1, 1, None, False, False, False),
        (40, 3, 2, None, True, True, True),
        (3, 70, 17, 1, True, False, True),
        (5, 6, 4, 3, False, True, True),
    ],
)
def test_mean_states(tokens, channels, n, groups, softplus, zoh, bias) -> None:
    tensors = {"delta": randn(2, tokens, channels), "A": -4 * torch.rand(channels, n)}
    tensors |= {"delta_bias": randn(channels)} if bias else {}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs() / 4
    assert_equivalent(means, tensors, backend="triton", groups=groups, zoh=zoh, delta_softplus=softplus)


def test_zoh_keeps_its_limit_at_zero() -> None:
    A = torch.tensor([0.0, -1e-6, -1e-3, -0.4, -0.6, -30.0]).expand(4, 6)
    assert_equivalent(means, {"delta": torch.rand(1, 3, 4) + 0.1, "A": A}, backend="triton", zoh=True)


def test_softplus_keeps_very_small_steps() -> None:
    delta = torch.tensor([-30.0, -12.0, -3.0, 0.0, 5.0, 40.0]).view(1, 6, 1)
    actual = means(delta=delta, A=-torch.ones(1, 1), delta_softplus=True, backend="triton")[1]
    torch.testing.assert_close(actual.double(), torch.nn.functional.softplus(delta.double())[..., 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("tokens", "channels", "width", "silu", "reverse", "bias"),
    [
        (1, 1, 1, True, False, False),
        (35, 5, 4, True, True, True),
        (18, 130, 4, True, False, True),
        (7, 3, 3, False, True, False),
    ],
)
def test_causal_conv1d(tokens, channels, width, silu, reverse, bias) -> None:
    tensors = {"x": randn(2, tokens, channels), "weight": randn(channels, width)}
    tensors |= {"bias": randn(channels)} if bias else {}
    assert_equivalent(conv, tensors, backend="triton", silu=silu, reverse=reverse)
    tensors[PACKED] = (torch.rand(2, tokens) < 0.3).cumsum(1)
    assert_equivalent(conv, tensors, backend="triton", silu=silu, reverse=reverse)


@pytest.mark.parametrize(("rows", "channels", "residual"), [(1, 1, True), (40, 5, True), (3, 97, False)])
def test_add_rms_norm(rows, channels, residual) -> None:
    tensors = {"x": randn(rows, 2, channels), "weight": randn(channels), "residual": randn(rows, 2, channels, seed=1)}
    function = norm
    if not residual:
        del tensors["residual"]
        function = partial(norm, residual=None)
    assert_equivalent(function, tensors, backend="triton", eps=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_as_one_graph() -> None:
    case = ScanCase(1, 3, 4, 2, options=ALL)
    x = {name: tensor.to(DEVICE).requires_grad_() for name, tensor in case.tensors().items()}
    weight = randn(4, 4).to(DEVICE).requires_grad_()
    leaves = [*x.values(), weight]
    expected = block(x, weight, "triton")
    actual = torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight, "triton")
    assert_near(actual, expected, 1e-6, "compiled")
    for left, right in zip(*(torch.autograd.grad(value, leaves) for value in (actual, expected)), strict=True):
        assert_near(left, right, 1e-5, "compiled gradient")


def test_operators_pass_opcheck() -> None:
    case = ScanCase(1, 3, 4, 2, groups=2, options=ALL)
    x = {name: tensor.to(DEVICE).requires_grad_() for name, tensor in case.tensors().items()}
    full = ScanInputs(**x, delta_softplus=True, reverse=True, seq_idx=torch.tensor([[0, 1, 1.0]], device=DEVICE))
    c = [randn(4, 3, seed=seed).to(DEVICE).requires_grad_(seed > 2) for seed in range(6)]
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for operator, arguments in (
        (_ops.scan, (*full, True, 2, True, True)),
        (_ops.scan, (*ScanInputs(*full[:5]), False, 0, True, True)),
        (_ops.mean_states, (x["delta"], x["A"], x["delta_bias"], 2, True, True, True)),
        (_ops.conv, (x["u"], randn(4, 4).to(DEVICE), x["D"], True, True, full.seq_idx, True)),
        (_ops.norm, (x["u"], x["z"], x["D"], 1e-5, True)),
        (_ops.distance, (*c[:2], *c[3:5], None, None, "aligned", True, False, True, True)),
        (_ops.distance, (*c[:2], *c[3:5], c[2], c[5], "output", True, False, True, True)),
    ):
        assert set(torch.library.opcheck(operator, arguments, test_utils=tests).values()) == {"SUCCESS"}


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor(dtype=torch.float32):
        return SimpleNamespace(is_cuda=True, is_cpu=False, device=torch.device("cuda:0"), dtype=dtype, numel=lambda: 4)

    host = torch.zeros(2)
    monkeypatch.setattr(backend, "_INTERPRETED", True)
    assert choose("triton", host) == "triton"
    assert choose(None, host) != "triton"
    monkeypatch.setattr(backend, "_INTERPRETED", False)
    with pytest.raises(ConfigError, match="a tensor is on cpu"):
        choose("triton", host)
    assert choose(None, tensor(), None, tensor(torch.bfloat16)) == "triton"
    assert choose(None, tensor(), host) == choose(None, tensor(torch.float64)) == "reference"
    assert choose("reference", tensor()) == "reference"
    with pytest.raises(ConfigError, match="float64"):
        choose("triton", tensor(torch.float64))
    with pytest.raises(ConfigError, match=r"backend='cpu'.*cuda:0"):
        choose("cpu", tensor())
    assert backend_report()["default_cuda"] == "triton"
    monkeypatch.setattr(backend, "TRITON", False)
    assert choose(None, tensor()) == backend_report()["default_cuda"] == "reference"
    with pytest.raises(ConfigError, match="pip install triton"):
        choose("triton", tensor())
