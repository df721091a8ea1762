"""Vision Mamba (Vim): bidirectional selective scans over image patches, class token in the middle.

Parameter names and shapes are those of the public hustvl/Vim checkpoints (bimamba v2, absolute positions,
``if_divide_out``), which load as they are; a head for another number of classes is left out and position
embeddings are resampled to the model's grid.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import CheckpointError, ConfigError
from infssm.models.backbone import Backbone
from infssm.models.block import (
    Block,
    RMSNorm,
    a_log,
    depthwise_conv,
    drop_path_rates,
    dt_bias,
    lecun_normal_,
    residual_projection_,
    run_blocks,
)
from infssm.models.mamba import Direction, run_directions
from infssm.models.mixer import SSMMixer, StateRows, check_state_set
from infssm.models.registry import register_model


class ConvStem(nn.Module):
    """Overlapping 3x3 convolutions in place of the cut: [batch, chans, height, width] -> [batch, patches, dim].

    One convolution of stride 2 per halving of the side (Xiao et al. 2021, "Early convolutions help transformers see
    better"), each followed by a norm over the image's own channels and pixels, which no other image of the batch
    moves, and SiLU; a 1x1 projection ends it. The widths double up to ``dim``.
    """

    def __init__(self, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        halvings = int(math.log2(patch_size)) if patch_size > 1 else 0
        if halvings < 1 or 2**halvings != patch_size or dim % 2 ** (halvings - 1):
            raise ConfigError(
                f"a conv stem halves the side: patch_size must be a power of two above 1 (got {patch_size}) and "
                f"embed_dim a multiple of half of it (got {dim}); or say stem='patch'"
            )
        layers: list[nn.Module] = []
        chans = in_chans
        for left in reversed(range(halvings)):
            width = dim // 2**left
            layers += [nn.Conv2d(chans, width, 3, stride=2, padding=1), nn.GroupNorm(1, width), nn.SiLU()]
            chans = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(chans, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, chans, height, width]."""
        patches: Tensor = self.layers(x).flatten(2).transpose(1, 2)
        return patches


class VimMixer(SSMMixer):
    """Bidirectional selective state space layer: [batch, tokens, d_model] -> [batch, tokens, d_model].

    Both directions share ``in_proj`` and ``out_proj``; each has its own convolution, projections and A, D. The
    backward one (names with ``_b``) runs against the token order. The outputs are averaged.
    """

    def __init__(self, d_model: int, *, d_state: int = 16, d_conv: int = 4, expand: int = 2) -> None:
        super().__init__()
        inner, rank = expand * d_model, math.ceil(d_model / 16)
        self.d_inner, self.d_state, self.dt_rank = inner, d_state, rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        self.A_log, self.A_b_log = a_log(inner, d_state), a_log(inner, d_state)
        self.D, self.D_b = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.ones(inner))
        self.conv1d, self.conv1d_b = depthwise_conv(inner, d_conv), depthwise_conv(inner, d_conv)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.x_proj_b = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.dt_proj, self.dt_proj_b = nn.Linear(rank, inner), nn.Linear(rank, inner)
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt_bias(inner))
            # Vim leaves the backward bias at zero: its steps start near softplus(0).
            self.dt_proj_b.bias.zero_()

    def directions(self) -> list[Direction]:
        """The parameters of the forward and of the backward direction."""
        return [
            Direction(self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D),
            Direction(self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b, reverse=True),
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, tokens, d_model]."""
        averaged = run_directions(self, self.in_proj(hidden), self.directions(), out_scale=0.5)
        mixed: Tensor = self.out_proj(averaged)
        return mixed

    def state_parameters(self, which: str) -> list[StateRows]:
        """Parameters that form (A, C) or (A, B, C) of both directions, with the rows that matter."""
        check_state_set(which)
        rows = [row for way in self.directions() for row in way.state_parameters(which)]
        if which == "ABC-full":
            rows.append((self.in_proj.weight, slice(0, self.d_inner)))
        return rows


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each: [batch, chans, height, width] -> [batch, patches, dim]."""

    def __init__(self, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size)
        lecun_normal_(self.proj.weight)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, chans, height, width]."""
        patches: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return patches


class VisionMamba(Backbone):
    """Vim image classifier. Images [batch, in_chans, img_size, img_size] -> logits [batch, num_classes].

    ``stem``: ``patch`` cuts the image into patches, as the public checkpoints do; ``conv`` convolves it down to the
    same grid, which small images trained from scratch gain from.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 24,
        d_state: int = 16,
        drop_path_rate: float = 0.0,
        stem: Literal["patch", "conv"] = "patch",
    ) -> None:
        super().__init__()
        if stem not in ("patch", "conv"):
            raise ConfigError(f"stem must be 'patch' or 'conv', got {stem!r}")
        self.patch_size = patch_size
        self.num_features = embed_dim
        self.num_classes = num_classes
        self.img_size, self.grid_size = _grid(img_size, patch_size)
        make_stem = PatchEmbed if stem == "patch" else ConvStem
        self.patch_embed = make_stem(patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_patches + 1, embed_dim))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        # The first block adds nothing to a residual yet; the last rate is that of the final norm's addition.
        rates = [0.0, *drop_path_rates(drop_path_rate, depth)]
        mixers = [VimMixer(embed_dim, d_state=d_state) for _ in range(depth)]
        for mixer in mixers:
            residual_projection_(mixer.out_proj.weight, depth)
        self.layers = nn.ModuleList(
            Block(embed_dim, mixer, drop_path_rate=rate) for mixer, rate in zip(mixers, rates, strict=False)
        )
        self.drop_path_rate = drop_path_rate
        self.norm_f = RMSNorm(embed_dim)
        self.head = self.make_head(num_classes)

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return self.grid_size[0] * self.grid_size[1]

    @property
    def cls_index(self) -> int:  # type: ignore[override]
        """Position of the class token among the tokens of ``embed``."""
        return self.num_patches // 2

    def embed(self, x: Tensor) -> Tensor:
        """x: [batch, in_chans, height, width] -> tokens [batch, patches + 1, dim] with class token and positions."""
        if tuple(x.shape[-2:]) != self.img_size:
            raise ConfigError(f"images of {tuple(x.shape[-2:])} for a model of {self.img_size}: use set_input_size")
        patches: Tensor = self.patch_embed(x)
        middle = self.cls_index
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        return torch.cat((patches[:, :middle], cls, patches[:, middle:]), dim=1) + self.pos_embed

    def encode(self, tokens: Tensor) -> Tensor:
        """Run all blocks and the final norm; any number of tokens: [batch, tokens, dim]."""
        return run_blocks(self.layers, self.norm_f, tokens, drop_path_rate=self.drop_path_rate)

    def forward_blocks(self, x: Tensor, count: int) -> list[Tensor]:
        """Features after each of the first ``count`` blocks, through the final norm: [batch, tokens, dim] each."""
        hidden, residual = self.embed(x), None
        found = []
        for layer in self.layers[:count]:
            hidden, residual = layer(hidden, residual)
            found.append(self.norm_f(hidden, residual)[0])
        return found

    def pool(self, features: Tensor) -> Tensor:
        """Take the class token, counted from the end so that prepended tokens do not move it."""
        return features[:, self.cls_index - self.num_patches - 1]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay must leave alone, besides all one-dimensional ones."""
        return {"pos_embed", "cls_token"}

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Make the model take images of another size; position embeddings are resampled."""
        old_grid = self.grid_size
        self.img_size, self.grid_size = _grid(img_size, self.patch_size)
        if self.model_name is not None:
            self.model_options["img_size"] = img_size
        if self.grid_size != old_grid:
            self.pos_embed = nn.Parameter(resample_positions(self.pos_embed.detach(), old_grid, self.grid_size))

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Resample position embeddings made for another (square) grid."""
        positions = state.get("pos_embed")
        if positions is None or positions.ndim != 3 or positions.shape[1] == self.num_patches + 1:
            return state
        side = math.isqrt(positions.shape[1] - 1)
        if side * side != positions.shape[1] - 1:
            raise CheckpointError(f"pos_embed of {positions.shape[1]} tokens is not a square grid plus a class token")
        return {**state, "pos_embed": resample_positions(positions, (side, side), self.grid_size)}


def resample_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample position embeddings [1, patches + 1, dim] bicubically; the middle one, the class token's, is kept."""
    middle = old[0] * old[1] // 2
    cls = positions[:, middle : middle + 1]
    grid = torch.cat((positions[:, :middle], positions[:, middle + 1 :]), dim=1)
    grid = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    middle = new[0] * new[1] // 2
    return torch.cat((grid[:, :middle], cls, grid[:, middle:]), dim=1)


