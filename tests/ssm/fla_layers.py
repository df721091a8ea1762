"""Stand-ins for layers of flash-linear-attention and for Mamba-3, which need a GPU.

They carry the parameter names, shapes and qualified class names, and compute their outputs token by token from the
published equations. ``rule`` is the recurrence alone: what it is called with is kept, so that tests can hold one token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, D = 12, 2, 4


class ShortConvolution(nn.Conv1d):
    def __init__(self, channels: int, activation: str | None = "silu") -> None:
        super().__init__(channels, channels, 3, groups=channels, padding=2, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return F.silu(y) if self.activation == "silu" else y


def linear(out: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias=bias)


def low_rank(out: int, *, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, out, bias=bias))


def heads(x: Tensor, d: int = D) -> Tensor:
    return x.unflatten(-1, (-1, d))


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Layer(nn.Module):
    """Subclasses give the arguments of their recurrence and one step of it."""

    v_heads = HEADS
    use_short_conv = True

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_k_dim = HEADS, D
        self.v_proj = linear(self.v_heads * D)
        self.build()
        self.args: dict[str, Tensor] = {}

    def short(self, *names: str) -> None:
        """Projections with their convolutions."""
        for name in names:
            setattr(self, f"{name}_proj", linear(HEADS * D))
            if self.use_short_conv:
                setattr(self, f"{name}_conv1d", ShortConvolution(HEADS * D))

    def make(self, name: str, x: Tensor) -> Tensor:
        y = getattr(self, f"{name}_proj")(x)
        return getattr(self, f"{name}_conv1d")(y) if self.use_short_conv else y

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.args = self.arguments(hidden_states, **kwargs) | {"v": heads(self.v_proj(hidden_states))}
        return self.rule(**self.args).flatten(2)

    def rule(self, **args: Tensor) -> Tensor:
        """[batch, tokens, heads, value channels], with a memory [batch, heads, keys, value channels]."""
        q = args["q"]
        memory = torch.zeros(*q[:, 0].shape, args["v"].shape[-1], dtype=q.dtype)
        outputs = []
        for t in range(q.shape[1]):
            memory, out = self.step(memory, **{name: x[:, t] for name, x in args.items()})
            outputs.append(out)
        return torch.stack(outputs, dim=1)

    def build(self) -> None:
        raise NotImplementedError

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def step(self, memory: Tensor, **now: Tensor) -> tuple[Tensor, Tensor]:
        """A decay for each key, then the write; the output reads the memory after it."""
        memory = now["alpha"].unsqueeze(-1) * memory
        memory = memory + self.write(memory, **now)
        return memory, (now["q"].unsqueeze(-1) * memory).sum(-2)

    def write(self, memory: Tensor, **now: Tensor) -> Tensor:  # noqa: ARG002
        return now["k"].unsqueeze(-1) * now["v"].unsqueeze(-2)


class DeltaRule(Layer):
    """k (w v - (e . memory)) with e = erase k."""

    allow_neg_eigval = False

    def write(self, memory: Tensor, **now: Tensor) -> Tensor:
        read = ((now["erase"] * now["k"]).unsqueeze(-1) * memory).sum(-2)
        return now["k"].unsqueeze(-1) * (now["strength"] * now["v"] - read).unsqueeze(-2)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (unit(heads(self.make(name, x))).repeat_interleave(self.v_heads // HEADS, 2) for name in "qk")
        return q / math.sqrt(D), k

    def beta(self, x: Tensor) -> Tensor:
        return self.b_proj(x).sigmoid().unsqueeze(-1) * (1 + self.allow_neg_eigval)


class GatedDeltaNet(DeltaRule):
    v_heads, allow_neg_eigval = 4, True

    def build(self) -> None:
        self.short("q", "k")
        self.num_v_heads = self.v_heads
        self.a_proj, self.b_proj = linear(4), linear(4)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        q, k = self.keys(x)
        alpha = torch.exp(-self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)).unsqueeze(-1).expand_as(k)
        return {"q": q, "k": k, "alpha": alpha, "erase": self.beta(x).expand_as(k), "strength": self.beta(x)}


class DeltaNet(DeltaRule):
    qk_activation, qk_norm, use_beta = "silu", "l2", True

    def build(self) -> None:
        self.short("q", "k")
        self.b_proj = linear(HEADS)

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        q, k = self.keys(x)
        return {
            "q": q,
            "k": k,
            "alpha": torch.ones_like(k),
            "erase": self.beta(x).expand_as(k),
            "strength": self.beta(x),
        }


class DeltaNetOfSums(DeltaNet):
    """The variant with elu + 1 and keys that sum to one."""

    qk_activation, qk_norm, use_short_conv = "elu", "sum", False

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (F.elu(heads(self.make(name, x))) + 1 for name in "qk")
        q, k = (y / y.sum(-1, keepdim=True) for y in (q, k))
        return q / math.sqrt(D), k


class KimiDeltaAttention(DeltaRule):
    v_heads = 4
    lower_bound: float | None = None

    def build(self) -> None:
        self.short("q", "k")
        self.num_v_heads = self.v_heads
        self.f_proj, self.b_proj = low_rank(4 * D), linear(4)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4 * D))

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        q, k = self.keys(x)
        gate, rate = heads(self.f_proj(x) + self.dt_bias), self.A_log.exp().unsqueeze(-1)
        bound = self.lower_bound
        log_alpha = -rate * F.softplus(gate) if bound is None else bound * torch.sigmoid(rate * gate)
        return {"q": q, "k": k, "alpha": log_alpha.exp(), "erase": self.beta(x).expand_as(k), "strength": self.beta(x)}


class BoundedKimiDeltaAttention(KimiDeltaAttention):
    lower_bound = -5.0


class GatedDeltaNet2(DeltaRule):
    v_heads = 4

    def build(self) -> None:
        self.short("q", "k")
        self.num_v_heads = self.v_heads
        self.f_proj, self.b_proj, self.w_proj = low_rank(HEADS * D), linear(HEADS * D), linear(4 * D)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(HEADS * D))

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        q, k = self.keys(x)
        alpha = torch.exp(-self.A_log.exp().unsqueeze(-1) * heads(F.softplus(self.f_proj(x) + self.dt_bias)))
        erase = heads(self.b_proj(x).sigmoid()).repeat_interleave(2, 2)
        return {"q": q, "k": k, "alpha": alpha.repeat_interleave(2, 2), "erase": erase, "strength": torch.ones_like(k)}


class GatedLinearAttention(Layer):
    gate_logit_normalizer, clamp_min, feature_map_fn, num_kv_groups = 4, None, None, 1

    def build(self) -> None:
        self.short("q", "k")
        self.gk_proj = low_rank(HEADS * D, bias=True)

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        alpha = torch.sigmoid(self.gk_proj(x)) ** (1 / self.gate_logit_normalizer)
        return {"q": heads(self.make("q", x)) / math.sqrt(D), "k": heads(self.make("k", x)), "alpha": heads(alpha)}


class HGRN2Attention(Layer):
    use_short_conv, layer_idx, head_f_dim = False, 1, D

    def build(self) -> None:
        self.short("q", "f")

    def arguments(self, x: Tensor, lower_bound: Tensor | None = None) -> dict[str, Tensor]:
        g = F.logsigmoid(self.f_proj(x))
        if lower_bound is not None:
            g = torch.logaddexp(lower_bound.log(), torch.log1p(-lower_bound) + g)
        q, alpha = heads(F.silu(self.q_proj(x))) / math.sqrt(D), heads(g.exp())
        return {"q": q, "k": 1 - alpha, "alpha": alpha}


class Rotary(nn.Module):
    base = 10000.0


class MultiScaleRetention(Layer):
    use_short_conv, feature_map_fn, num_kv_groups = False, None, 1

    def build(self) -> None:
        self.short("q", "k")
        self.rotary = Rotary()

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        return {"q": heads(self.q_proj(x)) / math.sqrt(D), "k": heads(self.k_proj(x))}

    def rule(self, **args: Tensor) -> Tensor:
        places = torch.arange(args["q"].shape[1], dtype=torch.float64)
        angles = (places.unsqueeze(-1) / 10000.0 ** (torch.arange(0, D, 2) / D)).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        turned = {}
        for name in "qk":
            first, second = args[name].chunk(2, -1)
            turned[name] = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        alpha = (1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))).unsqueeze(-1)
        return super().rule(**turned, v=args["v"], alpha=alpha.expand_as(args["k"]))


class Mixed(nn.Module):
    """A projection of x + delta mu (RWKV-6's LerpLinear, with its own mu, and DDLerpLinear, with a given one)."""

    def __init__(self, out: int, *, own: bool = False) -> None:
        super().__init__()
        self.linear = linear(out)
        if own:
            self.mu = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        mu, delta = args if len(args) == 2 else (self.mu, args[0])
        return self.linear(x + delta * mu)


def before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class RWKV6Attention(Layer):
    proj_low_rank_dim = 2

    def build(self) -> None:
        self.x_proj = nn.Sequential(Mixed(10, own=True), nn.Tanh(), nn.Linear(10, WIDTH, bias=False))
        self.x_bias, self.bonus = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(HEADS, D))
        self.r_proj, self.w_proj, self.k_proj = (Mixed(HEADS * D) for _ in range(3))

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        delta = before(x) - x
        low = torch.tanh(self.x_proj[0](x, delta)).unflatten(-1, (5, 2))
        mixes = torch.einsum("btnr,hnr->nbth", low, self.x_proj[2].weight.view(WIDTH, 5, 2))
        r, w, k = (
            heads(layer(x, mixes[i] + self.x_bias[i], delta))
            for i, layer in enumerate((self.r_proj, self.w_proj, self.k_proj))
        )
        return {"q": r, "k": k, "alpha": torch.exp(-torch.exp(w))}

    def step(self, memory: Tensor, **now: Tensor) -> tuple[Tensor, Tensor]:
        """The output reads the memory before the write, and the token itself with a bonus."""
        new = self.write(memory, **now)
        out = (now["q"].unsqueeze(-1) * (memory + self.bonus.unsqueeze(-1) * new)).sum(-2)
        return now["alpha"].unsqueeze(-1) * memory + new, out


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(WIDTH, 3, bias=False), nn.Tanh(), nn.Linear(3, HEADS * D))

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class RWKV7Attention(Layer):
    head_dim, fuse_norm = D, False

    def build(self) -> None:
        for name in "rwka":
            setattr(self, f"x_{name}", nn.Parameter(torch.randn(1, 1, WIDTH)))
        self.k_k, self.k_a = nn.Parameter(torch.randn(HEADS * D)), nn.Parameter(torch.randn(HEADS * D))
        self.r_proj, self.k_proj, self.w_lora, self.a_lora = linear(HEADS * D), linear(HEADS * D), LoRA(), LoRA()

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        xr, xw, xk, xa = (x + (before(x) - x) * getattr(self, f"x_{name}") for name in "rwka")
        k, a = self.k_proj(xk), self.a_lora(xa).sigmoid()
        kappa = F.normalize(heads(k * self.k_k), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        alpha = torch.exp(-math.exp(-0.5) * self.w_lora(xw).sigmoid())
        r, k, alpha, a = (heads(y) for y in (self.r_proj(xr), k, alpha, a))
        return {"q": r, "k": k, "alpha": alpha, "kappa": kappa, "rate": a * kappa}

    def step(self, memory: Tensor, **now: Tensor) -> tuple[Tensor, Tensor]:
        read = (now["kappa"].unsqueeze(-1) * memory).sum(-2, keepdim=True)
        new = now["alpha"].unsqueeze(-1) * memory - now["rate"].unsqueeze(-1) * read + self.write(memory, **now)
        return new, (now["q"].unsqueeze(-1) * new).sum(-2)


class RMSNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class AnyMamba3(Layer):
    """One input, one output; every head of 4 channels has the values as its channels."""

    rate = staticmethod(F.softplus)

    is_mimo, mimo_rank, A_floor = False, 1, 1e-4
    d_state, num_rope_angles, nheads, d_inner = 6, 2, HEADS, HEADS * D

    def build(self) -> None:
        n = self.d_state * self.mimo_rank
        self.in_proj = linear(2 * self.d_inner + 2 * n + 3 * HEADS + self.num_rope_angles)
        self.dt_bias = nn.Parameter(torch.randn(HEADS))
        self.B_bias, self.C_bias = (nn.Parameter(torch.randn(HEADS, self.mimo_rank, self.d_state)) for _ in range(2))
        self.B_norm, self.C_norm = RMSNorm(self.d_state), RMSNorm(self.d_state)

    def arguments(self, x: Tensor) -> dict[str, Tensor]:
        n, rank = self.d_state, self.mimo_rank
        sizes = [self.d_inner] * 2 + [n * rank] * 2 + [HEADS] * 3 + [self.num_rope_angles]
        _, _, B, C, dt, rate, trap, angle = self.in_proj(x).split(sizes, -1)
        k, q = (
            norm(y.unflatten(-1, (rank, n))).unsqueeze(2) + bias  # [batch, tokens, heads, rank, n]
            for y, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        step = F.softplus(dt + self.dt_bias)
        A = -self.rate(rate).clamp_min(self.A_floor)
        turn = torch.tanh(angle).unsqueeze(-2) * step.unsqueeze(-1) * math.pi
        return {"q": q, "k": k, "alpha": torch.exp(A * step), "step": step, "lam": trap.sigmoid(), "turn": turn}

    def rotate(self, x: Tensor, angle: Tensor) -> Tensor:
        """x: [batch, heads, rank, n]; angle: [batch, heads, pairs]."""
        pairs = self.num_rope_angles
        cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
        x = x.clone()
        if self.is_mimo:
            first, second = slice(0, pairs), slice(self.d_state // 2, self.d_state // 2 + pairs)
        else:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        x0, x1 = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = x0 * cos - x1 * sin, x0 * sin + x1 * cos
        return x

    def rule(self, **args: Tensor) -> Tensor:
        """What every rank of q reads of every rank of k: [batch, tokens, heads, rank^2, value channels].

        The layer's memory is the sum over ranks of k; it is kept apart here, since the value is the same for all.
        """
        q, v = args["q"], args["v"].unsqueeze(-2)
        memory = torch.zeros(*q[:, 0].shape, v.shape[-1], dtype=q.dtype)
        angle, previous, outputs = torch.zeros_like(args["turn"][:, 0]), torch.zeros_like(memory), []
        for t in range(q.shape[1]):
            angle = angle + args["turn"][:, t]
            alpha, step, lam = (args[name][:, t, :, None, None, None] for name in ("alpha", "step", "lam"))
            new = self.rotate(args["k"][:, t], angle).unsqueeze(-1) * v[:, t].unsqueeze(-2)
            memory = alpha * memory + (1 - lam) * step * alpha * previous + lam * step * new
            previous = new
            outputs.append(torch.einsum("bhrn,bhsnv->bhrsv", self.rotate(q[:, t], angle), memory).flatten(2, 3))
        found = torch.stack(outputs, dim=1)
        return found if self.is_mimo else found.squeeze(3)

    def forward(self, u: Tensor) -> Tensor:
        return super().forward(u)


class Mamba3(AnyMamba3):
    """mamba_ssm to 2.3.2."""

    num_bc_heads = 1


def heavy_tail(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1 + x, 1 / (1 - x))


class Mamba3WithHeavyTail(Mamba3):
    """mamba_ssm after 2.3.2; the probe finds the function in the module of the layer."""

    rate = staticmethod(heavy_tail)


class Mamba3OfRanks(AnyMamba3):
    """Several ranks, under fla's names of the sizes."""

    is_mimo, mimo_rank, n_groups = True, 2, 1
    intermediate_size, ssm_state_size = AnyMamba3.d_inner, AnyMamba3.d_state


NAMES: dict[type[Layer], tuple[str, str]] = {
    GatedDeltaNet: ("fla.layers.gated_deltanet", "GatedDeltaNet"),
    DeltaNet: ("fla.layers.delta_net", "DeltaNet"),
    DeltaNetOfSums: ("fla.layers.delta_net", "DeltaNet"),
    KimiDeltaAttention: ("fla.layers.kda", "KimiDeltaAttention"),
    BoundedKimiDeltaAttention: ("fla.layers.kda", "KimiDeltaAttention"),
    GatedDeltaNet2: ("fla.layers.gdn2", "GatedDeltaNet2"),
    GatedLinearAttention: ("fla.layers.gla", "GatedLinearAttention"),
    HGRN2Attention: ("fla.layers.hgrn2", "HGRN2Attention"),
    MultiScaleRetention: ("fla.layers.multiscale_retention", "MultiScaleRetention"),
    RWKV6Attention: ("fla.layers.rwkv6", "RWKV6Attention"),
    RWKV7Attention: ("fla.layers.rwkv7", "RWKV7Attention"),
    Mamba3: ("mamba_ssm.modules.mamba3", "Mamba3"),
    Mamba3WithHeavyTail: ("mamba_ssm.modules.mamba3", "Mamba3"),
    Mamba3OfRanks: ("fla.layers.mamba3", "Mamba3"),
}
