"""The distances in Triton against the reference in float64."""

from functools import partial

import pytest
import torch

from infssm.ops import fused_distance
from tests.ops.cases import assert_equivalent, assert_near, run_with_gradients
from tests.ops.test_fused import old_and_new
from tests.ops.test_output_distance import pair
from tests.ops.test_triton import moved, needs_triton

pytestmark = needs_triton
KINDS = ["simplified", "aligned", "martin"]
distance = partial(moved, fused_distance)


def normalised(states):
    return {name: torch.tanh(tensor / 2) for name, tensor in states.items()}


@pytest.mark.parametrize("kind", [*KINDS, "fubini-study", "binet-cauchy"])
@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4])
def test_distance(kind: str, gap: float) -> None:
    tolerance = 1e-6 / gap if kind == "simplified" else 1e-5  # its 1 - ratio has absolute precision only
    options = {"backend": "triton", "kind": kind, "values": max(1e-5, tolerance)}
    assert_equivalent(distance, old_and_new(17, gap), **options)
    assert_equivalent(distance, normalised(old_and_new(2, gap)), soft_normalize=False, **options)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("raw", [True, False])
def test_output_distance(gap: float, raw: bool) -> None:
    def function(old=(), **arguments):
        return distance(**old, **arguments, kind="output", soft_normalize=raw)

    for n in (1, 5, 17):
        old, new = pair(n, gap)
        old, new = (
            {f"{side}_{k}": v for k, v in zip("acb", t, strict=True)} for side, t in (("old", old), ("new", new))
        )
        old, new = (old, new) if raw else (normalised(old), normalised(new))
        exact = {name: tensor.double() for name, tensor in old.items()}
        values, gradients, weights = run_with_gradients(
            partial(function, exact), new, torch.float64, backend="reference"
        )
        actual, slopes, _ = run_with_gradients(partial(function, old), new, torch.float32, weights, backend="triton")
        assert_near(actual[0], values[0], 1e-5, "value")
        for name, expected in gradients.items():
            assert_near(slopes[name], expected, 1e-4, name)


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_transition(kind: str) -> None:
    states = old_and_new(5, 0.5, poles=1)
    rows = {name: states.pop(name) for name in ("old_c", "new_c")}  # simplified does not depend on them here

    def function(**poles):
        return distance(**{name: row.to(poles["old_a"].dtype) for name, row in rows.items()}, **poles, kind=kind)

    assert_equivalent(function, states, backend="triton")


@pytest.mark.parametrize("kind", [*KINDS, "fubini-study", "binet-cauchy"])
def test_equality_has_no_value_and_no_gradient(kind: str) -> None:
    outputs, gradients, _ = run_with_gradients(
        distance, old_and_new(16, 0.0), torch.float32, kind=kind, backend="triton"
    )
    assert outputs[0].abs().max() < 1e-12
    assert max(gradient.abs().max() for gradient in gradients.values()) < 1e-6


def test_simplified_equality_is_per_token() -> None:
    states = old_and_new(6, 0.0)
    states["new_c"][3, 2] += 0.1
    outputs, gradients, _ = run_with_gradients(distance, states, torch.float32, kind="simplified", backend="triton")
    assert outputs[0].nonzero().flatten().tolist() == [3]
    assert gradients["new_c"].abs().sum(-1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_with_its_token(kind: str) -> None:
    states = old_and_new(5, 0.5)
    states["new_a"][4, 2] = float("nan")
    assert distance(**states, kind=kind, backend="triton")[0].isnan().nonzero().flatten().tolist() == [4]


def test_what_has_no_kernel_is_served_by_the_reference() -> None:
    states = old_and_new(4, 0.5)
    for kind, extra in (("chordal", {}), ("output", {"old_b": states["old_c"], "new_b": states["new_c"]})):
        arguments = {name: tensor.clone().requires_grad_() for name, tensor in {**states, **extra}.items()}
        values = [distance(**arguments, kind=kind, backend=backend)[0] for backend in ("triton", "reference")]
        assert_near(*values, 1e-6, kind)
