"""Mamba-2's scan in chunks in Triton against the scan token by token in float64: on the GPU or in the interpreter."""

import pytest
import torch
from torch import Tensor, finfo

from infssm.ops import ScanInputs, scan_ssd
from infssm.ops.triton import ssd as launch
from tests.compare import assert_rounding, identical
from tests.ops.cases import assert_near
from tests.ops.test_ssd import inputs
from tests.ops.test_triton import DEVICE, needs_triton

_ops = torch.ops.infssm

pytestmark = needs_triton
NAMES = ("y", *ScanInputs._fields[:8])


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Chunks of 16 tokens, so that a few tokens fill several; `chunked` calls are served by Triton."""
    monkeypatch.setattr(launch, "_ROWS", 16)
    return monkeypatch


def moved(x: ScanInputs, dtype: torch.dtype = torch.float32) -> ScanInputs:
    """Leaves on the device Triton runs on."""
    floats = [None if t is None else t.detach().to(DEVICE, dtype).requires_grad_() for t in x[:8]]
    seq_idx = None if x.seq_idx is None else x.seq_idx.to(DEVICE)
    return ScanInputs(*floats, delta_softplus=x.delta_softplus, seq_idx=seq_idx)


def results(x: ScanInputs, triton: pytest.MonkeyPatch, *, grad: Tensor | None = None) -> list[Tensor]:
    """y and the gradients of the inputs; in float64 by the reference, token by token."""
    exact = x.u.dtype == torch.float64
    with triton.context() as patch:
        patch.setattr("infssm.ops.ssd.choose", lambda *_: "reference" if exact else "triton")
        y = scan_ssd(x, chunked=not exact).y
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [part.cpu() for part in (y.detach(), *torch.autograd.grad(y, [t for t in x[:8] if t is not None], grad))]


def bound(shape) -> float:
    """Every result is a sum over tokens of sums over states or channels, its terms products of a few rounded factors:
    so many roundings of the largest.
    """
    tokens, _, size, n, _ = shape
    return 4 * (tokens + size + n) * finfo(torch.float32).eps


def assert_equal_to_the_scan(x: ScanInputs, shape, triton: pytest.MonkeyPatch) -> None:
    names = [name for name in NAMES if name == "y" or getattr(x, name) is not None]
    for name, actual, expected in zip(names, results(moved(x), triton), results(x, triton), strict=True):
        assert_near(actual, expected, bound(shape), name)


# (tokens, heads, head size, states, groups): less than a chunk, a whole one, several and a part; several blocks of
# states and of channels; sizes that are no power of two
@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((1, 1, 1, 1, None), False),
        ((16, 2, 3, 5, None), False),
        ((37, 4, 3, 5, 2), False),
        ((20, 1, 35, 40, 1), True),
        ((33, 3, 16, 17, 3), False),
    ],
)
def test_equals_the_scan(shape, packed: bool, triton: pytest.MonkeyPatch) -> None:
    assert_equal_to_the_scan(inputs(shape, packed=packed, batch=1), shape, triton)


def test_packed_sequences(triton: pytest.MonkeyPatch) -> None:
    """Ends within a chunk and between chunks; sequences of one token, and two in turn over two chunks."""
    shape, lengths = (37, 2, 3, 5, 1), ((3, 17, 1, 14, 2), (16, 5, 11, 5))
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    assert_equal_to_the_scan(inputs(shape, packed=False)._replace(seq_idx=torch.stack(numbers)), shape, triton)


def test_a_whole_chunk_and_a_part(triton: pytest.MonkeyPatch) -> None:
    triton.undo()
    shape = (70, 1, 4, 6, None)
    assert_equal_to_the_scan(inputs(shape, packed=True, batch=1), shape, triton)


@pytest.mark.parametrize("left_out", ["D", "z", "delta_bias", "D z delta_bias"])
def test_without_skip_gate_and_bias(left_out: str, triton: pytest.MonkeyPatch) -> None:
    shape = (18, 2, 3, 4, 1)
    x = inputs(shape, packed=True, batch=1)._replace(**dict.fromkeys(left_out.split()))
    assert_equal_to_the_scan(x._replace(delta_softplus=x.delta_bias is not None), shape, triton)


def test_strong_decays_keep_their_gradient(triton: pytest.MonkeyPatch) -> None:
    """What a sequence forgets within a token is 0 and not inf times 0, and the little that is left is not lost in
    sums of what is not forgotten.
    """
    shape = (40, 4, 3, 5, 1)
    x = inputs(shape, packed=False, batch=1)
    x = x._replace(A=torch.tensor([-1e-3, -1.0, -100.0, -1e4], dtype=torch.float64, requires_grad=True))
    found, exact = results(moved(x), triton), results(x, triton)
    for name, actual, expected in zip(NAMES, found, exact, strict=True):
        assert_near(actual, expected, bound(shape), name)
    # Sums of steps over a chunk are in the thousands; the exponents must not have the rounding of those.
    error = (found[3] - exact[3]).abs() / exact[3].abs()
    assert (error < bound(shape))[:3].all(), error
    assert exact[3][2].abs() < finfo(torch.float32).eps * exact[3][0].abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats(dtype: torch.dtype, triton: pytest.MonkeyPatch) -> None:
    x = moved(inputs((20, 2, 3, 4, None), packed=True, batch=1), dtype)
    wide = ScanInputs(*(t.detach().cpu().double().requires_grad_() for t in x[:8]), delta_softplus=True)
    exact = results(wide._replace(seq_idx=None if x.seq_idx is None else x.seq_idx.cpu()), triton)
    # Results are rounded to the inputs' format; on a GPU factors are rounded to tf32, which has float16's precision.
    tolerance = 4 * max(finfo(dtype).eps, finfo(torch.float16).eps)
    for name, actual, expected in zip(NAMES, results(x, triton), exact, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, expected, tolerance, name)


def test_reads_what_a_layer_splits_and_runs_the_same_twice(triton: pytest.MonkeyPatch) -> None:
    x = moved(inputs((18, 2, 3, 5, 2), packed=False, batch=1))
    with torch.no_grad():
        parts = (x.z, x.u, x.B.flatten(2), x.C.flatten(2), x.delta)
        z, u, B, C, delta = torch.cat(parts, dim=-1).split([part.shape[-1] for part in parts], dim=-1)
    split = x._replace(u=u, z=z, B=B.view(x.B.shape), C=C.view(x.C.shape), delta=delta.mT.contiguous().mT)
    split = ScanInputs(*(tensor.requires_grad_() for tensor in split[:8]), delta_softplus=True)
    ones = torch.ones(x.u.shape, device=DEVICE)
    expanded = torch.ones(1, 1, 1, device=DEVICE).expand(x.u.shape)
    for one, other in zip(results(x, triton, grad=ones), results(split, triton, grad=expanded), strict=True):
        assert identical(one, other)


def test_what_is_served(triton: pytest.MonkeyPatch) -> None:
    x = moved(inputs((5, 2, 3, 1, None), packed=False, batch=1))
    triton.setattr("infssm.ops.ssd.choose", lambda *_: "triton")
    served = []
    triton.setattr(launch, "run", lambda kernel, *_, **__: served.append(kernel.__name__))
    assert scan_ssd(x).y.requires_grad
    assert served == ["chunk_states", "carry", "similarities", "outputs"]
    served.clear()
    assert scan_ssd(x, last_state=True).last_state.shape == (1, 6, 1)
    assert not served


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operator_passes_opcheck_and_compiles(triton: pytest.MonkeyPatch) -> None:
    x = moved(inputs((3, 2, 2, 2, 1), packed=False, batch=1))
    triton.setattr("infssm.ops.ssd.choose", lambda *_: "triton")
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for gate in (x.z, None):
        document = torch.tensor([[0, 1, 1.0]], device=DEVICE)
        arguments = (*x[:6], gate, x.delta_bias, True, False, None, document, True, True)
        assert set(torch.library.opcheck(_ops.ssd, arguments, test_utils=tests).values()) == {"SUCCESS"}

    def layer(*tensors: Tensor) -> Tensor:
        return scan_ssd(ScanInputs(*tensors, delta_softplus=True)).y

    found = [torch.compile(layer, fullgraph=True, backend="aot_eager")(*x[:8]), layer(*x[:8])]
    assert_rounding(*found)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), x[:8]) for y in found), strict=True):
        assert_rounding(one, other)
