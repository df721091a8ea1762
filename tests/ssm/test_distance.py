"""`distance` as an entry point: kinds, options, scalar transitions, batches, large token counts, errors."""

import re

import pytest
import torch

from infssm import ops as kernels
from infssm.errors import ConfigError
from infssm.ops.distances import pieces
from infssm.ssm import StateSpace, distance, gram, list_distances, principal_angles, register_distance
from infssm.ssm import distances as _distances
from tests.ssm.reference import random_system

KINDS = list_distances()
FUSED = [name for name in KINDS if "cpu" in kernels.KINDS[name].backends]


def batch(*lead, n=4, seed=0, dtype=torch.float64, radius=0.9):
    generator = torch.Generator().manual_seed(seed)
    a, c, b = torch.rand(3, *lead, n, generator=generator, dtype=torch.float64)
    return StateSpace(radius * (2 * a - 1), 2 * c - 1, 2 * b - 1).map(lambda x: x.to(dtype))


def test_the_kinds():
    assert set(KINDS) >= {
        *("simplified", "aligned", "martin", "fubini-study", "binet-cauchy", "chordal", "geodesic", "output")
    }
    with pytest.raises(ConfigError, match=r"unknown distance 'martn'; did you mean 'martin'\?"):
        distance(batch(), batch(), kind="martn")


def test_a_registered_kind_is_used(monkeypatch):
    monkeypatch.setattr(_distances._REGISTERED, "_items", dict(_distances._REGISTERED._items))

    @register_distance("poles")
    def poles(old, new, *, power=2):
        return (old.a - new.a).abs().pow(power).sum(-1)

    old, new = batch(3), batch(3, seed=1)
    torch.testing.assert_close(distance(old, new, kind="poles", power=3), (old.a - new.a).abs().pow(3).sum(-1))
    assert "poles" in list_distances()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_broadcasting_equal_a_loop(kind):
    old, new = batch(1, 3), batch(2, 1, seed=1)
    got = distance(old, new, kind=kind)
    assert got.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = distance(old.map(lambda x: x[0, j]), new.map(lambda x: x[i, 0]), kind=kind)  # noqa: B023
            torch.testing.assert_close(got[i, j], one)
    assert distance(batch(0), batch(0), kind=kind).shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_large_token_counts_go_in_chunks_with_the_same_values_and_gradients(kind, monkeypatch):
    old, new = batch(3, 7), batch(3, 7, seed=1).map(lambda x: x.requires_grad_())
    whole = distance(old, new, kind=kind)
    expected = torch.autograd.grad(whole.square().sum(), (new.a, new.c, new.b), allow_unused=True)
    monkeypatch.setattr(pieces, "CPU_ELEMENTS", 4 * 16)
    by_pieces = distance(old, new, kind=kind)
    torch.testing.assert_close(by_pieces, whole)
    got = torch.autograd.grad(by_pieces.square().sum(), (new.a, new.c, new.b), allow_unused=True)
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("a gradient nobody asked for"))
    with torch.no_grad():
        torch.testing.assert_close(distance(old, new, kind=kind), whole)


def test_large_token_counts_keep_no_square_matrices(monkeypatch):
    monkeypatch.setattr(pieces, "CPU_ELEMENTS", 16 * 16 * 8)
    old, new = batch(64, n=16), batch(64, n=16, seed=1).map(lambda x: x.requires_grad_())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        distance(old, new, kind="output").sum().backward()
    # The squares of one piece (8 tokens) come and go; nothing grows with tokens * n * n.
    assert kept
    assert max(kept) <= 8 * 16 * 16


def test_equality_of_the_whole_tensor_is_not_that_of_a_chunk(monkeypatch):
    monkeypatch.setattr(pieces, "CPU_ELEMENTS", 16)
    old, other = batch(3), batch(3, seed=1)
    new = StateSpace(torch.cat([old.a[:2], other.a[2:]]), old.c)
    assert (distance(old, new, equality="tensor") > 0).all()
    assert (distance(old, new)[:2] == 0).all()


