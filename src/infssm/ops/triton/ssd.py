"""Mamba-2's scan in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import power_of_two, run, scan_arguments, strides

if TYPE_CHECKING:
    from infssm.ops.scan import ScanInputs

# Tokens of a chunk, the most states and channels of a tile, and warps: as large as the registers hold. The least of any
# that a product of matrices takes, and elements of the state that one program carries from chunk to chunk.
_ROWS, _STATES, _COLS, _WARPS = 64, 32, 32, 8
_LEAST, _CARRIED = 16, 1024


def rows(tokens: int) -> int:
    """Tokens of a chunk."""
    return _tile(tokens, _ROWS)


def saved_shape(x: ScanInputs) -> tuple[int, ...]:
    """The state before each chunk: [batch, chunks, heads, n, head size]."""
    (batch, tokens, channels), heads = x.u.shape, x.A.shape[0]
    return batch, -(-tokens // rows(tokens)), heads, x.B.shape[3], channels // heads


def _tile(count: int, most: int) -> int:
    return min(most, max(_LEAST, power_of_two(count)))


class _Launch:
    """What the kernels take by the names of their parameters, and how the work is cut."""

    def __init__(self, x: ScanInputs) -> None:
        self.shape = saved_shape(x)
        batch, chunks, heads, n, size = self.shape
        self.groups, self.like = x.B.shape[2], x.u
        # bfloat16 and float16 fit into tf32 without loss, so only what was computed from them is rounded to it.
        narrow = all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in (x.u, x.B, x.C))
        cols, states = _tile(size, _COLS), _tile(n, _STATES)
        sizes = {"tokens": x.u.shape[1], "chunks": chunks, "heads": heads, "groups": self.groups, "size": size, "n": n}
        tiles = {"elements": n * size, "ROWS": rows(x.u.shape[1]), "STATES": states, "COLS": cols}
        self.inputs = scan_arguments(x) | sizes | tiles | {"PRECISION": "tf32" if narrow else "ieee"}
        self.columns, self.blocks = -(-size // cols), -(-n // states)
        self.units = batch * chunks

    def run(self, kernel: Any, programs: int, **others: Any) -> None:
        """Run a kernel on what it names of the inputs, sizes and constants, and of `others`, which come first."""
        run(kernel, programs, self.like, self.inputs, others, warps=_WARPS)

    def similarities(self) -> Tensor:
        """C_i . B_j within the chunks."""
        from infssm.ops.triton.kernels.ssd import similarities as kernel

        tokens = self.inputs["ROWS"]
        similar = new(self.like, *self.shape[:2], self.groups, tokens, tokens)
        self.run(kernel, self.units * self.groups, similar=similar)
        return similar

    def carried(self, rows: str, values: Tensor, states: Tensor) -> None:
        """The state before each chunk from B and u, or the gradient of the state after each from C and that of y."""
        from infssm.ops.triton.kernels.ssd import carry, chunk_states

        batch, _, heads, n, size = self.shape
        back = rows == "C"
        own = {"rows": self.inputs[rows], "values": values, "states": states, "through": new(values, *self.shape[:3])}
        own |= strides("rows", own["rows"]) | strides("values", values)
        self.run(chunk_states, self.units * heads * self.columns * self.blocks, ENTERING=back, **own)
        programs = batch * heads * -(-n * size // _CARRIED)
        self.run(carry, programs, REVERSE=back, COLS=_CARRIED, **own)


def forward(x: ScanInputs, y: Tensor, plain: Tensor | None, saved: Tensor | None) -> None:
    """Fill y, and y before skip and gate and the state before each chunk if requested."""
    from infssm.ops.triton.kernels.ssd import outputs as kernel

    launch = _Launch(x)
    states = new(y, *launch.shape) if saved is None else saved
    launch.carried("B", x.u, states)
    programs = launch.units * launch.shape[2] * launch.columns
    launch.run(kernel, programs, similar=launch.similarities(), states=states, y=y, plain=plain)


def backward(x: ScanInputs, plain: Tensor | None, saved: Tensor, grad: Tensor, found: ScanInputs) -> None:
    """Fill the gradients of the inputs that are not None from that of y."""
    from infssm.ops.triton.kernels import ssd_backward as kernels

    launch = _Launch(x)
    units, heads = launch.units, launch.shape[2]
    dy = grad
    if x.z is not None:
        dy = new(grad, *grad.shape)
        gate = {"grad": grad, "plain": plain, "dy": dy, "dz": found.z} | strides("y", grad)
        launch.run(kernels.gate, units * heads * launch.columns, **gate)
    pulled = new(grad, *launch.shape)
    launch.carried("C", dy, pulled)
    # Sums over chunks are added up in a second step and a fixed order.
    dA, dD = (None if total is None else new(grad, *launch.shape[:3]) for total in (found.A, found.D))
    given = {"states": saved, "pulled": pulled, "dy": dy} | strides("y", dy)
    wanted = {"du": found.u, "ddelta": found.delta, "dA": dA, "dD": dD}
    launch.run(kernels.inputs, units * heads, similar=launch.similarities(), **given, **wanted)
    launch.run(kernels.projections, units * launch.groups * launch.blocks, dB=found.B, dC=found.C, **given)
    for total, parts in ((found.A, dA), (found.D, dD)):
        if total is not None and parts is not None:
            torch.sum(parts, (0, 1), out=total)
    if found.delta_bias is not None:
        torch.sum(found.delta, (0, 1), out=found.delta_bias)
