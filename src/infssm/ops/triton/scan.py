"""The selective scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import CHUNK, Cut, arranged, run, strides, turned

if TYPE_CHECKING:
    from infssm.ops.scan import ScanInputs

__all__ = ["CHUNK", "backward", "forward"]


class _Launch:
    """A scan's inputs by the names of the kernels' parameters, the cut, and the kernels' constants."""

    def __init__(self, x: ScanInputs) -> None:
        self.cut = Cut(x.u.shape[0], x.u.shape[1], x.B.shape[2], x.u.shape[2], x.A.shape[1])
        self.inputs = x._asdict() | {"A": turned(x.A), "initial_state": turned(x.initial_state)} | self.cut.sizes
        for name in ("u", "delta", "z", "B", "C"):
            self.inputs |= strides(name, x.u if self.inputs[name] is None else self.inputs[name])
        options = {"SOFTPLUS": x.delta_softplus, "REVERSE": x.reverse, "CHUNK": CHUNK}
        self.constants = options | self.cut.constants

    def run(self, kernel: Any, like: Tensor, **others: Any) -> None:
        """Run a kernel on the inputs and what else it reads or fills."""
        run(kernel, self.cut.programs, like, *arranged(kernel, self.inputs, others), **self.constants)


def forward(x: ScanInputs, out: Any) -> None:
    """Fill the outputs that are not None."""
    from infssm.ops.triton.kernels.scan import forward as kernel

    launch = _Launch(x)
    end = None if out.last is None else new(out.y, *out.last.mT.shape)
    means = {"a_sum": out.a, "delta_sum": out.delta, "zoh_sum": out.zoh}
    sums = {n: None if mean is None else new(out.y, launch.cut.blocks, *mean.shape) for n, mean in means.items()}
    launch.run(kernel, out.y, y=out.y, last=end, saved=out.saved, **sums)
    for name, total in sums.items():
        if total is not None:
            torch.sum(total, 0, out=means[name]).div_(launch.cut.size)
    if end is not None:
        out.last.copy_(end.mT)


def backward(x: ScanInputs, saved: Tensor, grads: Any, found: Any) -> None:
    """Fill the gradients of the inputs that are not None from those of the outputs."""
    from infssm.ops.triton.kernels.scan_backward import backward as kernel

    launch = _Launch(x)
    cut, like = launch.cut, found.u
    given = {f"grad_{name}": grad for name, grad in grads._asdict().items()} | {"grad_last": turned(grads.last)}
    wanted = {f"d{name}": grad for name, grad in found._asdict().items()} | {"dA": found.A.mT}
    # Sums over batch and blocks of channels are added up in a second step and a fixed order.
    parts = dict.fromkeys(("dA", "dD", "ddelta_bias"), cut.batch) | dict.fromkeys(("dB", "dC"), cut.blocks)
    sums = {n: None if wanted[n] is None else new(like, count, *wanted[n].shape) for n, count in parts.items()}
    launch.run(
        kernel,
        like,
        saved=saved,
        history=new(like, cut.programs, CHUNK, cut.states, cut.columns),
        **(given | strides("y", grads.y)),
        **(wanted | sums | {"dinitial_state": (start := new(like, cut.batch, *found.A.mT.shape))}),
    )
    for name, total in sums.items():
        if total is not None:
            wanted[name].copy_(total.sum(0))
    if found.initial_state is not None:
        found.initial_state.copy_(start.mT)
