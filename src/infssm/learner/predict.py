"""Predictions: `load_classifier` opens a run to classify with, `Stream` reads a sequence while it arrives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from infssm._batch import inputs_of
from infssm._modality import pad
from infssm.data import ImageFacts, Recipe, SequenceFacts, StreamFacts
from infssm.data.spectra import FrameStream
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import load_config
from infssm.learner.modeling import build_method_and_recipe, known_facts, load_weights
from infssm.learner.reading import SampleLike, model_input, sequence_input, sound_input
from infssm.learner.scoring import SCORES
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory
from infssm.models import Backbone, LanguageModel


class Prediction(NamedTuple):
    """The prediction of a model for one sample.

    Attributes:
        label: name of the most probable class.
        probability: probability of that class.
        probabilities: probability of every learnt class, by name, most probable first.
        known: whether the sample is like those of some class; see :class:`infssm.Learner`. Always true of a
            run, which is not calibrated.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    known: bool = True


def predictions(
    classes: Sequence[str], logits: Tensor, shares: Tensor, known: Tensor | None = None
) -> list[Prediction]:
    """Predictions from logits and probabilities ``[n, K]``, and from which samples are like some class ``[n]``.

    Raises DataError if a sample has no finite logit: ``-inf`` is a class that was not learnt, NaN or inf no answer.
    """
    if not bool(logits.amax(1).isfinite().all()):
        raise DataError("the model gives no finite logits for a sample: its values are too large or not finite")
    order, found = shares.argsort(dim=1, descending=True, stable=True).tolist(), []
    familiar = [True] * len(order) if known is None else known.tolist()
    for share, ranks, like in zip(shares.tolist(), order, familiar, strict=True):
        ranking = {classes[k]: share[k] for k in ranks}
        found.append(Prediction(classes[ranks[0]], share[ranks[0]], ranking, like))
    return found


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained model, its classes and its preprocessing.

    Attributes:
        model: in evaluation mode, with the head that the run reached; model input ``[b, ...]`` to logits ``[b, K]``.
        classes: names of the classes it has learnt; logits beyond them belong to tasks it has not seen.
        samples: what the images or sequences of training were like.
        recipe: whose ``eval`` turns raw images into model input; None for sequences.
        judge: of a learner, from features ``[b, d]`` to logits ``[b, K]``, calibrated probabilities ``[b, K]`` and
            whether the sample is like some class ``[b]``; None for a run, which is not calibrated.
    """

    model: nn.Module
    classes: tuple[str, ...]
    samples: ImageFacts | SequenceFacts
    recipe: Recipe | None
    judge: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    def transform(self, images: Sequence[SampleLike]) -> Tensor | Mapping[str, Tensor]:
        """Images of any kind that :meth:`predict` takes to model input ``[n, channels, size, size]``.

        Sounds and series to ``[n, time, width]``; of different lengths to keyword arguments ``x`` and ``mask``.
        """
        if isinstance(self.samples, SequenceFacts):
            facts = self.samples
            return inputs_of(*pad([sequence_input(sample, facts) for sample in images]))
        assert self.recipe is not None
        return torch.stack([model_input(image, self.samples, self.recipe) for image in images])

    @torch.no_grad()
    def logits(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Model input ``[n, ...]`` to logits of the classes learnt: ``[n, len(classes)]``."""
        like = next(self.model.parameters())
        given = x if isinstance(x, Mapping) else {"x": x}
        first, *others = (v.to(like.device, like.dtype if v.is_floating_point() else None) for v in given.values())
        output: Tensor = self.model(first, *others)
        return output[:, : len(self.classes)]

    @overload
    def predict(self, images: SampleLike, *, batch_size: int = 64) -> Prediction: ...
    @overload
    def predict(self, images: list[SampleLike], *, batch_size: int = 64) -> list[Prediction]: ...
    def predict(self, images: SampleLike | list[SampleLike], *, batch_size: int = 64) -> Prediction | list[Prediction]:
        """Classes and probabilities of an image, or of a list of images; likewise of sounds and series.

        An image is the path of a file, a PIL image, or uint8 pixels ``[height, width]`` or ``[height, width, 3]`` as an
        array or a tensor. A sound is the path of a wav file or a waveform ``[samples]``; a series is numbers ``[time,
        width]`` or the path of an .npy or .csv file of them. Probabilities are the softmax of the logits: how sure the
        model is, not how right. Values that are NaN or infinite raise :class:`~infssm.errors.DataError`.
        """
        if not isinstance(images, list):
            return self.predict([images])[0]
        found = list[Prediction]()
        for start in range(0, len(images), batch_size):
            logits = self.logits(self.transform(images[start : start + batch_size])).float().cpu()
            found += predictions(self.classes, logits, logits.softmax(1))
        return found


def load_classifier(run: str | os.PathLike[str], *, task: int | None = None, device: str = "cpu") -> TrainedClassifier:
    """The model of a run, ready to classify images, sounds or series.

    ```python
    classifier = infssm.load("runs/digits-5/seq/vim_nano/seed0-1a2b3c4d")
    classifier.predict("seven.png").label
    ```

    Args:
        run: the run directory.
        task: the model as it was after this task; the last one by default.
        device: where to compute.
    """
    directory = RunDirectory.open(run)
    last = directory.saved_task(task)
    if not (directory.path / layout.STREAM).exists():
        raise DataError(
            f"{directory.path} does not have its classes and kind of images: its {layout.STREAM} is missing; "
            "`infssm eval` can still test it with its data"
        )
    config, facts = load_config(directory.config()), StreamFacts.from_json(directory.stream())
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={device!r} cannot be used on this machine: {reason}; device='cpu' can") from None
    if facts.modality.scoring == "numbers":
        raise ConfigError(f"{directory.path} predicts numbers instead of classes: test it with `infssm eval`")
    if not SCORES[facts.modality.scoring].has_classes:
        raise ConfigError(f"{directory.path} is a language model, which has no classes: test it with `infssm eval`")
    known_then = known_facts(config, facts, last)
    method, recipe = build_method_and_recipe(config, known_then, place, weights=False, regularizers=False)
    load_weights(method, directory.weights_path(last))
    known = facts.classes[: facts.seen(last)]
    if len(set(known)) < len(known):
        raise DataError(
            f"{directory.path / layout.STREAM} has two classes of one name, so predictions would be ambiguous: give "
            "each class a name of its own and train again"
        )
    return TrainedClassifier(method.module.eval().requires_grad_(False), known, facts.samples, recipe)


P = TypeVar("P")


class Stream(Generic[P]):
    """One sequence that arrives in chunks; the prediction after each is that on everything so far.

    Only the model's state and, for sounds in frequency bands, a window of samples are kept, however long the sequence
    is. A new sequence needs a new stream.

    Args:
        model: a causal model in evaluation mode, ``[batch, tokens, width]`` to logits ``[batch, classes]``. Models that
            read in both directions (Vim, VMamba) are refused.
        samples: what the sequences of training were like, by which chunks become model input as in :meth:`predict`.
        predict: maps logits ``[1, classes]`` to a prediction.
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
            chunk: for sounds ``[samples]`` at the rate of the training data, of series ``[time, width]``, of tokens
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
