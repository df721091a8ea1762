"""Mamba-2's scan in chunks, compiled and by PyTorch's products, against the scan token by token."""

from collections.abc import Iterator

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops import ScanInputs, scan_ssd
from infssm.ops.backend import NATIVE
from tests.ops.cases import assert_near
from tests.ops.conftest import VARIANTS

# (tokens, heads, head size, states, groups): one chunk, an incomplete one, several; sizes that are no power of two;
# more heads than one block of the compiled kernel holds
SHAPES = [
    (1, 1, 1, 1, None),
    (64, 2, 3, 5, None),
    (65, 4, 2, 3, 2),
    (200, 6, 5, 17, 3),
    (150, 2, 64, 32, 1),
    (97, 7, 70, 20, None),
]


@pytest.fixture(params=[variant.removeprefix("cpu-") for variant in VARIANTS])
def single(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """float32, served by the compiled kernel of one instruction set, or by PyTorch's products."""
    if request.param == "reference":
        monkeypatch.setattr("infssm.ops.ssd.choose", lambda *_: "reference")
        yield torch.float32
        return
    before = NATIVE.isa()
    NATIVE.use_isa(request.param)
    yield torch.float32
    NATIVE.use_isa(before)


def inputs(shape, *, packed: bool, dtype=torch.float64, seed: int = 0, batch: int = 2) -> ScanInputs:
    tokens, heads, size, n, groups = shape
    g = torch.Generator().manual_seed(seed)
    rows = (batch, tokens, n) if groups is None else (batch, tokens, groups, n)
    u, B, C = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((batch, tokens, heads * size), rows, rows))
    delta = torch.rand(batch, tokens, heads, generator=g, dtype=torch.float64) * 0.5
    A, D = -torch.rand(heads, generator=g, dtype=torch.float64) * 2, torch.randn(heads, generator=g).double()
    z, bias = torch.randn(u.shape, generator=g).double(), torch.randn(heads, generator=g).double() - 2
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (u, delta, A, B, C, D, z, bias)]
    seq_idx = (torch.rand(batch, tokens, generator=g) < 0.05).cumsum(1) if packed else None
    return ScanInputs(*leaves, delta_softplus=True, seq_idx=seq_idx)


def value_and_grads(x: ScanInputs, *, chunked: bool) -> list[torch.Tensor]:
    y = scan_ssd(x, chunked=chunked).y
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, x[:8], grad)]


def assert_equal_to_the_scan(shape, packed: bool, dtype: torch.dtype, tolerance: float) -> None:
    exact = value_and_grads(inputs(shape, packed=packed), chunked=False)
    found = value_and_grads(inputs(shape, packed=packed, dtype=dtype), chunked=True)
    for name, actual, expected in zip(("y", *ScanInputs._fields[:8]), found, exact, strict=True):
        assert_near(actual, expected, tolerance, f"{name} {dtype}")
        if shape[0] == 1 and name == "A":  # a single token has no state to decay
            assert not actual.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_scan(shape, packed: bool) -> None:
    assert_equal_to_the_scan(shape, packed, torch.float64, 1e-11)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_scan_in_single_precision(shape, packed: bool, single: torch.dtype) -> None:
    assert_equal_to_the_scan(shape, packed, single, 1e-4)


def test_without_skip_gate_and_softplus(single: torch.dtype) -> None:
    results = []
    for dtype, chunked in ((torch.float64, False), (single, True)):
        x = inputs((130, 4, 6, 9, 2), packed=True, dtype=dtype)
        bare = ScanInputs(*x[:5], seq_idx=x.seq_idx)
        y = scan_ssd(bare, chunked=chunked).y
        results.append([y, *torch.autograd.grad(y.square().sum(), bare[:5])])
    for name, actual, expected in zip(("y", *ScanInputs._fields[:5]), *results[::-1], strict=True):
        assert_near(actual, expected, 1e-4, name)


