"""VMamba: selective scans over an image in four directions, in a four-stage pyramid.

The released second-generation classifiers load: ``vssm1_tiny_0230s`` into ``vmamba_tiny``, ``vssm_small_0229`` into
``vmamba_small``, ``vssm_base_0229`` into ``vmamba_base`` (and, with ``depths`` and ``ssm_ratio`` given, the other
"v05_noz" ones). Their ``classifier.norm`` and ``classifier.head`` are our ``norm`` and ``head``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.backbone import Backbone
from infssm.models.block import a_log, drop_path, drop_path_rates, dt_bias, linear_
from infssm.models.mixer import SSMMixer, StateRows, at_least_float32, check_state_set
from infssm.models.registry import register_model
from infssm.ops import ScanInputs

_DIRECTIONS = 4


class SS2D(SSMMixer):
    """Scans along rows, columns, and both reversed, summed: [batch, height, width, dim] -> the same shape.

    States come in this order of directions; the tokens of the two column scans are in column-major order.
    """

    def __init__(self, dim: int, *, d_state: int = 1, ssm_ratio: float = 1.0) -> None:
        super().__init__()
        inner, rank = int(ssm_ratio * dim), math.ceil(dim / 16)
        self.d_inner, self.d_state, self.dt_rank = inner, d_state, rank
        self.in_proj = nn.Linear(dim, inner, bias=False)
        self.conv2d = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.x_proj = nn.Linear(inner, _DIRECTIONS * (rank + 2 * d_state), bias=False)
        self.dt_projs = nn.Linear(rank, _DIRECTIONS * inner, bias=False)
        self.dt_projs_bias = nn.Parameter(torch.stack([dt_bias(inner) for _ in range(_DIRECTIONS)]))
        self.A_logs = a_log(_DIRECTIONS * inner, d_state)
        self.Ds = nn.Parameter(torch.ones(_DIRECTIONS * inner))
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, height, width, dim]."""
        x = self.in_proj(x).permute(0, 3, 1, 2)
        x = F.silu(self.conv2d(x)).permute(0, 2, 3, 1)
        rows, columns, rows_back, columns_back = self.run_scans(self._prepare(x))
        batch, height, width, inner = x.shape
        down = (columns + columns_back).view(batch, width, height, inner).transpose(1, 2)
        y = (rows + rows_back).view(batch, height, width, inner) + down
        mixed: Tensor = self.out_proj(self.out_norm(y))
        return mixed

    def _prepare(self, x: Tensor) -> Iterator[ScanInputs]:
        """Project x [batch, height, width, inner] for all directions, and lay tokens out along each path."""
        paths = (x.flatten(1, 2), x.transpose(1, 2).flatten(1, 2))
        projected = self.x_proj(x).chunk(_DIRECTIONS, dim=-1)
        dt_weights = self.dt_projs.weight.chunk(_DIRECTIONS)
        a, skip = (-torch.exp(at_least_float32(self.A_logs))).chunk(_DIRECTIONS), self.Ds.chunk(_DIRECTIONS)
        for k, own in enumerate(projected):
            by_column = k % 2 == 1
            own = (own.transpose(1, 2) if by_column else own).flatten(1, 2)
            low, b, c = own.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
            delta = F.linear(low, dt_weights[k])
            yield ScanInputs(
                *(paths[by_column], delta, a[k], b, c, skip[k]),
                delta_bias=self.dt_projs_bias[k],
                delta_softplus=True,
                reverse=k >= 2,
            )

    def state_parameters(self, which: str) -> list[StateRows]:
        """Parameters that form the states of all directions, with the rows that matter."""
        check_state_set(which)
        rows: list[StateRows] = [(self.A_logs, None), (self.dt_projs.weight, None), (self.dt_projs_bias, None)]
        if which == "AC-direct":
            rank, n, weight = self.dt_rank, self.d_state, self.x_proj.weight
            for start in range(0, len(weight), rank + 2 * n):
                rows.append((weight, slice(start, start + rank)))
                rows.append((weight, slice(start + rank + n, start + rank + 2 * n)))
            return rows
        rows.append((self.x_proj.weight, None))
        if which == "ABC-full":
            rows += [(self.conv2d.weight, None), (self.in_proj.weight, None)]
        return rows


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class VSSBlock(nn.Module):
    """Scan branch and perceptron branch, each after a norm and added: [batch, height, width, dim]."""

    def __init__(self, dim: int, *, d_state: int, ssm_ratio: float, mlp_ratio: float, drop_path_rate: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.op = SS2D(dim, d_state=d_state, ssm_ratio=ssm_ratio)
        self.mlp = Mlp(dim, int(mlp_ratio * dim))
        self.drop_path_rate = drop_path_rate

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, height, width, dim]."""
        x = x + drop_path(self.op(self.norm(x)), self.drop_path_rate, self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.drop_path_rate, self.training)


class ConvNorm(nn.Module):
    """3x3 convolution of stride 2 and a layer norm: [batch, height, width, in] -> [batch, height/2, width/2, out]."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_dim, out_dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, height, width, in]."""
        out: Tensor = self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return out