@pytest.mark.parametrize("kind", ["simplified", "aligned", "output"])
def test_silent_systems_have_distance_zero_and_finite_gradients(kind):
    space = batch(2)
    silent = StateSpace(space.a, torch.zeros_like(space.c), torch.zeros_like(space.c))
    new = silent.map(lambda x: x.clone().requires_grad_())
    value = distance(silent, new, kind=kind)
    assert (value == 0).all()
    grads = torch.autograd.grad(value.sum(), (new.a, new.c))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind):
    old, new = batch(5), batch(5, seed=1)
    compiled = torch.compile(
        lambda a, c, b: distance(old, StateSpace(a, c, b), kind=kind, validate=False),
        backend="aot_eager",
        fullgraph=True,
    )
    leaves = [x.clone().requires_grad_() for x in (new.a, new.c, new.b)]
    value = compiled(*leaves)
    torch.testing.assert_close(value, distance(old, new, kind=kind))
    (grad,) = torch.autograd.grad(value.sum(), leaves[0])
    (expected,) = torch.autograd.grad(distance(old, StateSpace(*leaves), kind=kind).sum(), leaves[0])
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_transitions(kind):
    old, new = batch(6), batch(6, seed=1)
    old, new = (StateSpace(x.a[..., :1], x.c, x.b) for x in (old, new))
    a, b = old.a[..., 0], new.a[..., 0]
    cos2 = (1 - a**2) * (1 - b**2) / (1 - a * b) ** 2
    powers = torch.arange(600)
    responses = [(x.c * x.b).sum(-1, keepdim=True) * x.a**powers for x in (old, new)]
    expected = {
        "simplified": 1 - cos2,
        "aligned": 1 - cos2,
        "martin": -cos2.log(),
        "fubini-study": cos2.sqrt().arccos().square(),
        "binet-cauchy": 1 - cos2,
        "chordal": 2 - 2 * cos2,
        "geodesic": cos2.sqrt().arccos().square(),
        "output": (responses[0] - responses[1]).square().sum(-1),
    }[kind]
    torch.testing.assert_close(distance(old, new, kind=kind), expected, rtol=1e-9, atol=1e-12)
    if kind in ("simplified", "aligned"):
        wide = [StateSpace(x.a.expand_as(x.c), x.c) for x in (old, new)]
        torch.testing.assert_close(distance(*wide, kind=kind), expected, rtol=1e-9, atol=1e-12)
    assert principal_angles(old, new).shape == (6, 1)


def test_simplified_is_the_trace_formula():
    old, new = batch(9), batch(9, seed=1)
    cross, first, second = (
        gram(old.a, old.c, new.a, new.c),
        gram(old.a, old.c, old.a, old.c),
        gram(new.a, new.c, new.a, new.c),
    )
    traces = [g.diagonal(dim1=-2, dim2=-1).sum(-1) for g in (cross @ cross.mT, first, second)]
    torch.testing.assert_close(distance(old, new), 1 - traces[0] / (traces[1] * traces[2]))


