"""The selective scan of this library and of others, on the same values, each in its own layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._torchvision import torchvision
from infssm.ops import selective_scan


class ScanProblem:
    """Inputs of one scan with gate, skip, bias and softplus, and calls of every implementation."""

    def __init__(self, batch: int, tokens: int, channels: int, n: int) -> None:
        torch.manual_seed(0)
        self.size = batch * tokens * channels * n
        self.u, self.delta, self.z, self.grad = (torch.randn(batch, tokens, channels) for _ in range(4))
        self.A = -torch.arange(1.0, n + 1).repeat(channels, 1)
        self.B, self.C = torch.randn(batch, tokens, n), torch.randn(batch, tokens, n)
        self.D, self.bias = torch.randn(channels), torch.randn(channels) - 4
        self.grad_a = torch.randn(batch, tokens, n)
        names = ("u", "delta", "A", "B", "C", "D", "z", "bias")
        self.inputs = [getattr(self, name).requires_grad_() for name in names]

    def ours(self, backend: str | None = None, **options: object) -> Tensor:
        u, delta, A, B, C, D, z, bias = self.inputs
        return selective_scan(u, delta, A, B, C, D, z, bias, True, backend=backend, **options)

    def mambapy(self) -> Tensor:
        """mambapy's MambaBlock.selective_scan, with the bias, softplus and gate its caller adds."""
        from mambapy.mamba import MambaBlock

        u, delta, A, B, C, D, z, bias = self.inputs
        return MambaBlock.selective_scan(None, u, F.softplus(delta + bias), A, B, C, D) * F.silu(z)

    def transformers(self, pscan: bool) -> Tensor:
        """transformers' CPU path; it works on [batch, channels, tokens]."""
        torchvision()  # transformers imports it; this makes a CPU torch with a CUDA torchvision work
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        u, delta, A, B, C, D, z, bias = self.inputs
        rows = (tensor.mT for tensor in (u, delta))
        return mamba_selective_scan(*rows, A, B.mT, C.mT, D, z.mT, bias, True, use_mambapy=pscan).mT

    def backward(self, forward: Callable[[], Tensor]) -> None:
        torch.autograd.grad(forward(), self.inputs, self.grad)

    def with_states(self, backend: str | None = None) -> None:
        """Forward and backward with states in the same pass, both outputs used."""
        y, states = self.ours(backend, return_states=True)
        gradients = (self.grad, self.grad_a, torch.ones_like(states.delta))
        torch.autograd.grad((y, states.a, states.delta), self.inputs, gradients)

    def states_outside(self) -> None:
        """The same states computed beside the scan in plain PyTorch."""
        y = self.ours()
        _, delta, A, *_, bias = self.inputs
        dt = F.softplus(delta + bias)
        a = torch.exp(dt.unsqueeze(-1) * A).mean(2)
        torch.autograd.grad((y, a, dt.mean(-1)), self.inputs, (self.grad, self.grad_a, torch.ones_like(dt[..., 0])))


def forward_only(call: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run
