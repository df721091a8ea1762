"""`Stream`: predictions on a sequence while it arrives, in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from infssm.data import ImageFacts, SequenceFacts
from infssm.data.spectra import FrameStream
from infssm.errors import ConfigError
from infssm.learner.reading import SampleLike, sequence_input, sound_input
from infssm.models import Backbone, LanguageModel

P = TypeVar("P")


class Stream(Generic[P]):
    """One sequence that arrives in chunks; the prediction after each is that on everything so far.

    Only the model's state and, for sounds in frequency bands, a window of samples are kept, however long the sequence
    is. A new sequence needs a new stream.

    Args:
        model: a causal model in evaluation mode, ``[batch, tokens, width]`` to logits ``[batch, classes]``. Models that
            read in both directions (Vim, VMamba) are refused.
        samples: what the sequences of training were like, by which chunks become model input as in :meth:`predict`.
        predict: from logits ``[1, classes]`` to a prediction.
    """

    def __init__(self, model: nn.Module, samples: ImageFacts | SequenceFacts, predict: Callable[[Tensor], P]) -> None:
        if isinstance(samples, ImageFacts):
            raise ConfigError("an image is not a sequence that arrives in chunks: use predict")
        if not isinstance(model, Backbone):
            raise ConfigError(
                f"a stream needs a model that carries a state from chunk to chunk, and {type(model).__name__} has "
                "none: Mamba, Mamba-2 and S4D of infssm do"
            )
        if isinstance(model, LanguageModel):
            raise ConfigError("a language model predicts the next token instead of a class: use generate")
        self.model, self.samples, self._predict = model, samples, predict
        self.state = model.initial_state(1)
        self._frames = None
        if samples.rate is not None and samples.bands is not None:
            self._frames = FrameStream(samples.rate, samples.bands)

    @torch.no_grad()
    def push(self, chunk: SampleLike) -> P:
        """Read the next samples and return the prediction on the sequence so far.

        Args:
            chunk: of sounds ``[samples]`` at the rate of the training data, of series ``[time, width]``, of tokens
                ``[time]``; any number of them, at least one.
        """
        if self._frames is None:
            return self._predict(self._advance(sequence_input(chunk, self.samples)))
        complete, open_frames = self._frames.push(sound_input(chunk, self.samples))
        if len(complete):
            self._advance(complete)
        # Later samples will change the other frames, so the state after them is not kept.
        return self._predict(self.model(self._batch(open_frames), state=self.state))

    def _advance(self, tokens: Tensor) -> Tensor:
        logits: Tensor
        logits, self.state = self.model(self._batch(tokens), state=self.state, return_state=True)
        return logits

    def _batch(self, tokens: Tensor) -> Tensor:
        like = next(self.model.parameters())
        return tokens[None].to(like.device, like.dtype if tokens.is_floating_point() else None)
