"""A learner as a scikit-learn classifier, which goes into pipelines, searches and cross-validation."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from infssm.errors import ConfigError, InfssmError
from infssm.learner import Learner

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ConfigError("ContinualClassifier needs scikit-learn 1.6 or newer: pip install 'infssm[bench]'") from None


class ContinualClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An :class:`infssm.Learner` with scikit-learn's interface.

    ```python
    from infssm.integrations.sklearn import ContinualClassifier

    classifier = ContinualClassifier("vim_nano", weights="omniglot").fit(images, labels)
    classifier.partial_fit(more_images, more_labels)  # new classes, more images of known ones, or both
    classifier.predict(test_images)
    ```

    Samples are images, uint8 ``[n, height, width]`` or ``[n, height, width, 3]``, or series of numbers ``[n, time,
    width]``; a table ``[n, time]`` holds series of one number per step. A new class needs two samples or more.

    Args:
        model: as for the learner, and likewise the next two.
        weights: file or name of pre-trained weights.
        method: as for ``infssm run``.
        unknown: share of a class's own samples that may be called unknown.
        random_state: seed of initial weights, order and augmentation.
        settings: further settings, nested as in a config file.

    Attributes:
        classes_: labels of the classes so far, sorted; columns of probabilities follow them.
        learner_: the learner.
        n_features_in_: length of the samples' first axis.
    """

    classes_: Any
    learner_: Learner

    def __init__(
        self,
        model: str | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        method: str = "frozen+gda",
        unknown: float = 0.05,
        random_state: Any = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.weights = weights
        self.method = method
        self.unknown = unknown
        self.random_state = random_state
        self.settings = settings

    def fit(self, X: Any, y: Any) -> ContinualClassifier:
        """Learn from samples ``X: [n, ...]`` with labels ``y: [n]``, and from nothing before."""
        return self._learn(X, y, new=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> ContinualClassifier:  # noqa: ARG002
        """Learn new classes, more samples of known ones, or both; ``classes`` is not needed and not used."""
        return self._learn(X, y, new=not hasattr(self, "learner_"))

    def _learn(self, X: Any, y: Any, *, new: bool) -> ContinualClassifier:
        X, y = validate_data(self, X, y, reset=new, allow_nd=True, dtype=None)
        check_classification_targets(y)
        samples = _samples(X)
        known = () if new else self.classes_
        classes = np.unique(np.concatenate([known, y]) if len(known) else y)
        with _sklearn_errors():
            if new:
                fixed = isinstance(self.random_state, (int, np.integer))
                seed = self.random_state if fixed else check_random_state(self.random_state).randint(2**31)
                learner = Learner(
                    self.model,
                    weights=self.weights,
                    method=self.method,
                    unknown=self.unknown,
                    seed=int(seed),
                    settings=self.settings,
                )
            else:
                learner = self.learner_
            learner.learn(samples, [str(label) for label in y])
        self.learner_, self.classes_ = learner, classes
        return self

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample: ``[n]``."""
        shares = self.predict_proba(X)
        return self.classes_[shares.argmax(axis=1)]

    def predict_proba(self, X: Any) -> Any:
        """Calibrated probabilities ``[n, classes]``."""
        found = self._predictions(X)
        return np.array([[one.probabilities[str(label)] for label in self.classes_] for one in found])

    def predict_known(self, X: Any) -> Any:
        """Whether each sample is like those of some class: bool ``[n]``."""
        return np.array([one.known for one in self._predictions(X)])

    def _predictions(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, allow_nd=True, dtype=None)
        with _sklearn_errors():
            return self.learner_.predict(list(_samples(X)))

    def __getstate__(self) -> dict[str, Any]:
        """The state with the files of the learner: tensors and JSON, which need no code to be read."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "learner_" in state:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "learner"
                copy.copy(self.learner_).save(folder)
                files = [path for path in folder.rglob("*") if path.is_file()]
                state["learner_"] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        values = dict(state)
        if "learner_" in values:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in values["learner_"].items():
                    path = Path(folder) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                values["learner_"] = Learner.load(folder)
            values["learner_"].folder = None
        super().__setstate__(values)


@contextmanager
def _sklearn_errors() -> Iterator[None]:
    """Raise what is wrong with samples or settings as ValueError, which scikit-learn's tools expect."""
    try:
        yield
    except InfssmError as error:
        raise ValueError(str(error)) from error


def _samples(X: Any) -> Any:
    """Images as they are, everything else as series float32 ``[n, time, width]``."""
    if X.dtype == np.uint8 and X.ndim > 2:
        return X
    if X.ndim > 3:
        raise ValueError(f"images must be uint8 [n, height, width] or [n, height, width, 3], got {X.dtype} {X.shape}")
    series = np.asarray(X, dtype=np.float32)
    return series[:, :, None] if series.ndim == 2 else series
