"""`load`: from a run directory to a model that classifies; the training data need not be there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from infssm.data import ImageFacts, Recipe, SequenceFacts, StreamFacts
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import load_config
from infssm.learner.modeling import build_method_and_recipe, known_facts, load_weights
from infssm.learner.reading import SampleLike, model_input, padded, sequence_input
from infssm.learner.scoring import SCORES
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory


class Prediction(NamedTuple):
    """What a model says of one image.

    Attributes:
        label: name of the most probable class.
        probability: of that class.
        probabilities: of every class the model has learnt, by name, most probable first.
        known: whether the sample is like those of some class; see :class:`infssm.Learner`. A run does not tell.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    known: bool = True


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained model with what it takes to use it.

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
            return padded([sequence_input(sample, facts) for sample in images])
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
            return self._predict([images])[0]
        chunks = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        return [prediction for chunk in chunks for prediction in self._predict(chunk)]

    def _predict(self, images: Sequence[SampleLike]) -> list[Prediction]:
        logits = self.logits(self.transform(images)).float().cpu()
        if not bool(logits.amax(1).isfinite().all()):  # -inf is a class that was not learnt, NaN or inf no answer
            raise DataError("the model gives no finite logits for a sample: its values are too large, or not finite")
        shares = logits.softmax(1)
        order = shares.argsort(dim=1, descending=True, stable=True)
        found = []
        for share, ranks in zip(shares.tolist(), order.tolist(), strict=True):
            ranking = {self.classes[k]: share[k] for k in ranks}
            found.append(Prediction(self.classes[ranks[0]], share[ranks[0]], ranking))
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
            f"{directory.path} does not say what its classes and images were: its {layout.STREAM} is missing; "
            "`infssm eval` still tests it, with its data"
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
            f"{directory.path / layout.STREAM} names two classes alike, so predictions would not tell them apart: give "
            "each class a name of its own and train again"
        )
    return TrainedClassifier(method.module.eval().requires_grad_(False), known, facts.samples, recipe)
