"""A backbone inside a module that changes what its classifier is given, and CLFD's such module.

That has a frequency encoder before the backbone and a feature selection before its classifier.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.features import find_classifier, require


class WrappedBackbone(nn.Module):
    """Base of CLFD's and L2P's modules: the steps of the backbone and the place of its classifier.

    Subclasses compute features their own way and give them to :meth:`classify`. By the rule of
    :mod:`infssm.models.features` these are the features that heads are fitted to, and a head that stands in the
    classifier's place makes the logits of them.
    """

    def __init__(self, model: nn.Module, method: str, *also: str) -> None:
        super().__init__()
        require(model, method, "embed", "encode", "pool", *also)
        self._classifier = find_classifier(model)
        self.model: Any = model

    @property
    def num_features(self) -> int:
        """Width d of the features."""
        return self._classifier.in_features

    def classify(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to logits ``[b, K]`` by whichever classifier stands in the backbone."""
        logits: Tensor = self._classifier.module(features)
        return logits

    def get_classifier(self) -> nn.Module:
        """The backbone's classifier."""
        return self._classifier.module


def pooled_features(model: Any, x: Tensor) -> Tensor:
    """Features ``[b, d]`` as a bare backbone gives them to its classifier, of ``x: [b, ...]``."""
    pooled: Tensor = model.pool(model.encode(model.embed(x)))
    return pooled


class Bands(NamedTuple):
    """Haar bands of an image, each ``[b, c, h/2, w/2]``: lh is high down the columns, hl high along the rows."""

    ll: Tensor
    lh: Tensor
    hl: Tensor
    hh: Tensor


def haar(x: Tensor) -> Bands:
    """One level of the orthonormal 2-D Haar transform of ``x: [b, c, h, w]``, h and w even.

    low = (x0 + x1)/√2, high = (x0 - x1)/√2 in both directions: a constant image has LL = 2·constant.
    """
    if x.shape[-2] % 2 or x.shape[-1] % 2:
        raise ConfigError(f"the wavelet transform halves images: {tuple(x.shape[-2:])} must be even")
    a, b = x[..., 0::2, 0::2], x[..., 0::2, 1::2]
    c, d = x[..., 1::2, 0::2], x[..., 1::2, 1::2]
    return Bands((a + b + c + d) / 2, (a + b - c - d) / 2, (a - b + c - d) / 2, (a - b - c + d) / 2)


class Encoded(NamedTuple):
    """``features: [b, maps, h/2, w/2]`` for the backbone and the low band ``ll: [b, c, h/2, w/2]``."""

    features: Tensor
    ll: Tensor


class FrequencyEncoder(nn.Module):
    """Three maps of half the image size: of the low band, of all bands, and of the high bands.

    A backbone of one input channel gets only the map of all bands. The weights of the low band start at 1/(2c), which
    makes a grey image of it, so that a pre-trained backbone is given input it knows.
    """

    def __init__(self, channels: int, maps: int) -> None:
        super().__init__()
        if maps not in (1, 3):
            raise ConfigError(f"clfd's encoder makes 1 or 3 maps, the model has {maps} input channels")
        self.low = nn.Conv2d(channels, 1, 1, bias=False) if maps == 3 else None
        self.all = nn.Conv2d(4 * channels, 1, 1, bias=False)
        self.high = nn.Conv2d(3 * channels, 1, 1, bias=False) if maps == 3 else None
        with torch.no_grad():
            self.all.weight[:, :channels] = 1 / (2 * channels)
            if self.low is not None:
                self.low.weight.fill_(1 / (2 * channels))

    def forward(self, x: Tensor) -> Encoded:
        """x: [b, c, h, w]."""
        bands = haar(x)
        maps = [self.all(torch.cat(bands, dim=1))]
        if self.low is not None and self.high is not None:
            maps = [self.low(bands.ll), *maps, self.high(torch.cat(bands[1:], dim=1))]
        return Encoded(torch.cat(maps, dim=1), bands.ll)


class Selected(NamedTuple):
    """Features ``[b, d]`` with what was not selected set to 0, and the ``mask: [b, d]`` of what was."""

    features: Tensor
    mask: Tensor


