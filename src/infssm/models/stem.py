"""A convolutional stem: small images keep more in overlapping convolutions than in one cut into patches."""

from __future__ import annotations

import math

from torch import Tensor, nn

from infssm.errors import ConfigError


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