def _grid(img_size: int | tuple[int, int], patch_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if height % patch_size or width % patch_size:
        raise ConfigError(f"image size {(height, width)} is not a multiple of the patch size {patch_size}")
    return (height, width), (height // patch_size, width // patch_size)


@register_model("vim_nano")
def vim_nano(**options: Any) -> VisionMamba:
    """Vim for small images: 32x32, patch 4, depth 6, width 96 by default."""
    defaults = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_classes": 100}
    return VisionMamba(**{**defaults, **options})


@register_model("vim_tiny_patch16_224")
def vim_tiny_patch16_224(**options: Any) -> VisionMamba:
    """Vim-tiny, 7 M parameters (public weights: vim_t_midclstok_76p1acc)."""
    return VisionMamba(**{"embed_dim": 192, **options})


@register_model("vim_small_patch16_224")
def vim_small_patch16_224(**options: Any) -> VisionMamba:
    """Vim-small, 26 M parameters (public weights: vim_s_midclstok_80p5acc)."""
    return VisionMamba(**{"embed_dim": 384, **options})


@register_model("vim_base_patch16_224")
def vim_base_patch16_224(**options: Any) -> VisionMamba:
    """Vim-base, 98 M parameters."""
    return VisionMamba(**{"embed_dim": 768, **options})