class FeatureSelection(nn.Module):
    """Keeps the ``ratio`` of features with the largest magnitude; during training first those a class may use."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, features: Tensor, allowed: Tensor | None = None) -> Selected:
        """features: [b, d]; ``allowed: [s, d]`` masks the first s rows."""
        if allowed is not None:
            features = torch.cat((features[: len(allowed)] * allowed, features[len(allowed) :]))
        mask = largest(features, self.ratio)
        return Selected(features * mask, mask)


def largest(features: Tensor, ratio: float) -> Tensor:
    """Mask ``[b, d]`` of the ``int(ratio·d)`` largest magnitudes of ``features: [b, d]``; fewer where they tie."""
    dim = features.shape[1]
    count = int(ratio * dim)
    if count >= dim:
        return torch.ones_like(features, dtype=torch.bool)
    magnitude = features.detach().abs()
    threshold = magnitude.kthvalue(dim - count, dim=1, keepdim=True).values
    return magnitude > threshold


class FrequencyModel(WrappedBackbone):
    """Encoder, backbone, selection, classifier; replayed features enter behind the encoder."""

    def __init__(self, model: nn.Module, *, ratio: float, adapt: Literal["auto", "native", "upsample"]) -> None:
        super().__init__(model, "clfd", "img_size")
        size = model.img_size if isinstance(model.img_size, tuple) else (model.img_size, model.img_size)
        self.image_size: tuple[int, int] = size  # type: ignore[assignment]
        grid = getattr(model, "grid_size", None)
        resizable = hasattr(model, "set_input_size")
        # Half-size maps must still make a grid of at least 4 by 4 patches.
        enough = resizable and grid is not None and all(n % 2 == 0 and n >= 8 for n in grid)
        self.upsample = adapt == "upsample" or (adapt == "auto" and not enough)
        if not self.upsample:
            if not resizable:
                raise ConfigError("this model cannot take half-size input: use adapt='upsample'")
            try:
                model.set_input_size((size[0] // 2, size[1] // 2))  # type: ignore[operator]
            except ConfigError as error:
                raise ConfigError(f"{error}; with clfd, which halves images, use adapt='upsample'") from None
        channels = next(child.in_channels for child in model.modules() if isinstance(child, nn.Conv2d))
        self.encoder = FrequencyEncoder(channels, channels)
        self.selection = FeatureSelection(ratio)

    def forward(self, x: Tensor, *, replayed: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        """Images ``[b, ...]`` to logits ``[b + m, K]``, those of ``replayed: [m, ...]`` encoded features last."""
        encoded: Encoded = self.encoder(x)
        maps = encoded.features if replayed is None else torch.cat((encoded.features, replayed))
        if self.upsample:
            maps = F.interpolate(maps, size=self.image_size, mode="bilinear", align_corners=False)
        selected: Selected = self.selection(pooled_features(self.model, maps), allowed)
        return self.classify(selected.features)


def later_probabilities(counts: Tensor) -> Tensor:
    """``1 - exp(-2 n / max n)`` for counts ``[..., d]`` of how often each feature was selected."""
    return 1 - torch.exp(-2 * counts / counts.amax(dim=-1, keepdim=True).clamp(min=1))


def first_probabilities(similarity: Tensor, counts: Tensor) -> Tensor:
    """Probabilities ``[d]`` of a new class from its ``similarity: [o]`` to the old ones and their ``counts: [o, d]``.

    Features of the most similar old class are likely, those of the least similar one unlikely: the mean of
    ``1 - exp(-n_M/max · (s_M + 1)/avg)`` and ``exp(-n_m/max · avg/(s_m + 1))``, avg the mean of s + 1.
    """
    shifted = similarity + 1
    mean = shifted.mean()
    near, far = int(shifted.argmax()), int(shifted.argmin())
    tiny = torch.finfo(shifted.dtype).tiny
    low = torch.exp(-_relative(counts[far]) * (mean / shifted[far].clamp(min=tiny)))
    high = 1 - torch.exp(-_relative(counts[near]) * (shifted[near] / mean.clamp(min=tiny)))
    return (low + high) / 2


def _relative(counts: Tensor) -> Tensor:
    return counts / counts.max().clamp(min=1)


def jitter_crop(maps: Tensor, fill: Tensor, generator: torch.Generator, *, flip: bool) -> Tensor:
    """Random shift and random ``flip`` of each of ``maps: [m, c, h, w]``; what comes in has the colour ``fill: [c]``.

    Shifts are up to 2 (the original's, for maps of 16 pixels), less for maps below 16: an eighth of the width.
    """
    count, _, height, width = maps.shape
    reach = min(2, width // 8)
    padded = fill[None, :, None, None].expand(count, -1, height + 2 * reach, width + 2 * reach).clone()
    padded[..., reach : reach + height, reach : reach + width] = maps
    top, left = torch.randint(2 * reach + 1, (2, count), generator=generator)
    flipped = (torch.rand(count, generator=generator) < 0.5) & flip
    rows, columns = top[:, None] + torch.arange(height), left[:, None] + torch.arange(width)
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    image = torch.arange(count)[:, None, None]
    return padded.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def share_of(ratio: float, dim: int) -> int:
    """How many features a class of the first task may use at first: 1.1 of those selected."""
    return min(math.floor(1.1 * ratio * dim), dim)
