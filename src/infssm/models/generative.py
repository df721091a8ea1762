"""Generative classifiers: the probability of a sample under each class, and samples drawn from a class.

A sample becomes a short sequence of quantised values, and a causal stack of mixers, which all classes share, predicts
each value from those before it. The most probable class is the prediction (Bayes' rule with equal priors), and the
recurrent step draws new samples of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.backbone import Backbone
from infssm.models.generate import sample
from infssm.models.mamba import MambaMixer
from infssm.models.mamba2 import Mamba2Mixer
from infssm.models.registry import register_model
from infssm.models.sequence import SequenceEncoder


class ClassLikelihood(nn.Module):
    """Log probabilities ``[b, classes]`` of quantised samples ``[b, tokens]`` under every class.

    A class has vectors of its own for each level, in the input and in the output: with one alphabet for all classes
    the model hardly listens to the class it is told. All tensors have one row for every class, so classes can be added.

    Args:
        encoder: the stack of mixers, whose embedding is that of the positions; it belongs to the model.
        num_classes: number of classes.
        levels: number of values that a token can have.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int, levels: int) -> None:
        super().__init__()
        # In a tuple, so that its tensors are the model's alone: those in the classifier's place are the classes' rows.
        self._encoder = (encoder,)
        self.in_features, width = self._positions.shape
        self.start = nn.Parameter(0.02 * torch.randn(num_classes, 1, width))
        self.previous = nn.Parameter(0.02 * torch.randn(num_classes, levels, width))
        self.output = nn.Parameter(0.02 * torch.randn(num_classes, levels, width))

    def forward(self, values: Tensor) -> Tensor:
        """``log p(values | class)`` of every class for ``values: [b, tokens]``: ``[b, classes]``."""
        columns = []
        for label in range(len(self.start)):  # one class at a time takes the memory of one
            found = self.log_probs(values, torch.full((len(values),), label, device=values.device))
            columns.append(found.gather(-1, values.long()[..., None]).sum(dim=(1, 2)))
        return torch.stack(columns, dim=1)

    def log_probs(self, values: Tensor, labels: Tensor) -> Tensor:
        """Log probabilities of every level for every token, given those before it: ``[b, tokens, levels]``.

        values: [b, tokens], indices of levels. labels: [b], the class that each sample is taken for.
        """
        levels, classes = values.long(), labels[:, None]
        inputs = torch.cat((self.start[labels], self.previous[classes, levels[:, :-1]]), dim=1) + self._positions
        return self._predict(self._encoder[0](inputs), labels)

    @torch.no_grad()
    def generate(self, labels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a sample of each class in ``labels: [b]``: int64 ``[b, tokens]``."""
        encoder, drawn = self._encoder[0], list[Tensor]()
        states, inputs = encoder.initial_state(len(labels)), self.start[labels]
        for position in self._positions:
            features, states = encoder.advance(inputs + position, states)
            drawn.append(sample(self._predict(features, labels)[:, 0], 1.0, 1.0, generator))
            inputs = self.previous[labels, drawn[-1]][:, None]
        return torch.stack(drawn, dim=1)

    @property
    def _positions(self) -> Tensor:
        weight = self._encoder[0].embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    def _predict(self, features: Tensor, labels: Tensor) -> Tensor:
        return torch.einsum("btd,bld->btl", features, self.output[labels]).log_softmax(-1)


class GenerativeClassifier(Backbone):
    """Images or series -> ``log p(sample | class)`` [batch, num_classes]; the features are the sample's values.

    A sample is averaged to ``side`` x ``side`` values (a series to ``side`` steps of at most ``side`` numbers), which
    are rounded to ``levels``. The range of the levels is that of the first task, see :meth:`fit_range`.

    Args:
        mixer: class of the mixers, which ``options`` go to.
        num_classes: classes; more can be added.
        in_chans: channels of images; a pixel is so many tokens.
        in_dim: numbers per step of series, in the place of ``in_chans``.
        side: rows and columns of a sample.
        levels: values that a token can have.
    """

    supported_data = frozenset({"images", "series"})
    head_kinds = (ClassLikelihood, nn.Identity)

    def __init__(
        self,
        mixer: Callable[..., Any],
        *,
        num_classes: int = 10,
        in_chans: int = 1,
        in_dim: int | None = None,
        side: int = 8,
        levels: int = 17,
        **options: Any,
    ) -> None:
        super().__init__()
        if levels < 2:
            raise ConfigError(f"levels={levels}: a token has 2 values at least")
        self.grid = (side, side) if in_dim is None else (side, min(side, in_dim))
        self.in_chans = in_chans if in_dim is None else 1
        self.num_features, self.num_classes, self.levels = (
            self.in_chans * self.grid[0] * self.grid[1],
            num_classes,
            levels,
        )
        self.backbone = SequenceEncoder(mixer, vocab_size=self.num_features, **options)
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))
        self.head = self.make_head(num_classes)

    def make_head(self, num_classes: int) -> nn.Module:
        """A classifier with freshly initialised classes; the mixers are as they were."""
        return ClassLikelihood(self.backbone, num_classes, self.levels) if num_classes else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, **state: Any) -> Tensor:
        """Logits; ``mask: [batch, time]`` is False where series are padded."""
        if state:
            return super().forward(x, **state)  # type: ignore[no-any-return]
        logits: Tensor = self.head(self.embed(x, mask))
        return logits

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images [batch, channels, height, width] or series [batch, time, in_dim] to indices of levels [b, tokens]."""
        scaled = (self.pooled(x, mask) - self.low) * ((self.levels - 1) / (self.high - self.low))
        return scaled.round().clamp(0, self.levels - 1)

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Samples as one number for every token, before they are rounded: [batch, tokens]."""
        if x.ndim == 4:
            return F.adaptive_avg_pool2d(x, self.grid).movedim(1, -1).flatten(1)
        # Every series is stretched to the same length, its padding left out.
        lengths = [x.shape[1]] * len(x) if mask is None else mask.sum(dim=1).tolist()
        rows = [F.adaptive_avg_pool2d(row[None, :n], self.grid) for row, n in zip(x, lengths, strict=True)]
        return torch.cat(rows).flatten(1)

    @torch.no_grad()
    def fit_range(self, inputs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Make the lowest and the highest value among ``inputs``, pairs of samples and mask, the ends of the range."""
        ends = [torch.stack(self.pooled(x, mask).aminmax()) for x, mask in inputs]
        self.low, self.high = torch.stack(ends)[:, 0].amin(), torch.stack(ends)[:, 1].amax()

    def encode(self, tokens: Tensor) -> Tensor:
        """The values as they are: the classifier reads them under every class."""
        return tokens

    def pool(self, features: Tensor) -> Tensor:
        """The values as they are."""
        return features

    def head_shape_differs(self, state: dict[str, Tensor]) -> bool:
        """See `Backbone`."""
        rows = state.get("head.start")
        return rows is None or not isinstance(self.head, ClassLikelihood) or len(rows) != len(self.head.start)

    def no_weight_decay(self) -> set[str]:
        """See `Backbone`."""
        return {name for name, _ in self.named_parameters() if name.endswith("A_log")}


_NANO = {"d_model": 64, "n_layer": 2}


@register_model("mamba_generative_nano")
def mamba_generative_nano(**options: Any) -> GenerativeClassifier:
    """Small Mamba that models samples of each class, pixel by pixel, to classify and to generate them."""
    return GenerativeClassifier(MambaMixer, **{**_NANO, **options})


@register_model("mamba2_generative_nano")
def mamba2_generative_nano(**options: Any) -> GenerativeClassifier:
    """Small Mamba-2 that models samples of each class, pixel by pixel, to classify and to generate them."""
    return GenerativeClassifier(Mamba2Mixer, **{**_NANO, "headdim": 32, "d_state": 16, **options})