def test_equality_rule_of_simplified():
    old = batch(3)
    leaf = old.a.clone()
    leaf[1] += 1e-3
    leaf[2] += 1e-7 * old.a[2].abs()
    leaf.requires_grad_()
    new = StateSpace(leaf, old.c)
    value = distance(old, new)
    assert value[0] == 0
    assert value[1] > 1e-2
    assert value[2] == 0
    value.sum().backward()
    assert (leaf.grad[[0, 2]] == 0).all()
    assert (leaf.grad[1] != 0).all()
    off = distance(old, new, equality="off")
    assert (off > 1e-2).all()
    torch.testing.assert_close(distance(old, new, equality="tensor"), off)
    assert (distance(old, StateSpace(old.a, old.c), equality="tensor") == 0).all()
    assert distance(old, StateSpace(old.a, 1.001 * old.c))[0] > 1e-2
    with pytest.raises(ConfigError, match="equality must be 'token', 'tensor' or 'off', got 'layer'"):
        distance(old, new, equality="layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_normalisation_takes_raw_states(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    raw = [StateSpace(*(2 * torch.randn(3, 8, 5, generator=generator, dtype=torch.float64))) for _ in range(2)]
    expected = distance(*(x.soft_normalized() for x in raw), kind=kind)
    got = distance(*(x.map(lambda t: t.to(dtype)) for x in raw), kind=kind, soft_normalize=True)
    assert got.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_fused_kernel_serves_where_it_can(monkeypatch):
    calls = []

    def operator(old_a, old_c, new_a, new_c, old_b, new_b, kind, raw, to_old, to_new, triton):
        calls.append((kind, raw, to_old, to_new))
        return (torch.zeros(old_a.shape[:-1]),)

    monkeypatch.setattr("infssm.ops.distance._distance", operator)
    monkeypatch.setattr("infssm.ops.distance.choose", lambda backend, *_: backend or "cpu")
    single, wide = [batch(2, seed=s, dtype=torch.float32) for s in (0, 1)], [batch(2), batch(2, seed=1)]
    for raw in (False, True):
        for kind in KINDS:
            distance(*single, kind=kind, soft_normalize=raw)
        assert calls == [(kind, raw, False, False) for kind in FUSED]
        calls.clear()
    distance(batch(dtype=torch.float32), single[0])
    distance(*single, equality="token")
    assert calls == [("simplified", False, False, False)] * 2
    calls.clear()
    for kind in KINDS:
        distance(single[0].map(lambda x: x.clone().requires_grad_()), single[1], kind=kind)
    assert calls == [(kind, False, True, False) for kind in FUSED]
    calls.clear()
    distance(*single, equality="tensor")
    distance(*single, equality="tensor", soft_normalize=True)
    torch.func.grad(lambda a: distance(StateSpace(a, a), single[0], kind="martin", validate=False).sum())(single[1].a)
    monkeypatch.undo()
    monkeypatch.setattr("infssm.ops.distance._distance", operator)
    distance(*wide, soft_normalize=True)
    monkeypatch.setattr("infssm.ops.backend.NATIVE", None)
    distance(*single, soft_normalize=True)
    assert not calls


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_equals_double_with_gradients(kind):
    old, new = batch(5, 3, n=17), batch(5, 3, n=17, seed=1)

    def run(cast):
        past = old.map(cast)
        leaves = new.map(lambda x: cast(x).requires_grad_())
        value = distance(past, leaves, kind=kind)
        grads = torch.autograd.grad(value.square().sum(), (leaves.a, leaves.c, leaves.b), materialize_grads=True)
        return [value.detach(), *grads]

    for narrow, wide in zip(run(torch.Tensor.float), run(torch.Tensor.double), strict=True):
        assert narrow.dtype == torch.float32
        assert (narrow - wide).norm() <= 1e-5 * wide.norm()


@pytest.mark.parametrize("kind", ["chordal", "geodesic", "martin", "output"])
def test_single_precision_under_function_transforms(kind):
    old, new = batch(3, dtype=torch.float32), batch(3, seed=1, dtype=torch.float32)

    def value(a):
        return distance(old, StateSpace(a, new.c, new.b), kind=kind, validate=False).sum()

    leaf = new.a.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(value)(new.a), torch.autograd.grad(value(leaf), leaf)[0])


@pytest.mark.parametrize("kind", FUSED)
def test_kernels_refuse_second_derivatives(kind):
    old = batch(3, dtype=torch.float32)
    new = batch(3, seed=1, dtype=torch.float32).map(lambda x: x.requires_grad_())
    value = distance(old, new, kind=kind)
    if not kernels.backend_report()["native"]:
        assert value.requires_grad
        return
    (slope,) = torch.autograd.grad(value.square().sum(), new.a, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        slope.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_widened(dtype):
    old, new = batch(4, dtype=dtype), batch(4, seed=1, dtype=dtype)
    for kind in KINDS:
        value = distance(old, new, kind=kind)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, distance(old.map(torch.Tensor.float), new.map(torch.Tensor.float), kind=kind))


