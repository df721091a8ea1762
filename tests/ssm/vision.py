"""A stand-in for MambaVision's mixer, with its parameter names and its doubled bias of the step size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MambaVisionMixer(nn.Module):
    def __init__(self, d_model: int = 12, d_state: int = 3, dt_rank: int = 2, width: int = 3) -> None:
        super().__init__()
        half = d_model // 2
        self.d_state, self.dt_rank, self.d_inner = d_state, dt_rank, d_model
        self.in_proj, self.out_proj = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.x_proj = nn.Linear(half, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, half)
        self.A_log, self.D = nn.Parameter(torch.randn(half, d_state)), nn.Parameter(torch.randn(half))
        self.conv1d_x = nn.Conv1d(half, half, width, groups=half, bias=False)
        self.conv1d_z = nn.Conv1d(half, half, width, groups=half, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        parts = zip(self.in_proj(hidden_states).chunk(2, -1), (self.conv1d_x, self.conv1d_z), strict=True)
        x, z = (F.silu(F.conv1d(y.mT, conv.weight, padding="same", groups=y.shape[-1])).mT for y, conv in parts)
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(dt) + self.dt_proj.bias)  # the bias once more, as in the published code
        A = -torch.exp(self.A_log)
        self.scans = [{"delta": delta, "A": A, "B": B, "C": C}]
        state, outputs = torch.zeros(len(x), x.shape[-1], self.d_state, dtype=x.dtype), []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            state = torch.exp(step * A) * state + step * B[:, t, None] * x[:, t, :, None]
            outputs.append((state * C[:, t, None]).sum(-1) + self.D * x[:, t])
        return self.out_proj(torch.cat([torch.stack(outputs, dim=1), z], dim=-1))


def mixer(module: str = "mambavision.models.mamba_vision") -> MambaVisionMixer:
    """A random mixer under the name that the library gives it."""
    return type("MambaVisionMixer", (MambaVisionMixer,), {"__module__": module})()
