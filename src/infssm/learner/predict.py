"""Predictions: `load_classifier` opens a run to classify with, `Stream` reads a sequence while it arrives."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from infssm._batch import model_input, moved_to, run_model
from infssm._modality import Modality, modality_of
from infssm.data import Recipe, SampleFacts, SequenceFacts, StreamFacts
from infssm.data.facts import SampleLike
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import load_config
from infssm.learner.scoring import SCORES
from infssm.learner.setup import build_method_and_recipe, known_facts, load_weights
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


class Predictor(ABC):
    """What can be asked for the class of a sample."""

    @overload
    def predict(self, samples: list[SampleLike], *, batch_size: int = 64) -> list[Prediction]: ...
    @overload
    def predict(self, samples: SampleLike, *, batch_size: int = 64) -> Prediction: ...
    def predict(self, samples: SampleLike | list[SampleLike], *, batch_size: int = 64) -> Prediction | list[Prediction]:
        """The most probable class, and the probabilities of all, of a sample or of each of a list.

        An image is the path of a file, a PIL image, or uint8 pixels ``[height, width]`` or ``[height, width, 3]`` as an
        array or a tensor. A sound is the path of a wav file or a waveform ``[samples]``; a series is numbers ``[time,
        width]`` or the path of an .npy or .csv file of them. A learner's probabilities are calibrated, and it also says
        whether the sample is like those of any class; those of a run are the softmax of the logits: how sure the model
        is, not how right. Values that are NaN or infinite raise :class:`~infssm.errors.DataError`.

        Args:
            samples: one, or a list.
            batch_size: samples of a list that are classified at once.
        """
        if not isinstance(samples, list):
            return self.predict([samples])[0]
        answer = self._answer()
        batches = (samples[start : start + batch_size] for start in range(0, len(samples), batch_size))
        return [prediction for batch in batches for prediction in answer(batch)]

    @abstractmethod
    def _answer(self) -> Callable[[list[SampleLike]], list[Prediction]]:
        """From a batch to predictions, by what is known now."""


@dataclass(frozen=True)
class TrainedClassifier(Predictor):
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
    samples: SampleFacts
    recipe: Recipe | None
    judge: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def modality(self) -> Modality:
        """What kind of data it reads."""
        return modality_of(self.samples.kind, len(self.classes))

    def transform(self, images: Sequence[SampleLike]) -> Tensor | Mapping[str, Tensor]:
        """Images of any kind that :meth:`predict` takes to model input ``[n, channels, size, size]``.

        Sounds and series to ``[n, time, width]``; of different lengths to keyword arguments ``x`` and ``mask``.
        """
        read = [self.samples.read(sample, self.recipe) for sample in images]
        return model_input(self.modality.collate(read, torch.zeros(len(read))))

    @torch.no_grad()
    def logits(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Model input ``[n, ...]`` to logits of the classes learnt: ``[n, len(classes)]``."""
        output: Tensor = run_model(self.model, moved_to(self.model, x))
        return output[:, : len(self.classes)]

    def _answer(self) -> Callable[[list[SampleLike]], list[Prediction]]:
        def answer(samples: list[SampleLike]) -> list[Prediction]:
            logits = self.logits(self.transform(samples)).float().cpu()
            return predictions(self.classes, logits, logits.softmax(1))

        return answer


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

    def __init__(self, model: nn.Module, samples: SampleFacts, predict: Callable[[Tensor], P]) -> None:
        if not isinstance(samples, SequenceFacts):
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
        self._frames = samples.frames()

    @torch.no_grad()
    def push(self, chunk: SampleLike) -> P:
        """Read the next samples and return the prediction on the sequence so far.

        Args:
            chunk: of sounds ``[samples]`` at the rate of the training data, of series ``[time, width]``, of tokens
                ``[time]``; any number of them, at least one.
        """
        if self._frames is None:
            return self._predict(self._advance(self.samples.read(chunk)))
        complete, open_frames = self._frames.push(self.samples.raw(chunk))
        if len(complete):
            self._advance(complete)
        # Later samples will change the other frames, so the state after them is not kept.
        return self._predict(self.model(self._batch(open_frames), state=self.state))

    def _advance(self, tokens: Tensor) -> Tensor:
        logits: Tensor
        logits, self.state = self.model(self._batch(tokens), state=self.state, return_state=True)
        return logits

    def _batch(self, tokens: Tensor) -> Tensor:
        return moved_to(self.model, tokens[None])
