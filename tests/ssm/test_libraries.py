"""Probes of libraries besides transformers: mambapy itself, and stand-ins with the attributes of mamba_ssm and VMamba.

mamba_ssm and VMamba's kernels need a GPU to install; the stand-ins carry their parameter names, shapes and qualified
class names, and compute the quantities below from the published equations with explicit flips and no shared code.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.ssm import StateSpace, record_states, state_parameters
from infssm.ssm.probes.selective import every_row
from tests.compare import assert_rounding
from tests.ssm import vision

Scan = dict[str, Tensor]  # delta: [b, t, d]; A: [d, n]; B, C: [b, t, n] or [b, t, g, n]


def means(scan: Scan, b_mode: str = "raw") -> StateSpace:
    groups = scan["B"].shape[2] if scan["B"].ndim == 4 else 1
    delta, A = scan["delta"], scan["A"]
    abar = torch.exp(delta[..., None] * A)

    def mean(v: Tensor) -> Tensor:
        v = v.unflatten(2, (groups, -1)).mean(3)
        return v if scan["B"].ndim == 4 else v.squeeze(2)

    factor = {"raw": torch.ones(()), "euler": mean(delta[..., None]), "zoh": mean((abar - 1) / A)}[b_mode]
    return StateSpace(mean(abar), scan["C"], scan["B"] * factor)


def check(model: nn.Module, x: Tensor, mixers: dict[str, Any]) -> None:
    """The recorded states and their gradients equal those of the scans each mixer reported for the same forward."""
    for b_mode in ("raw", "euler", "zoh"):
        model.zero_grad()
        with record_states(model, b_mode=b_mode) as states:
            model(x)
        assert list(states) == list(mixers)
        expected = [means(scan, b_mode) for mixer in mixers.values() for scan in mixer.scans]
        for got, want in zip(states.flat(), expected, strict=True):
            for g, w in zip((got.a, got.c, got.b), (want.a, want.c, want.b), strict=True):
                torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
        parameters = [p for p in model.parameters() if p.requires_grad]
        sums = (total(states.flat()), total(expected))
        grads = [torch.autograd.grad(s, parameters, allow_unused=True, retain_graph=True) for s in sums]
        for g, w in zip(*grads, strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                torch.testing.assert_close(g, w, rtol=2e-3, atol=2e-4)
    used = {id(p) for p, g in zip(parameters, grads[0], strict=True) if g is not None}
    rows = [parameter for _, parameter, _ in state_parameters(model, "ABC-full")]
    assert {id(p) for p in rows} <= used


def test_adapters_are_not_parameters_of_the_states() -> None:
    """LoRA keeps a layer's weight and adds layers of its own to it."""
    layer = nn.Linear(3, 2)
    layer.lora_A = nn.Linear(3, 1)
    mixer = SimpleNamespace(dt_proj=layer, low_rank=nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2, bias=False)))
    found = [parameter for parameter, _ in every_row(mixer, "dt_proj", "low_rank", "missing")]
    expected = [layer.weight, layer.bias, *mixer.low_rank.parameters()]
    assert list(map(id, found)) == list(map(id, expected))


def total(states: list[StateSpace]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [(t * torch.randn(t.shape, generator=generator)).sum() for s in states for t in (s.a, s.c, s.b)]
    ).sum()


