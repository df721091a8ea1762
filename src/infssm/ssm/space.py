"""`StateSpace`, the record every distance compares, and soft-normalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infssm.errors import ConfigError


def soft_normalize(x: Tensor) -> Tensor:
    """Soft-normalisation ``SN(x) = 2 sigmoid(x) - 1 = tanh(x / 2)`` of a real tensor, elementwise.

    Args:
        x: ``[...]``, real.

    Returns:
        ``[...]`` in (-1, 1).
    """
    if x.is_complex():
        raise ConfigError("soft_normalize: x is complex; soft-normalisation is defined for real states only")
    return torch.tanh(x / 2)


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A state space system ``x' = A x + b input, output = c x`` with diagonal A, one per leading index.

    If u and v are given, A is ``diag(a) + sum_k u_k v_k^T``: diagonal plus low rank, as in S4 and in delta rules
    with a decay per channel. Its poles are not known; the `output` distance compares it by samples of its
    transfer function. The values are raw: no soft-normalisation is applied unless `soft_normalized` is called.

    Attributes:
        a: ``[..., n]`` diagonal of the transition, real or complex, or ``[..., 1]`` next to ``c: [..., n]``, which
            means the scalar transition ``A = a I`` of Mamba-2.
        c: ``[..., n]`` output row.
        b: ``[..., n]`` input column, or None; only the `output` distance needs it.
        mask: ``[batch, tokens]``, the leading indices, true where there is a token and not padding; None: everywhere.
        u, v: ``[..., rank, n]`` low-rank part of the transition, or None.
    """

    a: Tensor
    c: Tensor
    b: Tensor | None = None
    mask: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None

    @property
    def n(self) -> int:
        """Number of states."""
        return self.c.shape[-1]

    @property
    def is_scalar(self) -> bool:
        """Whether the transition is ``a I`` with more than one state (Mamba-2)."""
        return self.a.shape[-1] == 1 and self.n > 1

    @property
    def is_diagonal(self) -> bool:
        """Whether a holds the poles, because there is no low-rank part."""
        return self.u is None

    def map(self, fn: Callable[[Tensor], Tensor]) -> StateSpace:
        """Apply ``fn`` to each tensor but the mask."""
        b, u, v = (None if x is None else fn(x) for x in (self.b, self.u, self.v))
        return replace(self, a=fn(self.a), c=fn(self.c), b=b, u=u, v=v)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> StateSpace:
        """Apply ``fn``, which selects rows of the batch, to each tensor and to the mask."""
        return replace(self.map(fn), mask=None if self.mask is None else fn(self.mask))

    def without_padding(self) -> StateSpace:
        """The systems of all tokens that are not padding, ``[tokens, ..., n]``, as for a mean over tokens."""
        if self.mask is None:
            return self
        mask = self.mask
        return replace(self.map(lambda x: x.expand(*mask.shape, *x.shape[2:])[mask]), mask=None)

    def detach(self) -> StateSpace:
        """The same values, cut from the autograd graph."""
        return self.map(Tensor.detach)

    def soft_normalized(self) -> StateSpace:
        """Soft-normalise every real tensor of a diagonal system; others are stable already and stay as they are."""
        if not self.is_diagonal:
            return self
        return self.map(lambda x: x if x.is_complex() else soft_normalize(x))

    def with_conjugates(self) -> StateSpace:
        """Append the mirror image of a system stored as one half of its conjugate pairs, ``[..., n] -> [..., 2n]``."""
        if not self.a.is_complex():
            raise ConfigError("with_conjugates: a is real; only a complex system can be one half of conjugate pairs")
        if self.is_scalar or not self.is_diagonal:
            raise ConfigError(
                "with_conjugates: a scalar transition a I, or one with a low-rank part, has no conjugate half"
            )
        return self.map(lambda x: torch.cat([x, x.conj()], dim=-1))

    def dense(self) -> Tensor:
        """The transition A, ``[..., n, n]``."""
        A = torch.diag_embed(self.a.expand(self.c.shape))
        return A if self.u is None or self.v is None else A + self.u.mT @ self.v

    def to_poles(self) -> StateSpace:
        """The same system in diagonal form, complex if it has a low-rank part; O(n^3) for each system."""
        return self if self.is_diagonal else replace(self.from_dense(self.dense(), self.c, self.b), mask=self.mask)

    @classmethod
    def from_dense(cls, A: Tensor, C: Tensor, B: Tensor | None = None) -> StateSpace:
        """The modal (complex diagonal) form of a system with a full transition matrix.

        With ``A = V diag(a) V^-1`` (columns of V of unit length) the result has ``c = C V`` and ``b = V^-1 B``, sorted
        by the imaginary, then the real part of the eigenvalues, so that nearby systems pair their poles.
        `martin`, `fubini-study`, `binet-cauchy`, `chordal`, `geodesic` and `output` do not depend on coordinates and
        are exact for the dense system. `simplified` and `aligned` do: they are those of the modal coordinates, not of
        the coordinates A was given in (build those from `gram_dense`). Differentiable where eigenvalues are distinct.

        Args:
            A: ``[..., n, n]`` transition, spectral radius below 1.
            C: ``[..., n]`` or ``[..., 1, n]`` output row.
            B: ``[..., n]`` or ``[..., n, 1]`` input column.
        """
        n = A.shape[-1]
        if A.ndim < 2 or A.shape[-2] != n:
            raise ConfigError(f"from_dense: A must be square [..., n, n], got {tuple(A.shape)}")
        if not bool(torch.isfinite(A.detach()).all()):
            raise ConfigError("from_dense: A holds a NaN or infinite value")
        a, V = torch.linalg.eig(A)
        radius = float(a.detach().abs().max()) if a.numel() else 0.0
        if not radius < 1:
            raise ConfigError(f"from_dense: A is unstable, spectral radius {radius:.6g} >= 1; scale it below 1")
        rows: dict[str, Tensor] = {"C": C} if B is None else {"C": C, "B": B.mT if B.ndim == A.ndim else B}
        for name, row in rows.items():
            if row.ndim == A.ndim and row.shape[-2] == 1:
                rows[name] = row = row.squeeze(-2)
            if row.ndim != A.ndim - 1 or row.shape[-1] != n:
                shape = tuple(row.shape)
                raise ConfigError(f"from_dense: {name} must be one row of n = {n} values per system, got {shape}")
        c = (rows["C"].to(V.dtype).unsqueeze(-2) @ V).squeeze(-2)
        b = None if B is None else torch.linalg.solve(V, rows["B"].to(V.dtype).unsqueeze(-1)).squeeze(-1)
        # Sorted by the imaginary part, ties by the real one: a stable sort by the second key comes first.
        order = a.detach().real.sort(dim=-1, stable=True).indices
        order = order.gather(-1, a.detach().imag.gather(-1, order).sort(dim=-1, stable=True).indices)
        return cls(a, c, b).map(lambda x: x.gather(-1, order.expand(x.shape)))
