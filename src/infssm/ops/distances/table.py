"""The table of distances: name, inputs, invariances, backends, and formula in PyTorch of each.

The formula serves as the reference of the kernels and as the path of what they do not take (float64, complex poles,
second derivatives). A formula with the decorator `kind` is a row; its ``backends`` name the kernels that serve it in
float32: "cpu" one of the same name in src/cpp/distances, "triton" one in ops/triton/distance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infssm.ops.checks import compute_dtype
from infssm.ops.distances._pair import Pair

Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class Kind:
    """One distance.

    Attributes:
        name: what `distance(kind=...)` takes.
        sees: the tensors it depends on, of "acb".
        unchanged_by: changes of a system that it does not see.
        backends: those with a kernel for it beside the reference.
        summary: one line.
        formula: ``formula(pair, **options) -> [...]``.
    """

    name: str
    sees: str
    unchanged_by: str
    backends: tuple[str, ...]
    summary: str
    formula: Formula

    def reference(self, pair: Pair, **options: Any) -> Tensor:
        """The formula, in float64; the result has the precision of the states."""
        dtype = compute_dtype(*pair.tensors)
        with torch.autocast(pair.old_a.device.type, enabled=False):
            return self.formula(pair, **options).to(dtype.to_real() if dtype.is_complex else dtype)


KINDS: dict[str, Kind] = {}


def kind(
    name: str, *, sees: str, unchanged_by: str, backends: tuple[str, ...], summary: str
) -> Callable[[Formula], Formula]:
    """Enter the decorated formula into the table."""

    def add(formula: Formula) -> Formula:
        KINDS[name] = Kind(name, sees, unchanged_by, backends, summary, formula)
        return formula

    return add
