"""The selective scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import CHUNK, Cut, add_up, parts_of, run, scan_arguments, strides, turned

if TYPE_CHECKING:
    from infssm.ops.scan import ScanInputs

__all__ = ["CHUNK", "backward", "forward"]


def _arguments(x: ScanInputs) -> tuple[Cut, dict[str, Any]]:
    """The cut, and what both kernels take."""
    cut = Cut(x.u.shape[0], x.u.shape[1], x.B.shape[2], x.u.shape[2], x.A.shape[1])
    own = {"A": turned(x.A), "initial_state": turned(x.initial_state), "CHUNK": CHUNK}
    return cut, scan_arguments(x) | own | cut.sizes


def forward(x: ScanInputs, out: Any) -> None:
    """Fill the outputs that are not None."""
    from infssm.ops.triton.kernels.scan import forward as kernel

    cut, inputs = _arguments(x)
    end = None if out.last is None else new(out.y, *out.last.mT.shape)
    means = {"a_sum": out.a, "delta_sum": out.delta, "zoh_sum": out.zoh}
    sums = {name: parts_of(mean, cut.blocks) for name, mean in means.items()}
    run(kernel, cut.programs, out.y, inputs, {"y": out.y, "last": end, "saved": out.saved}, sums, warps=cut.warps)
    for name, mean in means.items():
        if mean is not None:
            add_up(mean, sums[name])
            mean.div_(cut.size)
    if end is not None:
        out.last.copy_(end.mT)


def backward(x: ScanInputs, saved: Tensor, grads: Any, found: Any) -> None:
    """Fill the gradients of the inputs that are not None from those of the outputs."""
    from infssm.ops.triton.kernels.scan_backward import backward as kernel

    cut, inputs = _arguments(x)
    like = found.u
    given = {f"grad_{name}": grad for name, grad in grads._asdict().items()} | {"grad_last": turned(grads.last)}
    wanted = {f"d{name}": grad for name, grad in found._asdict().items()} | {"dA": found.A.mT}
    # Sums over batch and blocks of channels are added up in a second step.
    counts = dict.fromkeys(("dA", "dD", "ddelta_bias"), cut.batch) | dict.fromkeys(("dB", "dC"), cut.blocks)
    sums = {name: parts_of(wanted[name], count) for name, count in counts.items()}
    start = new(like, cut.batch, *found.A.mT.shape)
    history = new(like, cut.programs, CHUNK, cut.states, cut.columns)
    others = {"saved": saved, "history": history, "dinitial_state": start} | strides("y", grads.y)
    run(kernel, cut.programs, like, inputs, given, wanted, sums, others, warps=cut.warps)
    for name, parts in sums.items():
        add_up(wanted[name], parts)
    if found.initial_state is not None:
        found.initial_state.copy_(start.mT)