@pytest.mark.parametrize(
    "options", [{}, {"inner_layernorms": True, "bias": True, "conv_bias": False}, {"pscan": False}]
)
def test_mambapy(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from mambapy import mamba as mambapy

    torch.manual_seed(0)
    model = mambapy.Mamba(mambapy.MambaConfig(d_model=8, n_layers=2, d_state=4, dt_rank=3, **options))
    for name in ("selective_scan", "selective_scan_seq"):
        monkeypatch.setattr(mambapy.MambaBlock, name, _spy(getattr(mambapy.MambaBlock, name)))
    mixers = {f"layers.{i}.mixer": layer.mixer for i, layer in enumerate(model.layers)}
    check(model, torch.randn(2, 8, 8), mixers)


def _spy(scan: Any) -> Any:
    def wrapped(self: Any, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        self.scans = [{"delta": delta, "A": A, "B": B, "C": C}]
        return scan(self, x, delta, A, B, C, D)

    return wrapped


class Mamba(nn.Module):
    """Attributes of mamba_ssm's Mamba, and with ``bimamba_type`` of Vision Mamba's fork of it."""

    def __init__(self, d_model: int = 8, d_state: int = 4, dt_rank: int = 3, bimamba_type: str = "none") -> None:
        super().__init__()
        self.d_inner = 2 * d_model
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        for end in ("", "_b") if bimamba_type == "v2" else ("",):
            d = self.d_inner
            setattr(self, f"conv1d{end}", nn.Conv1d(d, d, 4, groups=d, padding=3))
            setattr(self, f"x_proj{end}", nn.Linear(d, dt_rank + 2 * d_state, bias=False))
            setattr(self, f"dt_proj{end}", nn.Linear(dt_rank, d))
        self.A_log = nn.Parameter(torch.randn(self.d_inner, d_state))
        if bimamba_type != "none":
            self.A_b_log = nn.Parameter(torch.randn(self.d_inner, d_state))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)
        self.bimamba_type, self.dt_rank, self.d_state = bimamba_type, dt_rank, d_state
        self.activation = "silu"

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # noqa: ARG002
        x, z = (self.in_proj.weight @ hidden_states.transpose(1, 2)).chunk(2, dim=1)
        forward = self._scan(x, "", self.A_log)
        self.scans = [forward]
        if self.bimamba_type == "v2":
            backward = self._scan(x.flip(-1), "_b", self.A_b_log)
            self.scans.append({k: v if k == "A" else v.flip(1) for k, v in backward.items()})
        elif self.bimamba_type == "v1":
            self.scans.append({**forward, "A": -torch.exp(self.A_b_log)})
        return self.out_proj((x * F.silu(z)).transpose(1, 2))

    def _scan(self, x: Tensor, end: str, A_log: Tensor) -> Scan:
        conv, x_proj, dt_proj = (getattr(self, f"{name}{end}") for name in ("conv1d", "x_proj", "dt_proj"))
        u = F.silu(conv(x)[..., : x.shape[-1]]).transpose(1, 2)
        dt, B, C = x_proj(u).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        return {"delta": F.softplus(dt_proj(dt)), "A": -torch.exp(A_log), "B": B, "C": C}


class Mamba2(nn.Module):
    """Attributes of mamba_ssm's Mamba2, with a gated MLP beside the state space part when d_ssm < d_inner."""

    def __init__(self, d_model: int = 8, d_state: int = 4, headdim: int = 4, ngroups: int = 2, d_ssm: int = 16) -> None:
        super().__init__()
        self.d_inner, self.d_ssm, self.d_state, self.ngroups = 2 * d_model, d_ssm, d_state, ngroups
        self.nheads, self.dt_limit = d_ssm // headdim, (0.5, 0.9)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=False)
        width = d_ssm + 2 * ngroups * d_state
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.dt_bias, self.A_log = nn.Parameter(torch.randn(self.nheads)), nn.Parameter(torch.randn(self.nheads))
        self.out_proj = nn.Linear(d_ssm, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        n = self.ngroups * self.d_state
        mlp = self.d_inner - self.d_ssm
        parts = [mlp, mlp, self.d_ssm, self.d_ssm + 2 * n, self.nheads]
        _, _, z, xbc, dt = self.in_proj(u).split(parts, dim=-1)
        xbc = F.silu(self.conv1d(xbc.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        x, B, C = xbc.split([self.d_ssm, n, n], dim=-1)
        delta = F.softplus(dt + self.dt_bias).clamp(*self.dt_limit)
        B, C = (v.unflatten(-1, (self.ngroups, -1)) if self.ngroups > 1 else v for v in (B, C))
        self.scans = [{"delta": delta, "A": -torch.exp(self.A_log)[:, None], "B": B, "C": C}]
        return self.out_proj(x * F.silu(z))


class Linear2d(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight[:, :, None, None], self.bias)


class SS2D(nn.Module):
    """Attributes of VMamba's SS2D: four scans along rows, columns, and both reversed."""

    def __init__(self, *, channel_first: bool = False, z: bool = True, grouped: bool = False) -> None:
        super().__init__()
        d_model, d, n, rank = 6, 12, 2, 2
        self.channel_first, self.disable_z, self.grouped = channel_first, not z, grouped
        self.in_proj = (Linear2d if channel_first else nn.Linear)(d_model, d * (1 + z), bias=False)
        self.conv2d = nn.Conv2d(d, d, 3, padding=1, groups=d)
        self.act = nn.SiLU()
        if grouped:  # the one-file version keeps the projections in grouped layers
            self.x_proj = nn.Linear(d, 4 * (rank + 2 * n), bias=False)
            self.dt_projs = nn.Linear(rank, 4 * d, bias=False)
        else:
            self.x_proj_weight = nn.Parameter(torch.randn(4, rank + 2 * n, d) / 4)
            self.dt_projs_weight = nn.Parameter(torch.randn(4, d, rank))
        self.dt_projs_bias = nn.Parameter(torch.randn(4, d))
        self.A_logs = nn.Parameter(torch.randn(4 * d, n))
        self.forward_core = partial(self.core, scan_mode="cross2d")

    def forward(self, x: Tensor) -> Tensor:
        y = self.in_proj(x)
        y = y if self.disable_z else y.chunk(2, dim=1 if self.channel_first else -1)[0]
        y = y if self.channel_first else y.permute(0, 3, 1, 2)
        self.forward_core(self.act(self.conv2d(y)))
        return x

    def core(self, u: Tensor, scan_mode: str) -> None:  # noqa: ARG002
        _, d, height, width = u.shape
        rows, columns = u.flatten(2), u.transpose(2, 3).flatten(2)
        sequences = [rows, columns, rows.flip(-1), columns.flip(-1)]
        order = torch.arange(height * width)
        by_column = order.view(height, width).T.flatten()
        orders = [order, by_column, order.flip(0), by_column.flip(0)]
        self.scans = []
        for k, (sequence, places) in enumerate(zip(sequences, orders, strict=True)):
            x_weight = self.x_proj.weight.chunk(4)[k] if self.grouped else self.x_proj_weight[k]
            dt_weight = self.dt_projs.weight.chunk(4)[k] if self.grouped else self.dt_projs_weight[k]
            n = self.A_logs.shape[1]
            dt, B, C = (x_weight @ sequence).split([2, n, n], dim=1)
            delta = F.softplus(dt_weight @ dt + self.dt_projs_bias[k][:, None])
            raster = torch.argsort(places)
            delta, B, C = (v.transpose(1, 2)[:, raster] for v in (delta, B, C))
            self.scans.append({"delta": delta, "A": -torch.exp(self.A_logs.view(4, d, n)[k]), "B": B, "C": C})


@pytest.fixture(autouse=True)
def official_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mamba, "__module__", "mamba_ssm.modules.mamba_simple")
    monkeypatch.setattr(Mamba2, "__module__", "mamba_ssm.modules.mamba2")
    monkeypatch.setattr(SS2D, "__module__", "classification.models.vmamba")


@pytest.mark.parametrize("bimamba_type", ["none", "v1", "v2"])
def test_mamba_ssm_mamba(bimamba_type: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mamba(bimamba_type=bimamba_type), nn.LayerNorm(8), Mamba(bimamba_type=bimamba_type))
    check(model, torch.randn(2, 6, 8), {"0": model[0], "2": model[2]})
    assert "mamba_ssm" not in sys.modules


@pytest.mark.parametrize("options", [{}, {"ngroups": 1}, {"d_ssm": 8}])
def test_mamba_ssm_mamba2(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mamba2(**options))
    check(model, torch.randn(2, 6, 8), {"0": model[0]})


def test_mamba_ssm_mamba2_with_flattened_batch() -> None:
    model = Mamba2()
    x = torch.randn(2, 6, 8)
    flat = MixerCall(model)
    with record_states(model) as plain:
        model(x)
    with record_states(flat) as states:
        flat(x)
    assert_rounding(states.flat()[0].a, plain.flat()[0].a)


class MixerCall(nn.Module):
    """Calls the mixer as sequence-parallel code does, with batch and tokens in one dimension."""

    def __init__(self, mixer: Mamba2) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> None:
        for hook in self.mixer._forward_pre_hooks.values():
            hook(self.mixer, (x.flatten(0, 1),), {"seqlen": x.shape[1]})


def test_mamba_ssm_generation_is_refused() -> None:
    class Params:
        seqlen_offset = 3

    model = Mamba()
    with record_states(model), pytest.raises(ConfigError, match="inference_params"):
        model(torch.randn(1, 1, 8), inference_params=Params())


@pytest.mark.parametrize("channel_first", [True, False])
@pytest.mark.parametrize("z", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_vmamba_ss2d(channel_first: bool, z: bool, grouped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SS2D(channel_first=channel_first, z=z, grouped=grouped))
    x = torch.randn(2, 6, 3, 4) if channel_first else torch.randn(2, 3, 4, 6)
    check(model, x, {"0": model[0]})


def test_vmamba_with_dependent_scans_is_refused() -> None:
    model = SS2D()
    model.forward_core = partial(model.core, scan_mode="cascade2d")
    with record_states(model), pytest.raises(ConfigError, match="independent scans"):
        model(torch.randn(1, 3, 4, 6))


@pytest.mark.parametrize(
    "module",
    ["mambavision.models.mamba_vision", "transformers_modules.nvidia.MambaVision-T-1K.abc.modeling_mambavision"],
)
def test_mambavision_with_its_doubled_bias(module: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(vision.mixer(module), nn.LayerNorm(12), vision.mixer(module))
    check(model, torch.randn(2, 6, 12), {"0": model[0], "2": model[2]})
