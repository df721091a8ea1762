"""The fused distances as one operator: the derivatives are computed with the value, so the gradient is one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._distances import KINDS, Pair
from infssm.kernels._distances._pieces import value_and_slopes
from infssm.kernels._ops._library import define, differentiate, given, keep_slopes, matrix, native, new
from infssm.kernels._triton import distance as _triton

_SCHEMA = (
    "distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, Tensor? old_b, Tensor? new_b, str kind, bool raw,"
    " bool to_old, bool to_new, bool triton) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
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
    *tensors, kind, raw, _, _, _ = args
    value, *slopes = outputs = _fake(*args)
    sure = torch.empty_like(value).view(-1)
    unsure = native.distance(
        *(kind.replace("-", "_"), raw, torch.get_num_threads()),
        *(matrix(tensor) for tensor in tensors),
        *(value.view(-1), sure),
        *(matrix(given(slope)) for slope in slopes),
    )
    if unsure:
        _mend(outputs, (sure == 0).nonzero().squeeze(-1), kind, Pair(*tensors, raw=raw))
    return outputs


def _triton_distance(*args: Any) -> tuple[Tensor, ...]:
    *tensors, kind, raw, _, _, _ = args
    value, *slopes = outputs = _fake(*args)
    _triton.forward(kind, raw, [matrix(tensor) for tensor in tensors], value, [given(slope) for slope in slopes])
    return outputs


def _mend(outputs: tuple[Tensor, ...], rows: Tensor, kind: str, pair: Pair) -> None:
    """Replace the results of the systems ``rows``, of which float32 was not sure, by the formula's in float64."""
    value, *slopes = outputs
    wanted = [slope.numel() > 0 for slope in slopes]
    few = pair.map(lambda x: x.detach().reshape(-1, x.shape[-1])[rows].double())
    for tensor, want in zip(few.tensors, wanted, strict=True):
        if tensor is not None:
            tensor.requires_grad_(want)
    with _autograd_inside():
        exact, found = value_and_slopes(KINDS[kind].formula, few, wanted)
    value.view(-1)[rows] = exact.float()
    for slope, part in zip(slopes, found, strict=True):
        if part is not None:
            slope.view(-1, slope.shape[-1])[rows] = part.float()


def _autograd_inside() -> Any:
    """Autograd inside of an operator, whose kernels run below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded - excluded)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradients, from that of the value and the derivatives that were computed with it."""
    slopes = zip((given(slope) for slope in ctx.saved_tensors), ctx.needs_input_grad, strict=False)
    found = (
        None if grad is None or not need or slope is None else grad.unsqueeze(-1) * slope for slope, need in slopes
    )
    return *found, None, None, None, None, None


distance = define(_SCHEMA, _distance, _fake, triton=_triton_distance)
differentiate("distance", _autograd, keep_slopes)
