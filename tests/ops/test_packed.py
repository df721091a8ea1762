"""Packed sequences: a row of several sequences gives what the sequences give one by one."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops import causal_conv1d, selective_scan, seq_idx_from_cu_seqlens, seq_idx_from_position_ids
from tests.ops.cases import OPTIONAL, PACKED, ScanCase, assert_equivalent, assert_near, flatten

LENGTHS = (1, 30, 3, 12, 17)  # within a chunk, over several, a single token, less than the convolution is wide
SEQ_IDX = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand(2, -1)
TOKENS = sum(LENGTHS)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_scan_of_packed_is_the_scan_of_each(backend: str, reverse: bool, scalar: bool) -> None:
    options = frozenset(OPTIONAL) - {"initial_state"}
    case = ScanCase(2, TOKENS, 19, 5, reverse=reverse, scalar=scalar, options=options, states="zoh")
    x = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}
    settings = {"delta_softplus": True, "reverse": reverse, "return_states": "zoh", "backend": backend}
    packed = flatten(selective_scan(**x, **settings, seq_idx=SEQ_IDX))
    by_token = {name: tensor.split(LENGTHS, dim=1) for name, tensor in x.items() if tensor.dim() == 3}
    parts = [
        flatten(selective_scan(**{**x, **{name: split[i] for name, split in by_token.items()}}, **settings))
        for i in range(len(LENGTHS))
    ]
    each = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
    weights = [torch.randn(output.shape, generator=torch.Generator().manual_seed(3)) for output in packed]
    grads = [
        torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)), list(x.values()))
        for outputs in (packed, each)
    ]
    for left, right in zip([*packed, *grads[0]], [*each, *grads[1]], strict=True):
        assert_near(left, right, 1e-5, "packed")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [1, 4, 6])
def test_convolution_of_packed_is_that_of_each(backend: str, reverse: bool, width: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, 21, generator=g, requires_grad=True)
    weight, bias = (torch.randn(*shape, generator=g, requires_grad=True) for shape in ((21, width), (21,)))
    packed = causal_conv1d(x, weight, bias, reverse=reverse, seq_idx=SEQ_IDX, backend=backend)
    parts = [causal_conv1d(part, weight, bias, reverse=reverse, backend=backend) for part in x.split(LENGTHS, dim=1)]
    each, grad = torch.cat(parts, dim=1), torch.randn(x.shape, generator=g)
    grads = [torch.autograd.grad(y, (x, weight, bias), grad) for y in (packed, each)]
    for left, right in zip([packed, *grads[0]], [each, *grads[1]], strict=True):
        assert_near(left, right, 1e-5, "packed")


@pytest.mark.parametrize("groups", [None, 2])
def test_every_backend_equals_the_reference(backend: str, groups: int | None) -> None:
    case = ScanCase(3, 40, 18, 6, groups=groups, options=frozenset((*OPTIONAL, PACKED)), states="zoh")
    assert_equivalent(selective_scan, case.tensors(), backend=backend, **case.settings())
    x = {"x": torch.randn(3, 40, 18), "weight": torch.randn(18, 4), PACKED: case.tensors()[PACKED]}
    assert_equivalent(causal_conv1d, x, backend=backend)


@pytest.mark.parametrize("reverse", [False, True])
def test_reference_passes_gradcheck(reverse: bool) -> None:
    case = ScanCase(1, 7, 3, 2, options=frozenset((*OPTIONAL, PACKED)), seed=4)
    tensors = case.tensors()
    seq_idx = tensors.pop(PACKED)
    assert seq_idx.unique().numel() > 1
    leaves = [tensor.double().requires_grad_() for tensor in tensors.values()]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(tensors, values, strict=True))
        return tuple(flatten(selective_scan(**named, **case.settings() | {"reverse": reverse}, seq_idx=seq_idx)))

    assert torch.autograd.gradcheck(run, leaves)


def test_a_number_may_come_again(backend: str) -> None:
    x = ScanCase(1, 6, 4, 2).tensors()
    again, new = torch.tensor([[0, 0, 1, 0, 0, 0]]), torch.tensor([[7, 7, 3, 9, 9, 9]])
    results = [selective_scan(**x, seq_idx=seq_idx, backend=backend) for seq_idx in (again, new)]
    assert torch.equal(*results)  # the same call twice
    results = [causal_conv1d(x["u"], torch.ones(4, 4), seq_idx=seq_idx, backend=backend) for seq_idx in (again, new)]
    assert torch.equal(*results)


def test_other_forms_of_packing() -> None:
    lengths = torch.tensor([0, 3, 3, 7])  # an empty sequence is none
    assert seq_idx_from_cu_seqlens(lengths, 7).tolist() == [[0, 0, 0, 2, 2, 2, 2]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert seq_idx_from_position_ids(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    for bad in ([1, 7], [0, 6], [0, 5, 3, 7], [[0, 7]]):
        with pytest.raises(ConfigError, match="cu_seqlens"):
            seq_idx_from_cu_seqlens(torch.tensor(bad), 7)
    with pytest.raises(ConfigError, match="position_ids"):
        seq_idx_from_position_ids(torch.arange(3))
    with pytest.raises(ConfigError, match=r"seq_idx has shape \[6\]"):
        selective_scan(**ScanCase(1, 6, 4, 2).tensors(), seq_idx=torch.zeros(6))
