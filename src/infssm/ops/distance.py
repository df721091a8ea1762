"""Distances between old and new states (mean transition, C, B) in one pass, soft-normalisation inside."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.backend import choose, in_float32
from infssm.ops.checks import expect_shape
from infssm.ops.distances import KINDS, Kind, Pair
from infssm.ops.distances.pieces import value_and_slopes
from infssm.ops.library import define, given, native
from infssm.ops.triton import distance as _triton


def fused_distance(
    old_a: Tensor,
    old_c: Tensor,
    new_a: Tensor,
    new_c: Tensor,
    *,
    kind: str,
    old_b: Tensor | None = None,
    new_b: Tensor | None = None,
    soft_normalize: bool = True,
    backend: str | None = None,
    **options: Any,
) -> Tensor:
    """Squared distance per token, `[...]`, of the soft-normalised states.

    old_a, new_a: [..., n] or [..., 1] (scalar transition); old_c, new_c: [..., n]; old_b, new_b: [..., n], which
    `output` needs and the others ignore. Differentiable in all of them. The kinds are those of the table in
    `infssm.ops.distances`. Real states of at most float32 with default options are served by kernels, where the kind
    has one; all others (float64, complex) by its formula in PyTorch. A pole outside the unit disc gives NaN for its
    token.

    soft_normalize: the states are raw; False takes them as they are, poles inside the unit disc.
    options: options of the kind, such as ``equality`` of `simplified`.
    """
    row = KINDS.get(kind) or _unknown(kind)
    if "b" not in row.sees:
        old_b = new_b = None
    tensors = (old_a, old_c, new_a, new_c, old_b, new_b)
    pair = Pair(*tensors, soft=soft_normalize)
    _check(row, pair)
    found = choose(backend, *tensors)
    # The kernels know only the defaults of all options, and no `torch.func` transforms.
    defaults = getattr(row.formula, "__kwdefaults__", None) or {}
    fused = found in row.backends and not torch._C._are_functorch_transforms_active()
    if not fused or (options and not options.items() <= defaults.items()):
        return row.reference(pair, **options)
    to_old, to_new = False, False
    if torch.is_grad_enabled():
        for i, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad:
                to_old, to_new = to_old or i in _OLD, to_new or i not in _OLD
    value: Tensor = _distance(*in_float32(tensors), kind, soft_normalize, to_old, to_new, found == "triton")[0]
    return value


_OLD = (0, 1, 4)  # places of the old states among the tensors of a pair


def _unknown(kind: str) -> NoReturn:
    raise ConfigError(f"unknown kind={kind!r}, expected one of {', '.join(KINDS)}")


def _check(row: Kind, pair: Pair) -> None:
    n = pair.old_c.shape[-1]
    if n == 0:
        raise ConfigError("distance: the systems have no states (n = 0); there is nothing to compare")
    shape = pair.old_c.shape
    if not pair.old_a.shape == pair.new_a.shape == pair.new_c.shape == shape:
        expect_shape("old_a", pair.old_a, (*shape[:-1], 1 if pair.old_a.shape[-1] == 1 else n))
        expect_shape("new_a", pair.new_a, pair.old_a.shape)
        expect_shape("new_c", pair.new_c, shape)
    if "b" in row.sees:
        if pair.old_b is None or pair.new_b is None:
            raise ConfigError(f"kind={row.name!r} needs old_b and new_b")
        if not pair.old_b.shape == pair.new_b.shape == shape:
            expect_shape("old_b", pair.old_b, shape)
            expect_shape("new_b", pair.new_b, shape)


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    """The value, then its derivative by each tensor: empty if it is not wanted or not seen by the kind."""
    *tensors, kind, _, to_old, to_new, _ = args
    sees, like = (KINDS.get(kind) or _unknown(kind)).sees, tensors[1]
    slopes = []
    for i, (tensor, name) in enumerate(zip(tensors, "acacbb", strict=True)):
        wanted = (to_old if i in _OLD else to_new) and tensor is not None and name in sees
        slopes.append(torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted else like.new_empty(0))
    return like.new_empty(like.shape[:-1]), *slopes


def _kernel(*args: Any) -> tuple[Tensor, ...]:
    *tensors, kind, soft, _, _, triton = args
    value, *slopes = outputs = _outputs(*args)
    states = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    if triton:
        flat = [None if state is None else state.view(-1, state.shape[-1]) for state in states]
        _triton.forward(kind, soft, flat, value, [given(slope) for slope in slopes])
        return outputs
    sure = torch.empty_like(value)
    of_states, of_slopes = Pair(*states), Pair(*slopes)  # type: ignore[arg-type]
    if native.distance(kind, soft, torch.get_num_threads(), of_states, value, sure, of_slopes):
        pair = Pair(*tensors, soft=soft).map(lambda x: x.detach().reshape(-1, x.shape[-1]))
        _mend(outputs, (sure.view(-1) == 0).nonzero().squeeze(-1), kind, pair)
    return outputs


def _mend(outputs: tuple[Tensor, ...], rows: Tensor, kind: str, pair: Pair) -> None:
    """Replace the results of the systems ``rows``, where float32 may be imprecise, by float64 ones."""
    wanted = [slope.numel() > 0 for slope in outputs[1:]]
    few = pair.map(lambda x: x[rows].double())
    for tensor, want in zip(few.tensors, wanted, strict=True):
        if tensor is not None:
            tensor.requires_grad_(want)
    # Autograd inside of an operator, whose kernels run below it.
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded - excluded):
        exact, found = value_and_slopes(lambda *x: KINDS[kind].formula(Pair(*x, soft=pair.soft)), few.tensors, wanted)
    for output, part in zip(outputs, (exact, *found), strict=True):
        if part is not None and output.numel():
            output.view(-1, *part.shape[1:])[rows] = part.float()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradients, from that of the value and the derivatives that were computed with it."""
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    rows = grad.unsqueeze(-1)
    slopes = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    found = (rows * slope if need and slope.numel() else None for slope, need in slopes)
    return *found, None, None, None, None, None


_distance = define(
    "distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, Tensor? old_b, Tensor? new_b, str kind,"
    " bool soft, bool to_old, bool to_new, bool triton) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    _outputs,
    setup=_setup,
    backward=_backward,
)