class Stage(nn.Module):
    """Blocks of one resolution, then a downsampling convolution unless it is the last stage."""

    def __init__(self, blocks: list[VSSBlock], downsample: ConvNorm | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, height, width, dim]."""
        x = self.blocks(x)
        return x if self.downsample is None else self.downsample(x)


class VMamba(Backbone):
    """VMamba image classifier; images of any size divisible by 32: [batch, in_chans, height, width] -> logits.

    ``forward_features`` gives the last stage's tokens, [batch, (height / 32) (width / 32), dims[-1]].
    """

    def __init__(
        self,
        *,
        in_chans: int = 3,
        num_classes: int = 1000,
        depths: tuple[int, ...] = (2, 2, 8, 2),
        embed_dim: int = 96,
        d_state: int = 1,
        ssm_ratio: float = 1.0,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        dims = [embed_dim * 2**i for i in range(len(depths))]
        self.num_features, self.num_classes = dims[-1], num_classes
        self.stem = nn.ModuleList([ConvNorm(in_chans, embed_dim // 2), ConvNorm(embed_dim // 2, embed_dim)])
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        self.layers = nn.ModuleList()
        for i, depth in enumerate(depths):
            blocks = [
                VSSBlock(dims[i], d_state=d_state, ssm_ratio=ssm_ratio, mlp_ratio=mlp_ratio, drop_path_rate=next(rates))
                for _ in range(depth)
            ]
            self.layers.append(Stage(blocks, ConvNorm(dims[i], dims[i + 1]) if i + 1 < len(dims) else None))
        self.norm = nn.LayerNorm(dims[-1])
        self.head = self.make_head(num_classes)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(("x_proj", "dt_projs")):
                linear_(module)

    def embed(self, x: Tensor) -> Tensor:
        """x: [batch, in_chans, height, width] -> tokens [batch, (height / 4) (width / 4), dim] in row-major order."""
        return self._embed_grid(x).flatten(1, 2)

    def encode(self, tokens: Tensor) -> Tensor:
        """Run all stages on the tokens of a square image: [batch, tokens, dim] -> [batch, tokens / 64, dims[-1]]."""
        side = math.isqrt(tokens.shape[1])
        if side * side != tokens.shape[1]:
            raise ConfigError(f"{tokens.shape[1]} tokens do not form a square grid: VMamba scans images, not sequences")
        return self._encode_grid(tokens.reshape(len(tokens), side, side, -1))

    def forward_features(self, x: Tensor) -> Tensor:
        """Features of the last stage, [batch, tokens, dims[-1]]."""
        return self._encode_grid(self._embed_grid(x))

    def pool(self, features: Tensor) -> Tensor:
        """Mean over tokens: [batch, dims[-1]]."""
        return features.mean(dim=1)

    def _embed_grid(self, x: Tensor) -> Tensor:
        first, second = self.stem
        grid: Tensor = second(F.gelu(first(x.permute(0, 2, 3, 1))))
        return grid

    def _encode_grid(self, grid: Tensor) -> Tensor:
        for stage in self.layers:
            grid = stage(grid)
        features: Tensor = self.norm(grid).flatten(1, 2)
        return features

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename what the released checkpoints call otherwise, and give stacked projections their shape."""
        own = self.state_dict()
        adapted = {}
        for name, value in state.items():
            for theirs, ours in _RENAMED.items():
                name = name.replace(theirs, ours)
            if name in own and name.endswith(("weight", "bias")) and value.numel() == own[name].numel():
                value = value.reshape(own[name].shape)
            adapted[name] = value
        return adapted


_RENAMED = {
    "patch_embed.0.": "stem.0.conv.",
    "patch_embed.2.": "stem.0.norm.",
    "patch_embed.5.": "stem.1.conv.",
    "patch_embed.7.": "stem.1.norm.",
    "classifier.norm.": "norm.",
    "classifier.head.": "head.",
    ".downsample.1.": ".downsample.conv.",
    ".downsample.3.": ".downsample.norm.",
    ".op.x_proj_weight": ".op.x_proj.weight",
    ".op.dt_projs_weight": ".op.dt_projs.weight",
}


@register_model("vmamba_nano")
def vmamba_nano(**options: Any) -> VMamba:
    """Small VMamba: width 32, one block per stage, two stages, four states."""
    return VMamba(**{"depths": (1, 1), "embed_dim": 32, "d_state": 4, "num_classes": 100, **options})


@register_model("vmamba_tiny")
def vmamba_tiny(**options: Any) -> VMamba:
    """VMamba-tiny s1l8, 30 M parameters (public weights: vssm1_tiny_0230s)."""
    return VMamba(**options)


@register_model("vmamba_small")
def vmamba_small(**options: Any) -> VMamba:
    """VMamba-small s2l15, 50 M parameters (public weights: vssm_small_0229)."""
    return VMamba(**{"depths": (2, 2, 15, 2), "ssm_ratio": 2.0, **options})


@register_model("vmamba_base")
def vmamba_base(**options: Any) -> VMamba:
    """VMamba-base s2l15, 89 M parameters (public weights: vssm_base_0229)."""
    return VMamba(**{"depths": (2, 2, 15, 2), "embed_dim": 128, "ssm_ratio": 2.0, **options})
