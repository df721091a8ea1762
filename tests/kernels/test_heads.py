"""Mamba-2's scan in chunks against the scan token by token."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.kernels import ScanInputs, scan_heads
from tests.kernels.cases import assert_near

# (tokens, heads, head size, states, groups): one chunk, an incomplete one, several; sizes that are no power of two
SHAPES = [(1, 1, 1, 1, None), (64, 2, 3, 5, None), (65, 4, 2, 3, 2), (200, 6, 5, 17, 3), (150, 2, 64, 32, 1)]


def inputs(shape, *, packed: bool, dtype=torch.float64, seed: int = 0) -> ScanInputs:
    tokens, heads, size, n, groups = shape
    g = torch.Generator().manual_seed(seed)
    rows = (2, tokens, n) if groups is None else (2, tokens, groups, n)
    u, B, C = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, tokens, heads * size), rows, rows))
    delta = torch.rand(2, tokens, heads, generator=g, dtype=torch.float64) * 0.5
    A, D = -torch.rand(heads, generator=g, dtype=torch.float64) * 2, torch.randn(heads, generator=g).double()
    z, bias = torch.randn(u.shape, generator=g).double(), torch.randn(heads, generator=g).double() - 2
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (u, delta, A, B, C, D, z, bias)]
    seq_idx = (torch.rand(2, tokens, generator=g) < 0.05).cumsum(1) if packed else None
    return ScanInputs(*leaves, delta_softplus=True, seq_idx=seq_idx)


def value_and_grads(x: ScanInputs, *, chunked: bool) -> list[torch.Tensor]:
    y = scan_heads(x, chunked=chunked).y
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, x[:8], grad)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_scan(shape, packed: bool) -> None:
    exact = value_and_grads(inputs(shape, packed=packed), chunked=False)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        found = value_and_grads(inputs(shape, packed=packed, dtype=dtype), chunked=True)
        for name, actual, expected in zip(("y", *ScanInputs._fields[:8]), found, exact, strict=True):
            # The transition of a single token reaches nothing: what is left is the rounding of two equal sums.
            none = shape[0] == 1 and name == "A"
            assert_near(actual + none, expected + none, tolerance, f"{name} {dtype}")


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed: bool) -> None:
    x = inputs((70, 2, 2, 3, 1), packed=packed)
    first = [tensor[:1].detach().requires_grad_() if tensor.dim() > 1 else tensor for tensor in x[:8]]
    seq_idx = None if x.seq_idx is None else x.seq_idx[:1]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return scan_heads(ScanInputs(*tensors, delta_softplus=True, seq_idx=seq_idx), chunked=True).y

    assert torch.autograd.gradcheck(run, first)


def test_packed_equals_separate() -> None:
    lengths = (1, 30, 63, 2, 70)
    x = inputs((sum(lengths), 4, 8, 32, None), packed=False, dtype=torch.float32)
    seq_idx = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths)).expand(2, -1)
    packed = scan_heads(x._replace(seq_idx=seq_idx), chunked=True).y
    names = ("u", "delta", "B", "C", "z")
    by_token = zip(*(getattr(x, name).split(lengths, dim=1) for name in names), strict=True)
    each = [scan_heads(x._replace(**dict(zip(names, part, strict=True))), chunked=True).y for part in by_token]
    assert_near(packed, torch.cat(each, dim=1), 1e-5, "packed")


def test_runs_backwards_and_from_a_state() -> None:
    x = inputs((8, 2, 4, 32, None), packed=False)
    forth = scan_heads(x._replace(**{n: getattr(x, n).flip(1) for n in ("u", "delta", "B", "C", "z")})).y
    assert_near(scan_heads(x._replace(reverse=True)).y, forth.flip(1), 1e-12, "reverse")
    half = 2
    first, second = (
        x._replace(**{n: getattr(x, n)[:, part] for n in ("u", "delta", "B", "C", "z")})
        for part in (slice(half), slice(half, None))
    )
    state = scan_heads(first, last_state=True).last_state
    assert_near(scan_heads(second._replace(initial_state=state)).y, scan_heads(x).y[:, half:], 1e-12, "state")


def test_chooses_and_refuses() -> None:
    x = inputs((8, 2, 4, 32, None), packed=False, dtype=torch.float32)
    assert scan_heads(x, last_state=True).last_state.shape == (2, 8, 32)
    with pytest.raises(ConfigError, match="no last state"):
        scan_heads(x, last_state=True, chunked=True)
    with pytest.raises(ConfigError, match="delta has shape"):
        scan_heads(x._replace(delta=x.delta[..., :1]))
    with pytest.raises(ConfigError, match="A is not of floating-point"):
        scan_heads(x._replace(A=torch.ones(2, dtype=torch.int64)))
    half = ScanInputs(*(tensor.detach().bfloat16() for tensor in x[:8]))
    assert scan_heads(half).y.dtype == torch.bfloat16
    assert scan_heads(ScanInputs(*(t[:, :0] if t.dim() > 1 else t for t in x[:8]))).y.shape == (2, 0, 8)
