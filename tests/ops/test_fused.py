"""Mean states, convolution, norm and distances: every backend against the reference in float64."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import add_rms_norm, causal_conv1d, fused_distance, mean_states
from tests.ops.cases import assert_equivalent, assert_near, flatten

KINDS = ["simplified", "aligned", "martin", "fubini-study", "binet-cauchy"]
SUBSPACE = KINDS[2:]
few = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@few
@given(
    tokens=st.integers(1, 70),
    size=st.integers(1, 40),
    n=st.integers(1, 40),
    groups=st.sampled_from([None, 1, 3]),
    softplus=st.booleans(),
    zoh=st.booleans(),
    bias=st.booleans(),
)
def test_mean_states(backend, tokens, size, n, groups, softplus, zoh, bias) -> None:
    channels = size * (groups or 1)
    tensors = {"delta": randn(2, tokens, channels), "A": -4 * torch.rand(channels, n)}
    if bias:
        tensors["delta_bias"] = randn(channels)
    if not softplus:
        tensors["delta"] = tensors["delta"].abs() / 4
    options = {"groups": groups, "zoh": zoh, "delta_softplus": softplus}
    assert_equivalent(mean_states, tensors, backend=backend, **options)


def test_zoh_keeps_its_limit_at_zero(backend: str) -> None:
    A = torch.tensor([0.0, -1e-6, -1e-3, -0.4, -0.6, -30.0]).expand(8, 6)
    tensors = {"delta": torch.rand(1, 9, 8) + 0.1, "A": A}
    assert_equivalent(mean_states, tensors, backend=backend, zoh=True)
    states = mean_states(tensors["delta"], tensors["A"], zoh=True, backend=backend)
    assert_near(states.zoh[..., 0], states.delta, 1e-6, "(exp(delta A) - 1) / A at A = 0")


@few
@given(
    tokens=st.integers(1, 40),
    channels=st.integers(1, 97),
    width=st.integers(1, 6),
    silu=st.booleans(),
    reverse=st.booleans(),
    bias=st.booleans(),
)
def test_causal_conv1d(backend, tokens, channels, width, silu, reverse, bias) -> None:
    tensors = {"x": randn(2, tokens, channels), "weight": randn(channels, width)}
    if bias:
        tensors["bias"] = randn(channels)
    assert_equivalent(causal_conv1d, tensors, backend=backend, silu=silu, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_causal_conv1d_is_torch_conv1d(backend: str, reverse: bool) -> None:
    x, weight, bias = randn(2, 21, 300)[..., 10:59], randn(49, 4), randn(49)
    sequence = x.flip(1) if reverse else x
    expected = F.silu(F.conv1d(sequence.mT, weight.unsqueeze(1), bias, padding=3, groups=49)[..., :21].mT)
    actual = causal_conv1d(x, weight, bias, reverse=reverse, backend=backend)
    assert_near(actual, expected.flip(1) if reverse else expected, 1e-6, "conv1d")


@few
@given(rows=st.integers(1, 40), channels=st.integers(1, 97), residual=st.booleans())
def test_add_rms_norm(backend, rows, channels, residual) -> None:
    tensors = {"x": randn(rows, 2, channels), "weight": randn(channels), "residual": randn(rows, 2, channels, seed=1)}
    if residual:
        assert_equivalent(add_rms_norm, tensors, backend=backend, eps=1e-5)
    else:
        del tensors["residual"]
        assert_equivalent(partial(add_rms_norm, residual=None), tensors, backend=backend, eps=1e-5)


def test_add_rms_norm_is_torch_rms_norm(backend: str) -> None:
    x, residual, weight = randn(3, 5, 20).bfloat16(), randn(3, 5, 20, seed=1), randn(20)
    normed, total = add_rms_norm(x, residual, weight, eps=1e-6, backend=backend)
    assert normed.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert_near(total, x + residual, 0.0, "sum")
    assert_near(normed, F.rms_norm(x + residual, (20,), weight, 1e-6), 1e-2, "normed")


def old_and_new(n: int, gap: float, poles: int | None = None) -> dict[str, Tensor]:
    """Raw states; the new ones at distance `gap` from the old."""
    poles = poles or n
    old_a, old_c = torch.rand(20, poles, generator=torch.Generator().manual_seed(n)), randn(20, n)
    new_a, new_c = old_a + gap * randn(20, poles, seed=1), old_c + gap * randn(20, n, seed=2)
    return {"old_a": old_a, "old_c": old_c, "new_a": new_a, "new_c": new_c}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 16, 33, 100])
@pytest.mark.parametrize("gap", [1.0, 1e-2])
def test_fused_distance(backend: str, kind: str, n: int, gap: float) -> None:
    # 1 - ratio cancels in `simplified`; the reference does not avoid cancellation in float32 in the others either.
    tolerance = 1e-5 if backend == "cpu" and kind != "simplified" else 1e-3
    assert_equivalent(fused_distance, old_and_new(n, gap), kind=kind, backend=backend, values=tolerance, gradients=1e-3)


@pytest.mark.parametrize("kind", [*KINDS, "chordal", "geodesic"])
@pytest.mark.parametrize("poles", [None, 1], ids=["diagonal", "scalar"])
def test_normalised_states_are_taken_as_they_are(backend: str, kind: str, poles: int | None) -> None:
    states = {name: torch.tanh(tensor / 2) for name, tensor in old_and_new(19, 0.3, poles=poles).items()}
    raw = fused_distance(*(2 * torch.atanh(tensor) for tensor in states.values()), kind=kind, backend=backend)
    take = partial(fused_distance, kind=kind, soft_normalize=False)
    assert_near(take(**states, backend=backend), raw, 1e-4, "raw states")
    rows = {name: states.pop(name) for name in ("old_c", "new_c")} if poles == 1 else {}  # no slope by c to compare
    assert_equivalent(partial(take, **rows), states, backend=backend, values=1e-4, gradients=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_silent_systems_have_no_distance(backend: str, kind: str) -> None:
    if backend == "reference":  # 0 / 0 there
        assert fused_distance(*torch.zeros(4, 2, 3), kind="martin", backend=backend).tolist() == [0, 0]
        return
    old_a, new_a = old_and_new(5, 0.5)["old_a"], old_and_new(5, 0.5)["new_a"].requires_grad_()
    silent = torch.zeros(20, 5)
    value = fused_distance(old_a, silent, new_a, silent, kind=kind, backend=backend)
    assert value.isfinite().all()
    assert kind in SUBSPACE or not value.any()
    value.sum().backward()
    assert new_a.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("gap", [1e-3, 1e-4])
def test_compiled_distance_keeps_small_values(backend: str, kind: str, gap: float) -> None:
    if backend == "cpu":
        assert_equivalent(fused_distance, old_and_new(16, gap), kind=kind, backend=backend, values=1e-5)
    else:
        value = fused_distance(*(t.double() for t in old_and_new(16, gap).values()), kind=kind, backend=backend)
        assert (value > 0).all()
        assert (value < 100 * gap**2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_transition(backend: str, kind: str) -> None:
    states = old_and_new(5, 0.5, poles=1)
    value = fused_distance(**states, kind=kind, backend=backend)
    if kind in SUBSPACE:
        repeated = {**states, "old_c": states["old_c"][:, :1], "new_c": states["new_c"][:, :1]}
    else:
        repeated = {**states, "old_a": states["old_a"].expand(20, 5), "new_a": states["new_a"].expand(20, 5)}
    assert_near(value, fused_distance(**repeated, kind=kind, backend=backend), 1e-5, "repeated poles")
    leaf = states["new_a"].clone().requires_grad_()
    wide = states["new_a"].double().clone().requires_grad_()
    exact = {name: tensor.double() for name, tensor in states.items()}
    fused_distance(**{**states, "new_a": leaf}, kind=kind, backend=backend).sum().backward()
    fused_distance(**{**exact, "new_a": wide}, kind=kind, backend="reference").sum().backward()
    assert_near(leaf.grad, wide.grad, 1e-4, "gradient of the one pole")


def test_distances_are_their_formulas(backend: str) -> None:
    states = old_and_new(7, 0.7)
    a, c, b, d = (torch.tanh(tensor.double() / 2).numpy() for tensor in states.values())
    for t in range(20):
        cross = np.outer(c[t], d[t]) / (1 - np.outer(a[t], b[t]))
        old, new = (np.outer(v, v) / (1 - np.outer(p, p)) for p, v in ((a[t], c[t]), (b[t], d[t])))
        trace = (cross**2).sum()
        gap = a[t] - b[t]
        ratio = np.outer(gap, gap) / ((1 - np.outer(a[t], a[t])) * (1 - np.outer(b[t], b[t])))
        expected = {
            "simplified": 1 - trace / (np.trace(old) * np.trace(new)),
            "aligned": 1 - trace / (np.linalg.norm(old) * np.linalg.norm(new)),
            "martin": np.log1p(ratio).sum(),
            "fubini-study": np.arccos(np.exp(-np.log1p(ratio).sum() / 2)) ** 2,
            "binet-cauchy": 1 - np.exp(-np.log1p(ratio).sum()),
        }
        for kind, value in expected.items():
            actual = fused_distance(*(tensor[t] for tensor in states.values()), kind=kind, backend=backend)
            assert actual.item() == pytest.approx(value, rel=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_equality_has_no_value_and_no_gradient(backend: str, kind: str) -> None:
    states = old_and_new(16, 0.0)
    leaves = [states[name].clone().requires_grad_() for name in ("new_a", "new_c")]
    value = fused_distance(states["old_a"], states["old_c"], *leaves, kind=kind, backend=backend)
    grads = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    assert value.abs().max() < 1e-12
    assert max(grad.abs().max() for grad in grads) < 1e-6


def test_simplified_equality_is_per_token(backend: str) -> None:
    states = old_and_new(6, 0.0)
    states["new_c"][3, 2] += 0.1
    leaf = states["new_c"].clone().requires_grad_()
    value = fused_distance(**{**states, "new_c": leaf}, kind="simplified", backend=backend)
    value.sum().backward()
    others = torch.arange(20) != 3
    assert value[3] > 0
    assert leaf.grad[3].abs().max() > 0
    assert not value[others].any()
    assert not leaf.grad[others].any()


@pytest.mark.parametrize("kind", KINDS)
def test_distance_carries_nan(backend: str, kind: str) -> None:
    states = old_and_new(5, 0.5)
    states["new_a"][4, 2] = float("nan")
    value = fused_distance(**states, kind=kind, backend=backend)
    assert value.isnan().nonzero().flatten().tolist() == [4]


def test_threads_do_not_change_the_result() -> None:
    x, states = randn(4, 100, 300), [randn(3000, 16, seed=seed) for seed in range(4)]

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, randn(300, 4), -randn(300, 16).abs(), randn(300), *states)]
        value, weight, A, scale, *pair = leaves
        outputs = [
            causal_conv1d(value, weight),
            *add_rms_norm(value, value, scale, eps=1e-5),
            *flatten(mean_states(value, A, delta_softplus=True)),
            *(fused_distance(*pair, kind=kind) for kind in KINDS),
        ]
        return [*outputs, *torch.autograd.grad(sum(output.sum() for output in outputs), leaves)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(before)
    for left, right in zip(one, two, strict=True):
        assert_near(right, left.detach(), 1e-6, "two threads against one")


def test_empty_inputs(backend: str) -> None:
    assert causal_conv1d(torch.zeros(0, 4, 3), torch.zeros(3, 4), backend=backend).shape == (0, 4, 3)
    assert add_rms_norm(torch.zeros(0, 3), None, torch.ones(3), eps=1e-5, backend=backend)[0].shape == (0, 3)
    empty = torch.zeros(0, 3)
    assert fused_distance(empty, empty, empty, empty, kind="martin", backend=backend).shape == (0,)
    assert [t.shape for t in flatten(mean_states(torch.zeros(2, 0, 3), torch.zeros(3, 2), backend=backend))] == [
        (2, 0, 2),
        (2, 0),
    ]


def test_reference_passes_gradcheck() -> None:
    def leaf(*shape: int, seed: int = 0) -> Tensor:
        return randn(*shape, seed=seed).double().requires_grad_()

    check = torch.autograd.gradcheck
    for kind in KINDS:
        assert check(partial(fused_distance, kind=kind), [leaf(3, 4, seed=seed) for seed in range(4)])
    for reverse in (False, True):
        assert check(partial(causal_conv1d, reverse=reverse), [leaf(1, 5, 3), leaf(3, 4), leaf(3)])
    assert check(partial(add_rms_norm, eps=1e-5), [leaf(2, 5), leaf(2, 5, seed=1), leaf(5)])
    assert check(lambda delta, A: mean_states(delta, A, delta_softplus=True, zoh=True), [leaf(1, 5, 3), leaf(3, 2)])


def test_names_the_wrong_argument() -> None:
    x = torch.zeros(2, 5, 3)
    with pytest.raises(ConfigError, match="weight has shape"):
        causal_conv1d(x, torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="bias has shape"):
        causal_conv1d(x, torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ConfigError, match="residual has shape"):
        add_rms_norm(x, x[..., :2], torch.zeros(3), eps=1e-5)
    with pytest.raises(ConfigError, match="A has shape"):
        mean_states(x, torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="new_c has shape"):
        fused_distance(x, x, x, x[:1], kind="martin")
    with pytest.raises(ConfigError, match="kind='procrustes'"):
        fused_distance(x, x, x, x, kind="procrustes")
