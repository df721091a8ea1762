"""Gram matrices against the truncated series, SciPy's Lyapunov solver and the Kronecker form."""

import numpy as np
import pytest
import scipy.linalg
import torch

from infssm.errors import ConfigError
from infssm.ssm import gram, gram_dense
from tests.ssm.reference import random_system


def stable(n, seed, radius=0.9, is_complex=False):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if is_complex else torch.float64
    A = torch.randn(n, n, generator=generator, dtype=dtype)
    return radius * A / torch.linalg.eigvals(A).abs().max(), torch.randn(2, n, generator=generator, dtype=dtype)


def series(A, C, B, D, terms=2000):
    total, left, right = 0, C, D
    for _ in range(terms):
        total = total + left.mH @ right
        left, right = left @ A, right @ B
    return total


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_diagonal_gram_is_the_series(is_complex):
    generator = torch.Generator().manual_seed(0)
    x, y = (random_system(n, generator, is_complex=is_complex) for n in (4, 3))
    expected = series(torch.diag(x.a), x.c[None], torch.diag(y.a), y.c[None])
    torch.testing.assert_close(gram(x.a, x.c, y.a, y.c), expected, rtol=1e-12, atol=1e-12)


def test_scalar_transition_broadcasts():
    generator = torch.Generator().manual_seed(0)
    x = random_system(4, generator)
    expected = gram(x.a[:1].expand(4), x.c, x.a, x.b)
    torch.testing.assert_close(gram(x.a[:1], x.c, x.a, x.b), expected)


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("radius", [0.1, 0.9, 0.9999])
def test_dense_self_gram_is_scipys_lyapunov_solution(radius, is_complex):
    A, C = stable(6, 0, radius, is_complex)
    expected = scipy.linalg.solve_discrete_lyapunov(A.mH.resolve_conj().numpy(), (C.mH @ C).numpy())
    np.testing.assert_allclose(gram_dense(A, C, A, C).numpy(), expected, rtol=1e-8, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_dense_cross_gram_is_the_kronecker_and_sylvester_solution(is_complex):
    A, C = stable(5, 0, is_complex=is_complex)
    B, D = stable(4, 1, is_complex=is_complex)
    got = gram_dense(A, C, B, D)
    system = np.eye(20) - np.kron(A.mH.resolve_conj().numpy(), B.mT.numpy())
    kronecker = np.linalg.solve(system, (C.mH @ D).numpy().reshape(-1)).reshape(5, 4)
    np.testing.assert_allclose(got.numpy(), kronecker, rtol=1e-9, atol=1e-11)
    inverse = torch.linalg.inv(A.mH)
    sylvester = scipy.linalg.solve_sylvester(inverse.numpy(), -B.numpy(), (inverse @ C.mH @ D).numpy())
    np.testing.assert_allclose(got.numpy(), sylvester, rtol=1e-7, atol=1e-9)


def test_dense_gram_of_a_diagonal_system_is_the_closed_form_and_batches():
    generator = torch.Generator().manual_seed(2)
    systems = [(random_system(3, generator), random_system(5, generator)) for _ in range(4)]
    x, y = zip(*systems, strict=True)
    stack = [torch.stack(t) for t in ([s.a for s in x], [s.c for s in x], [s.a for s in y], [s.c for s in y])]
    got = gram_dense(torch.diag_embed(stack[0]), stack[1], torch.diag_embed(stack[2]), stack[3])
    torch.testing.assert_close(got, gram(*stack), rtol=1e-12, atol=1e-12)


def test_nilpotent_transition_ends_after_n_terms():
    A = torch.diag(torch.full((4,), 3.0, dtype=torch.float64), 1)
    C = torch.ones(1, 5, dtype=torch.float64)
    torch.testing.assert_close(gram_dense(A, C, A, C), series(A, C, A, C, terms=5))


def test_dense_errors_name_the_argument():
    A, C = stable(3, 0)
    with pytest.raises(ConfigError, match=r"B is unstable, spectral radius 1\.25 >= 1"):
        gram_dense(A, C, A / 0.9 * 1.25, C)
    with pytest.raises(ConfigError, match=r"A must be square"):
        gram_dense(C, C, A, C)
    with pytest.raises(ConfigError, match=r"B holds a NaN"):
        gram_dense(A, C, A * torch.nan, C)
    with pytest.raises(ConfigError, match=r"shapes do not fit"):
        gram_dense(A, C, A, C[:1])
