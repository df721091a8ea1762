"""Parts of a model in a form that an exported program can hold: raw input, any length, no complex numbers.

An exported file is used without infssm, so what evaluation does before the model has to be in the file: images are
resized, cropped and normalised, sounds become log energies in frequency bands.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infssm.data import ImageFacts, PerImageRecipe, Recipe, SequenceFacts
from infssm.data.spectra import log_of, mel_bank, step_of
from infssm.methods.core.views import ViewsClassifier
from infssm.models.features import find_classifier
from infssm.models.s4d import S4DMixer
from infssm.ssm import unwrap


class RecurrentS4D(nn.Module):
    """An S4D mixer as a recurrence in real arithmetic, for sequences of any length: [batch, tokens, channels].

    ONNX has no complex numbers, and the Fourier transform of the mixer would fix the length.
    """

    a_real: Tensor
    a_imag: Tensor
    """Discrete transition [channels, n/2]."""
    c_real: Tensor
    c_imag: Tensor
    """What the states are read out by [channels, n/2]: twice C times the discretised B."""

    def __init__(self, mixer: S4DMixer) -> None:
        super().__init__()
        transition, factor = (part.detach() for part in mixer.kernel.discretize())
        readout = 2 * mixer.kernel.complex_c().detach() * factor
        for name, value in (("a", transition), ("c", readout)):
            # Separate tensors, since the body of scan may not read views of one.
            self.register_buffer(f"{name}_real", value.real.clone())
            self.register_buffer(f"{name}_imag", value.imag.clone())
        self.D, self.output_linear = mixer.D, mixer.output_linear

    def forward(self, u: Tensor) -> Tensor:
        """u: [batch, tokens, channels]."""
        from torch._higher_order_ops.scan import scan

        a, b, c, d = self.a_real, self.a_imag, self.c_real, self.c_imag

        def step(state: list[Tensor], token: Tensor) -> tuple[list[Tensor], Tensor]:
            real, imag = state
            real, imag = a * real - b * imag + token.unsqueeze(-1), b * real + a * imag
            return [real, imag], (c * real - d * imag).sum(-1)

        zeros = u.new_zeros(u.shape[0], *a.shape)
        _, y = scan(step, [zeros, zeros.clone()], u.transpose(0, 1))
        y = F.gelu(y.transpose(0, 1) + self.D * u)
        projection = self.output_linear[0]
        return F.glu(F.linear(y, projection.weight.squeeze(-1), projection.bias), dim=-1)  # type: ignore[operator, arg-type]


def with_recurrent_s4d(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose S4D layers are recurrences; the model itself if it has none."""
    if any(isinstance(module, S4DMixer) for module in model.modules()):
        model = copy.deepcopy(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, S4DMixer):
                model.set_submodule(name, RecurrentS4D(module))
    return model


class _CdistWithoutBranches(TorchFunctionMode):
    """Euclidean distances by their definition: torch.cdist takes another way above 25 rows, which fixes the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.cdist and len(args) == 2 and options.get("p", 2.0) == 2.0:
            return (args[0].unsqueeze(-2) - args[1].unsqueeze(-3)).square().sum(-1).sqrt()
        return func(*args, **options)


Judge: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Features ``[n, d]`` to logits, probabilities ``[n, K]`` and whether a sample is like some class ``[n]``."""


class _Judging(nn.Module):
    """Replaces a classifier, and has all outputs of a judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :data:`Judge`."""
        logits, probabilities, known = self._judge(features)
        return logits, probabilities.float(), known


class Portable(nn.Module):
    """A model behind the steps that evaluation takes before it, reading logits of the first ``classes`` outputs.

    Args:
        model: model input ``[n, ...]`` to logits ``[n, K]``.
        before: what turns the input of the file into model input.
        classes: outputs beyond these belong to tasks that were not learnt; None keeps all.
        judge: of a learner; there are then three outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        before: nn.Module | None = None,
        classes: int | None = None,
        judge: Judge | None = None,
    ) -> None:
        super().__init__()
        self.model, self.before, self.classes = with_recurrent_s4d(model), before or nn.Identity(), classes
        if judge is not None:
            self.model = copy.deepcopy(model) if self.model is model else self.model
            place = find_classifier(unwrap(self.model))
            if isinstance(place.module, ViewsClassifier):
                place.module.fitted = _Judging(judge)
            else:
                place.replace(_Judging(judge))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Input of the file ``[n, ...]`` to logits ``[n, classes]``, with a judge to all its outputs."""
        with _CdistWithoutBranches():
            found: Tensor | tuple[Tensor, Tensor, Tensor] = self.model(self.before(x))
        return found[:, : self.classes] if isinstance(found, Tensor) and self.classes is not None else found


class Normalize(nn.Module):
    """Pixels uint8 [n, channels, size, size] to model input float32 [n, channels, size, size]."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.stats = recipe.eval_stats

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        return self.stats.normalize(pixels)


class LogEnergies(nn.Module):
    """Sounds float32 [n, samples] to log energies in frequency bands, float32 [n, steps, bands].

    The Fourier transform of each window is a convolution with cosines and sines, which every runtime has.
    """

    waves: Tensor
    bank: Tensor

    def __init__(self, facts: SequenceFacts) -> None:
        super().__init__()
        assert facts.rate is not None
        assert facts.bands is not None
        bank = mel_bank(facts.bands, facts.rate)
        self.window, self.step = 2 * (bank.shape[1] - 1), step_of(facts.rate)
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
    by_image = isinstance(recipe, PerImageRecipe)  # torchvision rounds sides and margins in another way than `to_raw`
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
