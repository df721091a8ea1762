"""The input of exported models: what evaluation does before the model, in a form that an exported file can hold.

An exported file is used without infssm, so it resizes, crops and normalises images and turns sounds into log energies
by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.data.spectra import log_of, mel_bank, step_of

if TYPE_CHECKING:
    from infssm.data.images import ImageFacts
    from infssm.data.recipes import Recipe, Stats


@dataclass(frozen=True)
class ExportedInput:
    """What an exported model takes.

    Attributes:
        name: of the input in the file.
        example: two samples, ``[2, ...]``, to trace the model with.
        reading: Python lines that read a sample into a variable of that name.
        imports: what these lines import, after ``import json, numpy, onnxruntime``.
        about: what the input is, for the metadata of the file.
        before: from ``example`` to model input; None where they are the same.
        resize: a graph in ONNX's text form from raw images to ``example``; None where the file takes sequences
            ``[n, time, ...]`` of any length.
        raw: batches of raw images that the file is compared with the model on.
    """

    name: str
    example: Tensor
    reading: str
    imports: str = ""
    about: Mapping[str, Any] | None = None
    before: nn.Module | None = None
    resize: str | None = None
    raw: tuple[Tensor, ...] = ()


class Normalize(nn.Module):
    """Pixels uint8 [n, channels, size, size] to model input float32 [n, channels, size, size]."""

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self.stats = stats

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        return self.stats.normalize(pixels)


class LogEnergies(nn.Module):
    """Sounds float32 [n, samples] to log energies in frequency bands, float32 [n, steps, bands].

    The Fourier transform of each window is a convolution with cosines and sines, which every runtime has.
    """

    waves: Tensor
    bank: Tensor

    def __init__(self, bands: int, rate: int) -> None:
        super().__init__()
        bank = mel_bank(bands, rate)
        self.window, self.step = 2 * (bank.shape[1] - 1), step_of(rate)
        spectrum = torch.fft.rfft(torch.eye(self.window, dtype=torch.float64)).T  # [frequencies, window]
        waves = torch.cat([spectrum.real, spectrum.imag]) * torch.hann_window(self.window, dtype=torch.float64)
        self.register_buffer("waves", waves.float()[:, None])
        self.register_buffer("bank", bank.T)

    def forward(self, sound: Tensor) -> Tensor:
        """See the class."""
        parts = F.conv1d(F.pad(sound[:, None], (0, self.window - 1)), self.waves, stride=self.step)
        real, imag = parts.chunk(2, dim=1)
        energy = (real.square() + imag.square()) / self.window
        return log_of(energy.transpose(1, 2) @ self.bank)


class Waveform(nn.Module):
    """Sounds float32 [n, samples] to series of one number per step, [n, samples, 1]."""

    def forward(self, sound: Tensor) -> Tensor:
        """See the class."""
        return sound.unsqueeze(-1)


def resizing_graph(facts: ImageFacts, recipe: Recipe) -> str:
    """The way of an image of any size to the pixels that :class:`Normalize` reads, as a graph in ONNX's text form.

    uint8 [n, height, width, 3], or [n, height, width] for models of grey images, to uint8 [n, channels, size, size].
    onnxruntime's antialiased cubic ``Resize`` of uint8 is Pillow's bicubic filter, bit for bit.
    """
    grey = facts.channels == 1
    given = "n, height, width" if grey else "n, height, width, 3"
    planes = "Unsqueeze (image, axis_1)" if grey else "Transpose <perm = [0, 3, 1, 2]> (image)"
    by_image = recipe.by_image  # torchvision rounds sides and margins in another way than `to_raw`
    sides, start = ("Floor (exact)", "Round (half_margin)") if by_image else ("Round (exact)", "Floor (half_margin)")
    output, branch = "pixels", ""
    if not by_image and facts.height is not None and (facts.height, facts.width) != (recipe.size, recipe.size):
        # Images that have the size of the training data are resized as a batch of them is, by a bilinear filter.
        output = "resized_any"
        branch = """
  own_size = Equal (shape, trained_size)
  own_size_int = Cast <to = 7> (own_size)
  own_both = ReduceMin <keepdims = 0> (own_size_int)
  is_own = Cast <to = 9> (own_both)
  pixels = If (is_own) <
    then_branch = own () => (uint8[n, c, s, s] own_pixels) {
      own_float = Cast <to = 1> (planes)
      own_sizes = Concat <axis = 0> (lead, size_2)
      own_resized = Resize <mode = "linear", antialias = 1, exclude_outside = 1> (own_float, , , own_sizes)
      own_round = Round (own_resized)
      own_pixels = Cast <to = 2> (own_round)
    },
    else_branch = other () => (uint8[n, c, s, s] other_pixels) { other_pixels = Identity (resized_any) }
  >"""
    return f"""
<ir_version: 10, opset_import: ["" : 20]>
resize (uint8[{given}] image) => (uint8[n, {facts.channels}, {recipe.size}, {recipe.size}] pixels)
<int64[1] axis_1 = {{1}}, int64[2] axes_2_3 = {{2, 3}}, int64[1] raw_size = {{{recipe.raw_size}}},
 int64[2] size_2 = {{{recipe.size}, {recipe.size}}}, double half = {{0.5}},
 int64[2] trained_size = {{{facts.height or 0}, {facts.width or 0}}}>
{{
  planes = {planes}
  lead = Shape <end = 2> (planes)
  shape = Shape <start = 2> (planes)
  shape_double = Cast <to = 11> (shape)
  short_double = ReduceMin <keepdims = 1> (shape_double)
  raw_double = Cast <to = 11> (raw_size)
  scaled = Mul (shape_double, raw_double)
  exact = Div (scaled, short_double)
  sides_double = {sides}
  sides_int = Cast <to = 7> (sides_double)
  sides = Max (sides_int, raw_size)
  resized_sizes = Concat <axis = 0> (lead, sides)
  resized = Resize <mode = "cubic", cubic_coeff_a = -0.5, antialias = 1, exclude_outside = 1>
    (planes, , , resized_sizes)
  margin = Sub (sides, size_2)
  margin_double = Cast <to = 11> (margin)
  half_margin = Mul (margin_double, half)
  start_double = {start}
  start = Cast <to = 7> (start_double)
  stop = Add (start, size_2)
  {output} = Slice (resized, start, stop, axes_2_3){branch}
}}"""