@pytest.mark.parametrize("packed", [False, True])
def test_strong_decays_keep_their_gradient(packed: bool, single: torch.dtype) -> None:
    """Transitions that forget within a token beside some that keep for the whole row.

    The gradient of A is compared head by head: what a strong decay leaves of it is far below the rounding of what does
    not decay, so it must not be formed as a difference of sums.
    """
    results = []
    for dtype, chunked in ((torch.float64, False), (torch.float64, True), (single, True)):
        x = inputs((300, 7, 8, 12, 1), packed=packed, dtype=dtype)
        A = torch.tensor([-1e-4, -0.1, -2.0, -8.0, -16.0, -30.0, -200.0], dtype=dtype, requires_grad=True)
        delta = (1.3 * (x.delta.detach() + 0.75)).requires_grad_()  # 1 to 1.6
        x = x._replace(A=A, delta=delta, delta_bias=None, delta_softplus=False)
        y = scan_ssd(x, chunked=chunked).y
        leaves = {name: getattr(x, name) for name in ("u", "delta", "A", "B", "C", "D", "z")}
        grads = torch.autograd.grad((y * torch.linspace(-1, 1, 300)[:, None]).sum(), list(leaves.values()))
        results.append({"y": y.detach()} | dict(zip(leaves, grads, strict=True)))
    exact, double, found = results
    for name, expected in exact.items():
        assert_near(found[name], expected, 1e-4, name)
        assert_near(double[name], expected, 1e-11, name)
    for head in range(6):  # of -200 nothing is left in float32
        assert_near(found["A"][head] / exact["A"][head], torch.ones(()), 2e-4, f"A of head {head}")
        assert_near(double["A"][head] / exact["A"][head], torch.ones(()), 1e-11, f"A of head {head} in float64")


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, single: torch.dtype) -> None:
    before, results = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        results.append(value_and_grads(inputs((130, 12, 64, 32, 2), packed=True, dtype=single), chunked=True))
    torch.set_num_threads(before)
    for name, actual, expected in zip(("y", *ScanInputs._fields[:8]), *results, strict=True):
        assert_near(actual, expected, 1e-6, name)


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed: bool) -> None:
    x = inputs((70, 2, 2, 3, 1), packed=packed)
    first = [tensor[:1].detach().requires_grad_() if tensor.dim() > 1 else tensor for tensor in x[:8]]
    seq_idx = None if x.seq_idx is None else x.seq_idx[:1]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return scan_ssd(ScanInputs(*tensors, delta_softplus=True, seq_idx=seq_idx), chunked=True).y

    assert torch.autograd.gradcheck(run, first)


def test_packed_equals_separate() -> None:
    lengths = (1, 30, 63, 2, 70)
    x = inputs((sum(lengths), 4, 8, 32, None), packed=False, dtype=torch.float32)
    seq_idx = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths)).expand(2, -1)
    packed = scan_ssd(x._replace(seq_idx=seq_idx), chunked=True).y
    names = ("u", "delta", "B", "C", "z")
    by_token = zip(*(getattr(x, name).split(lengths, dim=1) for name in names), strict=True)
    each = [scan_ssd(x._replace(**dict(zip(names, part, strict=True))), chunked=True).y for part in by_token]
    assert_near(packed, torch.cat(each, dim=1), 1e-5, "packed")


def test_runs_backwards_and_from_a_state() -> None:
    x = inputs((8, 2, 4, 32, None), packed=False)
    forth = scan_ssd(x._replace(**{n: getattr(x, n).flip(1) for n in ("u", "delta", "B", "C", "z")})).y
    assert_near(scan_ssd(x._replace(reverse=True)).y, forth.flip(1), 1e-12, "reverse")
    half = 2
    first, second = (
        x._replace(**{n: getattr(x, n)[:, part] for n in ("u", "delta", "B", "C", "z")})
        for part in (slice(half), slice(half, None))
    )
    state = scan_ssd(first, last_state=True).last_state
    assert_near(scan_ssd(second._replace(initial_state=state)).y, scan_ssd(x).y[:, half:], 1e-12, "state")


def test_chooses_and_refuses() -> None:
    x = inputs((8, 2, 4, 32, None), packed=False, dtype=torch.float32)
    assert scan_ssd(x, last_state=True).last_state.shape == (2, 8, 32)
    with pytest.raises(ConfigError, match="no last state"):
        scan_ssd(x, last_state=True, chunked=True)
    with pytest.raises(ConfigError, match="delta has shape"):
        scan_ssd(x._replace(delta=x.delta[..., :1]))
    with pytest.raises(ConfigError, match="A is not of floating-point"):
        scan_ssd(x._replace(A=torch.ones(2, dtype=torch.int64)))
    half = ScanInputs(*(tensor.detach().bfloat16() for tensor in x[:8]))
    assert scan_ssd(half).y.dtype == torch.bfloat16
    assert scan_ssd(ScanInputs(*(t[:, :0] if t.dim() > 1 else t for t in x[:8]))).y.shape == (2, 0, 8)
