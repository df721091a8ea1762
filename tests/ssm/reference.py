"""The distances from their definitions (Gram matrices, Cholesky factors, eigenvalues) in arithmetic of many digits."""

from functools import lru_cache

import mpmath as mp
import torch

from infssm.ssm import StateSpace


def digits(*poles):
    """Working digits: Gram matrices of clustered poles lose tens of digits, and what is left must still be 60."""
    repeated = any(len(set(p.tolist())) < len(p) for p in poles)
    return 60 + (80 if repeated else 20) * len(poles[0])


def separated(a):
    """Repeated poles moved apart by 1e-30: the subspace is continuous, its Gram matrix of powers is not invertible."""
    return [x + mp.mpf(10) ** -30 * sum(y == x for y in a[:i]) for i, x in enumerate(a)]


def to_mp(x):
    return [mp.mpc(v.real, v.imag) if x.is_complex() else mp.mpf(v) for v in x.tolist()]


def cross_gram(a, c, b, d):
    return mp.matrix(
        [[mp.conj(p) * q / (1 - mp.conj(x) * y) for y, q in zip(b, d, strict=True)] for x, p in zip(a, c, strict=True)]
    )


def inner_product_matrix(a, b):
    """Inner products of orthonormal bases of the two subspaces, through Cholesky factors of the Gram matrices."""
    ones, others = ([mp.mpf(1)] * len(x) for x in (a, b))
    left = mp.cholesky(cross_gram(a, ones, a, ones))
    right = mp.cholesky(cross_gram(b, others, b, others))
    half = _forward(left, cross_gram(a, ones, b, others))
    return _forward(right, half.H).H


def _forward(lower, rhs):
    """Solve ``lower x = rhs``."""
    n = lower.rows
    x = rhs.copy()
    for j in range(rhs.cols):
        for i in range(n):
            x[i, j] = (x[i, j] - mp.fdot((lower[i, k], x[k, j]) for k in range(i))) / lower[i, i]
    return x


def frobenius2(m):
    return mp.fsum(abs(v) ** 2 for v in m)


def angles(a, b):
    x = inner_product_matrix(a, b)
    product = x * x.H
    is_complex = any(isinstance(v, mp.mpc) for v in a)
    values = (mp.eighe if is_complex else mp.eigsy)(product, eigvals_only=True)
    return sorted((mp.acos(mp.sqrt(min(mp.mpf(1), max(mp.mpf(0), mp.re(v))))) for v in values), reverse=True)


@lru_cache
def martin(a, b):
    ones = [mp.mpf(1)] * len(a)
    dets = [mp.det(cross_gram(x, ones, y, ones)) for x, y in ((a, b), (a, a), (b, b))]
    return -mp.log(abs(dets[0]) ** 2 / mp.re(dets[1] * dets[2]))


def trace(m):
    return mp.fsum(mp.re(m[i, i]) for i in range(m.rows))


def exact_distance(old: StateSpace, new: StateSpace, kind: str):
    """The squared distance of two single systems ``[n]`` as an mpmath number."""
    with mp.workdps(digits(old.a, new.a)):
        a, c, b, d = to_mp(old.a), to_mp(old.c), to_mp(new.a), to_mp(new.c)
        if kind == "output":
            r = [x * y for x, y in zip(c, to_mp(old.b), strict=True)]
            s = [x * y for x, y in zip(d, to_mp(new.b), strict=True)]
            weights, poles = r + [-v for v in s], a + b
            return mp.re(mp.fsum(cross_gram(poles, weights, poles, weights)))
        if kind in ("simplified", "aligned"):
            old_gram, new_gram, cross = cross_gram(a, c, a, c), cross_gram(b, d, b, d), cross_gram(a, c, b, d)
            if kind == "simplified":
                return 1 - frobenius2(cross) / (trace(old_gram) * trace(new_gram))
            return 1 - frobenius2(cross) / mp.sqrt(frobenius2(old_gram) * frobenius2(new_gram))
        a, b = separated(a), separated(b)
        if kind == "chordal":
            return 2 * old.n - 2 * frobenius2(inner_product_matrix(a, b))
        if kind == "geodesic":
            return mp.fsum(t**2 for t in angles(a, b))
        value = martin(tuple(a), tuple(b))
        return {
            "martin": lambda: value,
            "fubini-study": lambda: mp.acos(mp.exp(-value / 2)) ** 2,
            "binet-cauchy": lambda: 1 - mp.exp(-value),
        }[kind]()


def relative_error(value: torch.Tensor, exact) -> float:
    """Relative error of one computed value."""
    with mp.workdps(60):
        return float(abs(mp.mpf(value.item()) - exact) / abs(exact))


def random_system(n, generator, *, radius=0.95, is_complex=False, dtype=torch.float64) -> StateSpace:
    """Poles spread over (-radius, radius), or over the disc."""
    a, phase = torch.rand(2, n, generator=generator, dtype=torch.float64)
    c, b, d, e = torch.randn(4, n, generator=generator, dtype=torch.float64)
    if is_complex:
        return StateSpace(torch.polar(radius * a.sqrt(), 6.28 * phase), torch.complex(c, d), torch.complex(b, e))
    return StateSpace(radius * (2 * a - 1), c, b).map(lambda x: x.to(dtype))


def perturbed(space: StateSpace, size, generator) -> StateSpace:
    """Each tensor plus noise of the given size."""
    return space.map(lambda x: x + size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype))