def _with(space, **parts):
    return StateSpace(**{"a": space.a, "c": space.c, "b": space.b, **parts})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: _with(x, a=x.a / x.a.abs().max() * 1.25),
            r"new.a\[\d, \d\] = -?1.25 lies outside the open unit disc",
        ),
        (lambda x: _with(x, a=torch.ones_like(x.a)), r"new.a\[0, 0\] = 1 lies outside the open unit disc"),
        (lambda x: _with(x, c=x.c * torch.nan), r"new.c\[0, 0\] = nan is not finite"),
        (lambda x: _with(x, b=x.b * torch.inf), r"new.b\[0, 0\] = -?inf is not finite"),
        (lambda x: _with(x, a=x.a[..., :2]), r"new.a \(3, 2\) does not fit new.c \(3, 4\)"),
        (lambda x: _with(x, b=x.b[..., :2]), r"new.b \(3, 2\) does not fit new.c \(3, 4\)"),
        (lambda x: _with(x, u=x.a.unsqueeze(-2)), r"new.u \(3, 1, 4\) and new.v None do not fit new.c \(3, 4\)"),
        (lambda x: _with(x, u=x.a, v=x.a), r"new.u \(3, 4\) and new.v \(3, 4\) do not fit new.c \(3, 4\)"),
        (
            lambda x: _with(x, u=5 * torch.ones(3, 1, 4).double(), v=torch.ones(3, 1, 4).double()),
            r"new is unstable: the spectral radius of .* is \d+",
        ),
        (lambda x: _with(x, a=x.a + 0j), r"new.c is torch.float64 but new.a is torch.complex128"),
        (lambda x: x.map(lambda t: t[:2]), r"leading dimensions of old.c (3, 4) and new.c (2, 4) do not broadcast"),
        (lambda x: _with(x, a=x.a.int()), r"new.a must be a floating point tensor"),
    ],
)
def test_errors_name_the_argument_and_the_value(change, message):
    old = batch(3)
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises(ConfigError, match=pattern):
        distance(old, change(batch(3, seed=1)), kind="output")
    with pytest.raises(ConfigError, match=pattern):
        principal_angles(old, change(batch(3, seed=1)))


def test_soft_normalisation_of_a_real_and_a_complex_system_is_refused():
    old = batch(3)
    with pytest.raises(ConfigError, match="soft-normalisation acts on real systems only"):
        distance(old, old.map(lambda x: x + 0j), soft_normalize=True)


def test_unstable_complex_poles_are_named():
    generator = torch.Generator().manual_seed(0)
    system = random_system(3, generator, is_complex=True)
    with pytest.raises(ConfigError, match=r"old.a\[0\] = .*j lies outside"):
        distance(StateSpace(2 / system.a, system.c), system, soft_normalize=True)


def test_poles_that_soft_normalisation_rounds_to_one_are_named():
    raw = StateSpace(torch.tensor([0.5, 40.0]), torch.ones(2))
    with pytest.raises(ConfigError, match=r"old.a\[1\] = 1 lies outside"):
        distance(raw, raw, soft_normalize=True)


@pytest.mark.parametrize(("old_b", "which"), [(None, "old"), (torch.ones(4), "new")])
def test_output_without_b_names_the_fix(old_b, which):
    space = batch(dtype=torch.float32)
    with pytest.raises(ConfigError, match=rf"needs b, and {which}.b is None; give StateSpace\(a, c, b\)"):
        distance(StateSpace(space.a, space.c, old_b), StateSpace(space.a, space.c), kind="output")
