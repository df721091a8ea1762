"""Sums over powers and over frequencies: poles at every distance from each other, against the formula in float64."""

from functools import partial

import pytest
import torch

from infssm.ops import fused_distance
from tests.ops.cases import assert_equivalent

SPANS = [0.01, 0.15, 0.5, 1.0, 1.7, 2.4, 3.2, 4.0, 4.6, 5.2, 7.0, 15.0]  # 4 powers to 96, then frequencies


def states(span, gap, n):
    generator = torch.Generator().manual_seed(n)
    rand, randn = (partial(draw, 40, n, generator=generator) for draw in (torch.rand, torch.randn))
    old = {"old_a": span * (rand() - 0.3), "old_c": 1 + 0.5 * rand(), "old_b": 1 + 0.5 * rand()}
    old["old_a"][:, 0], old["old_a"][:, -1] = -0.3 * span, 0.7 * span
    new = {name.replace("old", "new"): tensor + gap * randn() for name, tensor in old.items()}
    new["new_a"] = old["old_a"] + 0.1 * gap * min(span, 1) * randn()
    return {**old, **new}


@pytest.mark.parametrize("n", [3, 16, 37])
@pytest.mark.parametrize("gap", [0.3, 1e-3])
@pytest.mark.parametrize("span", SPANS)
def test_poles_at_every_distance(backend, span, gap, n):
    tensors = states(span, gap, n)
    precise = {"values": 2e-5, "gradients": 1e-3} if backend == "cpu" else {"values": 1e-2, "gradients": 2e-2}
    assert_equivalent(partial(fused_distance, kind="output"), tensors, backend=backend, **precise)
    rows = {name: tensor for name, tensor in tensors.items() if not name.endswith("b")}
    assert_equivalent(partial(fused_distance, kind="aligned"), rows, backend=backend, **precise)
