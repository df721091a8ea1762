"""The compiled kernels as `torch.library` operators: what their definitions share.

Every operator takes float32 CPU tensors; the public functions check and convert. Outputs that were not asked for are
empty tensors, because an operator always returns the same number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.ops.backend import NATIVE

# None only where the module was not built, and then no operator is ever called.
native: Any = NATIVE

_library: Any = torch.library.Library("infssm", "DEF")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    triton: Callable[..., Any] | None = None,
) -> Any:
    """Register one operator with its kernels and its fake; returns the callable operator.

    triton: the kernel for CUDA tensors. The operator's last argument, ``bool triton``, sends CPU tensors there too: in
    Triton's interpreter, where a call asked for it.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel if triton is None else _either(kernel, triton), "CPU")
    if triton is not None:
        _library.impl(name, triton, "CUDA")
    torch.library.register_fake(f"infssm::{name}", fake, lib=_library)
    return getattr(torch.ops.infssm, name).default


def _either(kernel: Callable[..., Any], triton: Callable[..., Any]) -> Callable[..., Any]:
    def pick(*args: Any) -> Any:
        return (triton if args[-1] else kernel)(*args)

    return pick


def arguments(record: type[Any]) -> str:
    """The fields of a record of tensors and flags as the arguments of an operator."""
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool"}
    return ", ".join(f"{types[kind]} {name}" for name, kind in get_type_hints(record).items())


def differentiate(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Register the gradient of operator `name`.

    As `torch.library.register_autograd`, but without its per-call inspection of the schema, which costs more than
    the rest of a small call: forward and backward of a small scan take 68 us this way, 96 and 126 by the library's
    own ways.
    """
    operator = getattr(torch.ops.infssm, name).default

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(*args)
        setup(ctx, args, output)
        return output

    # The kernels have no second derivative: asking for one must fail, not return 0.
    members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    function: Any = type(f"Infssm{name.title()}", (torch.autograd.Function,), members)

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return function.apply(*args)
        return below_autograd(*args)

    _library.impl(name, kernel, "Autograd")


def keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    """Save the derivatives that an operator returned beside its value."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def given(tensor: Tensor | None) -> Any:
    """None for an output that was not asked for, and for its gradient."""
    return None if tensor is None or tensor.numel() == 0 else tensor


def rows(tensor: Any) -> Any:
    """The tensor as the kernels read it: any strides, but the last dimension contiguous."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def flat(tensor: Any) -> Any:
    """The tensor without gaps, or None."""
    return tensor if tensor is None else tensor.contiguous()


def matrix(tensor: Tensor | None) -> Tensor | None:
    """The tensor as contiguous rows [-1, last dimension], or None."""
    if tensor is None or (tensor.dim() == 2 and tensor.is_contiguous()):
        return tensor
    return tensor.contiguous().view(-1, tensor.shape[-1])


def new(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised float32 tensor beside `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def asked_for(ctx: Any, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradients of those leading inputs that need one."""
    return [grad if need else None for grad, need in zip(gradients, ctx.needs_input_grad, strict=False)]
