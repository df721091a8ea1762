"""How every fused operation becomes an operator of `torch.library`, seen by autograd, `torch.compile` and export.

An operator takes float32 tensors. Its compiled kernel runs on the CPU; where it also has a Triton kernel, the last
argument ``bool triton`` selects that one (for CUDA tensors, or CPU tensors in Triton's interpreter). The public
functions choose a backend and convert; the compiled module checks shapes and strides, so operators can also be called
directly. Outputs that were not requested are empty tensors, because an operator always returns the same number of
tensors; kernels read them as absent.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from infssm.ops.backend import NATIVE

# None only where the module was not built, and then no operator is ever called.
native: Any = NATIVE

_library: Any = torch.library.Library("infssm", "DEF")  # type: ignore[no-untyped-call]
_PLAIN = (Tensor, Parameter)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register one operator; returns the function to call it by.

    kernel: computes the outputs. fake: returns uninitialised outputs of the same shapes. setup, backward: as
    ``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)`` of `torch.autograd.Function`; with both, the
    operator can be differentiated once. A ``Tensor[]`` must be the last argument; ``backward`` then returns one
    gradient for each of its members.

    This is `torch.library.register_autograd` without its per-call inspection of the schema. An ordinary eager call runs
    the kernel without the dispatcher, which would convert all arguments twice: forward and backward of a small layer of
    two directions take 230 us this way and 320 through the dispatcher. Compilation, export, transforms and modes see
    the operator.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"infssm::{name}", fake, lib=_library)
    operator = getattr(torch.ops.infssm, name).default
    arguments = operator._schema.arguments
    leading = len(arguments) - 1 if str(arguments[-1].type) == "List[Tensor]" else None
    if backward is None or setup is None:
        return lambda *args: _run(kernel if _is_eager(args) else operator, args)

    def autograd_function(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, *flat: Any) -> Any:
            args = flat if leading is None else (*flat[:leading], flat[leading:])
            output = _run(run, args)
            setup(ctx, args, output)
            return output if isinstance(output, Tensor) else tuple(output)

        # The kernels have no second derivative: asking for one must fail, not return 0.
        members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
        function: Any = type(f"Infssm{name.title()}", (torch.autograd.Function,), members)

        def differentiable(*args: Any) -> Any:
            if torch.is_grad_enabled():
                flat = args if leading is None else (*args[:leading], *args[leading])
                for arg in flat:
                    if isinstance(arg, Tensor) and arg.requires_grad:
                        return function.apply(*flat)
            return _run(run, args)

        return differentiable

    eager = autograd_function(kernel)
    _library.impl(name, autograd_function(operator), "Autograd")

    def call(*args: Any) -> Any:
        flat = args if leading is None else (*args[:leading], *args[leading])
        return eager(*args) if _is_eager(flat) else operator(*args)

    return call


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return function(*args)


def _is_eager(args: Any) -> bool:
    """Whether a call is ordinary eager execution: no trace, transform or mode is active, and all tensors are plain."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return False
    for arg in args:  # noqa: SIM110 - faster than all()
        if isinstance(arg, Tensor) and type(arg) not in _PLAIN:
            return False
    return True


def arguments(record: type[Any]) -> str:
    """The fields of a record of tensors and flags as the arguments of an operator."""
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool"}
    return ", ".join(f"{types[kind]} {name}" for name, kind in get_type_hints(record).items())


def given(tensor: Tensor | None) -> Any:
    """The tensor, or None for the empty tensor of an output that was not requested, as Triton's kernels expect."""
    return None if tensor is None or tensor.numel() == 0 else tensor


def rows(tensor: Any) -> Any:
    """The tensor, copied if its last dimension is not contiguous; kernels accept any other strides. None stays None."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def flat(tensor: Any) -> Any:
    """The tensor, contiguous. None stays None."""
    return tensor if tensor is None else tensor.contiguous()


def new(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised float32 tensor on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...] = ()) -> None:
    """Save inputs and ``outputs`` for the backward; these outputs become non-differentiable."""
    ctx.mark_non_differentiable(*outputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *outputs)
    ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]


def kept(ctx: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The inputs and outputs that `keep` saved."""
    tensors, count = ctx.saved_tensors, len(ctx.options)
    inputs = zip(tensors, ctx.options, strict=False)
    return [option if tensor is None else tensor for tensor, option in inputs], tensors[count:]


def asked_for(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """One entry per input: its gradient where it needs one, else None. `gradients` belong to the first inputs."""
    return tuple(grad if need else None for grad, need in zip_longest(gradients, ctx.needs_input_grad))
