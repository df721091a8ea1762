"""The fused distances as one operator: the derivatives are computed with the value, so the gradient is one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infssm.ops.distances import KINDS, Pair
from infssm.ops.distances.pieces import value_and_slopes
from infssm.ops.registered.library import define, differentiate, given, keep_slopes, matrix, native, new
from infssm.ops.triton import distance as _triton


class StatePair(NamedTuple):
    """Old and new states as rows [tokens, n], or the derivatives by them; None for what is absent or not wanted."""

    old_a: Tensor | None
    old_c: Tensor | None
    new_a: Tensor | None
    new_c: Tensor | None
    old_b: Tensor | None
    new_b: Tensor | None


_SCHEMA = (
    "distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, Tensor? old_b, Tensor? new_b, str kind,"
    " bool soft, bool to_old, bool to_new, bool triton) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""The value, then its derivative by each tensor, empty where it is not wanted or the kind does not see the tensor."""


def _fake(*args: Any) -> tuple[Tensor, ...]:
    """The outputs, uninitialised."""
    *tensors, kind, _, to_old, to_new, _ = args
    sees, like = KINDS[kind].sees, tensors[1]
    wanted = ((to_old, "a"), (to_old, "c"), (to_new, "a"), (to_new, "c"), (to_old, "b"), (to_new, "b"))
    slopes = (
        new(like, *tensor.shape) if want and tensor is not None and name in sees else new(like, 0)
        for tensor, (want, name) in zip(tensors, wanted, strict=True)
    )
    return new(like, *like.shape[:-1]), *slopes


def _distance(*args: Any) -> tuple[Tensor, ...]:
    *tensors, kind, soft, _, _, _ = args
    value, *slopes = outputs = _fake(*args)
    sure = torch.empty_like(value).view(-1)
    states, derivatives = (StatePair(*map(matrix, map(given, some))) for some in (tensors, slopes))
    kept = (value.view(-1), sure, derivatives)
    if native.distance(kind, soft, torch.get_num_threads(), states, *kept):
        pair = Pair(*tensors, soft=soft).map(lambda x: x.detach().reshape(-1, x.shape[-1]))
        _mend(outputs, (sure == 0).nonzero().squeeze(-1), kind, pair)
    return outputs


def _triton_distance(*args: Any) -> tuple[Tensor, ...]:
    *tensors, kind, soft, _, _, _ = args
    value, *slopes = outputs = _fake(*args)
    _triton.forward(kind, soft, [matrix(tensor) for tensor in tensors], value, [given(slope) for slope in slopes])
    return outputs


def _mend(outputs: tuple[Tensor, ...], rows: Tensor, kind: str, pair: Pair) -> None:
    """Replace the results of the systems ``rows``, of which float32 was not sure, by the formula's in float64."""
    value, *slopes = outputs
    wanted = [slope.numel() > 0 for slope in slopes]
    few = pair.map(lambda x: x[rows].double())
    for tensor, want in zip(few.tensors, wanted, strict=True):
        if tensor is not None:
            tensor.requires_grad_(want)
    with _autograd_inside():
        exact, found = value_and_slopes(KINDS[kind].formula, few, wanted)
    _place(rows, (value, *slopes), (exact, *found))


def _place(rows: Tensor, outputs: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    for output, part in zip(outputs, found, strict=True):
        if part is not None and output.numel():
            output.view(-1, *part.shape[1:])[rows] = part.float()


def _autograd_inside() -> Any:
    """Autograd inside of an operator, whose kernels run below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded - excluded)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradients, from that of the value and the derivatives that were computed with it."""
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    rows = grad.unsqueeze(-1)
    slopes = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    found = (rows * slope if need and slope.numel() else None for slope, need in slopes)
    return *found, None, None, None, None, None


distance = define(_SCHEMA, _distance, _fake, triton=_triton_distance)
differentiate("distance", _autograd, keep_slopes)
