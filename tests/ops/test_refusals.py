"""What the kernels cannot compute with is refused in words, by every backend."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.ops import add_rms_norm, causal_conv1d, mean_states, selective_scan
from tests.ops.cases import OPTIONAL, ScanCase

KINDS = [torch.int32, torch.int64, torch.bool, torch.complex64]
TENSORS = ScanCase(1, 4, 4, 2, options=frozenset(OPTIONAL)).tensors()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", list(TENSORS))
def test_scan(backend: str, name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*{dtype}"):
        selective_scan(**{**TENSORS, name: TENSORS[name].to(dtype)}, backend=backend)


@pytest.mark.parametrize("dtype", KINDS)
def test_others(backend: str, dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 4, 3), torch.ones(3, 2)
    with pytest.raises(ConfigError, match=rf"x is .*{dtype}"):
        causal_conv1d(x.to(dtype), weight, backend=backend)
    with pytest.raises(ConfigError, match=rf"weight is .*{dtype}"):
        add_rms_norm(x, None, weight[:, 0].to(dtype), eps=1e-5, backend=backend)
    with pytest.raises(ConfigError, match=rf"A is .*{dtype}"):
        mean_states(x, weight.to(dtype), backend=backend)


def test_no_channels(backend: str) -> None:
    empty, rows = torch.ones(1, 4, 0), torch.ones(1, 4, 2)
    with pytest.raises(ConfigError, match=r"u has shape .* at least one channel"):
        selective_scan(empty, empty, torch.ones(0, 2), rows, rows, return_states=True, backend=backend)
    with pytest.raises(ConfigError, match=r"delta has shape .* at least one channel"):
        mean_states(empty, torch.ones(0, 2), backend=backend)
    with pytest.raises(ConfigError, match=r"x has shape .* at least one channel"):
        add_rms_norm(empty, None, torch.ones(0), eps=1e-5, backend=backend)
