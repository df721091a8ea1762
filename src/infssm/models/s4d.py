"""S4D: complex diagonal state spaces that do not depend on the input, run as one long convolution.

Parameter names are those of the S4D example of state-spaces/s4 (``encoder``, ``s4_layers``, ``norms``; its
``decoder`` is our ``head``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.mixer import (
    LayerState,
    RawStates,
    SSMMixer,
    StateRows,
    at_least_float32,
    beside_checkpoint,
    check_state_set,
)
from infssm.models.registry import register_model
from infssm.models.sequence import CausalBackbone

Discretization = Literal["zoh", "bilinear"]


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 of complex numbers, exact near 0."""
    real, imag = x.real, x.imag
    return torch.complex(
        torch.expm1(real) * torch.cos(imag) - 2 * torch.sin(imag / 2).square(), torch.exp(real) * torch.sin(imag)
    )


def _same(kept: list[Tensor], own: list[Tensor]) -> bool:
    pairs = zip(kept, own, strict=True)
    return all(a.device == b.device and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class S4DKernel(nn.Module):
    """Diagonal state spaces, one per channel; n states are stored as n/2 conjugate pairs.

    log_dt: [channels]; log_A_real, A_imag: [channels, n/2]; C: [channels, n/2, 2] (real and imaginary part); B is 1.
    """

    def __init__(self, channels: int, n: int, *, discretization: Discretization = "zoh") -> None:
        super().__init__()
        if discretization not in ("zoh", "bilinear"):
            raise ConfigError(f"unknown discretization {discretization!r}; known: zoh, bilinear")
        self.discretization = discretization
        low, high = math.log(0.001), math.log(0.1)
        self.log_dt = nn.Parameter(torch.rand(channels) * (high - low) + low)
        self.C = nn.Parameter(torch.view_as_real(torch.randn(channels, n // 2, dtype=torch.cfloat)))
        self.log_A_real = nn.Parameter(torch.full((channels, n // 2), 0.5).log())
        self.A_imag = nn.Parameter(math.pi * torch.arange(n // 2, dtype=torch.float32).repeat(channels, 1))
        self._kept: tuple[list[Tensor], dict[str, tuple[Tensor, ...]]] | None = None

    def _continuous(self) -> tuple[Tensor, Tensor]:
        """Step sizes [channels, 1] and continuous poles, complex [channels, n/2]."""
        dt = torch.exp(at_least_float32(self.log_dt))[:, None]
        return dt, torch.complex(-torch.exp(at_least_float32(self.log_A_real)), at_least_float32(self.A_imag))

    def discretize(self) -> tuple[Tensor, Tensor]:
        """Return the discrete transition and the factor that discretises B, both complex [channels, n/2]."""
        dt, a = self._continuous()
        if self.discretization == "zoh":
            return torch.exp(dt * a), _expm1(dt * a) / a
        return (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)

    def log_transition(self) -> Tensor:
        """Logarithm of the discrete transition, complex [channels, n/2], exact where the transition is near 1."""
        dt, a = self._continuous()
        return dt * a if self.discretization == "zoh" else 2 * torch.atanh(dt * a / 2)

    def complex_c(self) -> Tensor:
        """C as complex numbers, [channels, n/2]."""
        return torch.view_as_complex(at_least_float32(self.C))

    def forward(self, tokens: int) -> Tensor:
        """Convolution kernel [channels, tokens]: 2 Re(sum_j c_j b_j a_j^t).

        With t = q w + s the power is a_j^(q w) a_j^s: two tables of about sqrt(tokens) powers and one matrix product
        for each channel, instead of a table of all tokens.
        """
        _, factor = self.discretize()
        within, starts = self._powers(tokens)
        starts = (self.complex_c() * factor)[..., None] * starts
        parts = torch.view_as_real(starts.conj().resolve_conj()), torch.view_as_real(within)
        return 2 * torch.einsum("hnqc,hnsc->hqs", *parts).flatten(1)[:, :tokens]

    def spectrum(self, tokens: int) -> Tensor:
        """The kernel's Fourier transform over twice the tokens, [tokens + 1, channels]."""
        return self._kept_as(f"spectrum {tokens}", lambda: (torch.fft.rfft(self(tokens).T, n=2 * tokens, dim=0),))[0]

    def recurrence(self) -> tuple[Tensor, ...]:
        """Transition, discretised B and C of the recurrence x <- a x + b u, y = 2 Re(c x): complex [channels, n/2]."""
        return self._kept_as("recurrence", lambda: (*self.discretize(), self.complex_c()))

    def _kept_as(self, key: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Values that depend only on the parameters; in evaluation without gradients kept until one of them changes."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._kept = None
            return make()
        own = [parameter.detach() for parameter in self.parameters()]
        if self._kept is None or not _same(self._kept[0], own):
            self._kept = [tensor.clone() for tensor in own], {}
        made = self._kept[1]
        if key not in made:
            if len(made) == 4:  # chunks of a stream may all differ in length
                made.clear()
            made[key] = make()
        return made[key]

    def _powers(self, tokens: int) -> tuple[Tensor, ...]:
        """a^s for s < w and a^(w q) for q < tokens / w, [channels, n/2, w or q], with w about sqrt(tokens)."""
        log_a = self.log_transition()[..., None]
        width = math.isqrt(max(tokens - 1, 0)) + 1
        steps = torch.arange(width, device=log_a.device, dtype=log_a.real.dtype)
        return torch.exp(log_a * steps), torch.exp(log_a * (width * steps[: -(-tokens // width)]))

    def carry(self, u: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The share of a state in the outputs of a chunk, [batch, tokens, channels], and the state after the chunk.

        u: [batch, tokens, channels]; hidden: complex [batch, channels, n/2]. Powers of the transition come from two
        tables of about sqrt(tokens) as in `forward`: y_t = 2 Re(c a^(t+1) x) and x' = a^T x + sum_j a^(T-1-j) b u_j.
        """
        tokens, (a, b, c) = u.shape[1], self.recurrence()
        within, starts = self._kept_as(f"powers {tokens}", lambda: self._powers(tokens))
        width, count = within.shape[-1], starts.shape[-1]
        begun = ((c * a)[..., None] * starts) * hidden[..., None]  # [batch, channels, n/2, q]
        parts = torch.view_as_real(begun.conj().resolve_conj()), torch.view_as_real(within)
        y = 2 * torch.einsum("bhnqc,hnsc->bqsh", *parts).flatten(1, 2)[:, :tokens]
        backwards = torch.unflatten(F.pad(u.flip(1), (0, 0, 0, count * width - tokens)), 1, (count, width))
        added = torch.einsum("bqsh,hnsc->bhqnc", backwards, torch.view_as_real(within))
        new = (torch.view_as_complex(added.contiguous()) * starts.mT).sum(2) * b
        # a^T from the tables, too: T - 1 = q w + s.
        through = a * starts[..., (tokens - 1) // width] * within[..., (tokens - 1) % width]
        return y, through * hidden + new

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the kept transform behind."""
        return {**self.__dict__, "_kept": None}


class S4DMixer(SSMMixer):
    """Long convolution with a diagonal state space per channel, then a gated projection: [batch, tokens, channels].

    Its states do not depend on the input: a, b and c are complex [1, channels, n/2], one exact system per channel
    (half of each conjugate pair), delta is [1, channels] and zoh the factor of the layer's own discretisation.
    """

    calls_scan_hook = False

    def __init__(self, channels: int, *, d_state: int = 64, discretization: Discretization = "zoh") -> None:
        super().__init__()
        self.D = nn.Parameter(torch.randn(channels))
        self.kernel = S4DKernel(channels, d_state, discretization=discretization)
        self.output_linear = nn.Sequential(nn.Conv1d(channels, 2 * channels, kernel_size=1), nn.GLU(dim=-1))

    def forward(self, u: Tensor, state: LayerState | None = None) -> Tensor | tuple[Tensor, LayerState]:
        """u: [batch, tokens, channels]. With a ``state`` the state after the tokens is returned too."""
        if self.tap is not None:
            with beside_checkpoint():
                self.emit([self._states(self.tap.zoh)])
        tokens, x, after = u.shape[1], at_least_float32(u), None
        if state is not None and tokens == 1:
            a, b, c = self.kernel.recurrence()
            after = a * state.hidden + b * x[:, 0, :, None]
            y = 2 * (c * after).sum(-1).real.unsqueeze(1)
        else:
            kernel_f = self.kernel.spectrum(tokens)
            y = torch.fft.irfft(torch.fft.rfft(x, n=2 * tokens, dim=1) * kernel_f, n=2 * tokens, dim=1)[:, :tokens]
            if state is not None:
                carried, after = self.kernel.carry(x, state.hidden)
                y = y + carried
        y = F.gelu(y.to(u.dtype) + self.D * u)
        projection = self.output_linear[0]
        mixed = F.glu(F.linear(y, projection.weight.squeeze(-1), projection.bias), dim=-1)  # type: ignore[operator, arg-type]
        return mixed if after is None else (mixed, LayerState(after))

    def initial_state(self, batch: int) -> LayerState:
        """The state before the first token: nothing was read."""
        real = at_least_float32(self.kernel.log_A_real)
        return LayerState(torch.zeros(batch, *real.shape, dtype=real.dtype.to_complex(), device=real.device))

    def _states(self, zoh: bool) -> RawStates:
        transition, factor = self.kernel.discretize()
        return RawStates(
            a=transition[None],
            c=self.kernel.complex_c()[None],
            b=torch.ones_like(transition)[None],
            delta=torch.exp(at_least_float32(self.kernel.log_dt))[None],
            zoh=factor[None] if zoh else None,
        )

    def state_parameters(self, which: str) -> list[StateRows]:
        """Parameters that form (A, C); B is constant, so all sets are the same."""
        check_state_set(which)
        kernel = self.kernel
        return [(kernel.log_dt, None), (kernel.log_A_real, None), (kernel.A_imag, None), (kernel.C, None)]


class S4DModel(CausalBackbone):
    """Stack of S4D layers with residuals and layer norms; real sequences [batch, tokens, in_dim] -> logits."""

    supported_data = frozenset({"series", "regression"})

    def __init__(
        self,
        *,
        in_dim: int = 1,
        num_classes: int = 10,
        d_model: int = 128,
        n_layer: int = 4,
        d_state: int = 64,
        discretization: Discretization = "zoh",
        prenorm: bool = False,
    ) -> None:
        super().__init__()
        self.num_features, self.num_classes, self.prenorm = d_model, num_classes, prenorm
        self.encoder = nn.Linear(in_dim, d_model)
        self.s4_layers = nn.ModuleList(
            S4DMixer(d_model, d_state=d_state, discretization=discretization) for _ in range(n_layer)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(n_layer))
        self.head = self.make_head(num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, in_dim] -> [batch, tokens, dim]."""
        tokens: Tensor = self.encoder(x)
        return tokens

    def mixers(self) -> list[Any]:
        """See :class:`CausalBackbone`."""
        return list(self.s4_layers)

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: ARG002 - padding is at the end
        """Run all layers: [batch, tokens, dim]."""
        for layer, norm in zip(self.s4_layers, self.norms, strict=True):
            tokens = tokens + layer(norm(tokens)) if self.prenorm else norm(tokens + layer(tokens))
        return tokens

    def advance(self, tokens: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, tuple[LayerState, ...]]:
        """See :class:`CausalBackbone`."""
        after = []
        for layer, norm, state in zip(self.s4_layers, self.norms, states, strict=True):
            mixed, state = layer(norm(tokens) if self.prenorm else tokens, state=state)
            tokens = tokens + mixed if self.prenorm else norm(tokens + mixed)
            after.append(state)
        return tokens, tuple(after)

    def no_weight_decay(self) -> set[str]:
        """The parameters of the state spaces other than C."""
        return {
            name for name, _ in self.named_parameters() if name.rsplit(".")[-1] in ("log_dt", "log_A_real", "A_imag")
        }

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the public name of the head."""
        return {
            f"head.{name.removeprefix('decoder.')}" if name.startswith("decoder.") else name: value
            for name, value in state.items()
        }


@register_model("s4d_nano")
def s4d_nano(**options: Any) -> S4DModel:
    """Small S4D for real sequences [batch, tokens, in_dim]: width 64, 4 layers, 32 states."""
    return S4DModel(**{"d_model": 64, "d_state": 32, **options})


@register_model("s4d_base")
def s4d_base(**options: Any) -> S4DModel:
    """S4D of the public CIFAR-10 example: width 128, 4 layers, 64 states, RGB pixels in sequence."""
    return S4DModel(**{"in_dim": 3, **options})
