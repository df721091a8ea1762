"""The scikit-learn classifier, by scikit-learn's own checks and on images."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from infssm.integrations.sklearn import ContinualClassifier
from tests.learner.taught import digits, taught

TINY = {
    "model": {"options": {"d_model": 16, "n_layer": 1}},
    "train": {"epochs": 2, "batch_size": 16, "threads": 1, "lr": 0.01},
}
NOT_PASSED = {
    "check_methods_subset_invariance": "asks for 1e-7, and sums of float32 depend on the batch in the seventh digit",
    "check_array_api_input": "needs SCIPY_ARRAY_API, which must be set before SciPy is imported",
}


@pytest.mark.filterwarnings("ignore")
def test_estimator_checks() -> None:
    """All checks on tables, which are series of one number per step."""
    names = set()
    for estimator, check in estimator_checks_generator(ContinualClassifier("mamba_nano", settings=TINY)):
        names.add(check.func.__name__)
        if check.func.__name__ not in NOT_PASSED:
            check(estimator)
    assert len(names) > 45
    assert names >= {"check_estimators_pickle", "check_classifiers_train", "check_estimators_partial_fit_n_features"}


def samples(classes: range, start: int = 0, count: int = 30):
    images = np.concatenate([digits(label, start, count) for label in classes])
    return images, np.repeat(list(classes), count)


def test_classes_arrive_and_none_is_announced() -> None:
    classifier = ContinualClassifier("vim_nano", weights="omniglot").fit(*samples(range(3, 5), count=40))
    for label in (2, 0, 1):
        classifier.partial_fit(digits(label, 0, 40), np.full(40, label))
    assert classifier.classes_.tolist() == [0, 1, 2, 3, 4]
    images, labels = samples(range(5), 60)
    assert classifier.score(images, labels) > 0.9
    shares = classifier.predict_proba(images)
    assert shares.sum(1) == pytest.approx(1)
    order = [f"digit {label}" for label in range(5)]
    expected = [[p.probabilities[name] for name in order] for p in taught().predict(list(images))]
    np.testing.assert_allclose(shares, expected, atol=1e-3)  # whatever the order of lessons
    known, others = classifier.predict_known(images), classifier.predict_known(samples(range(5, 10), 60)[0])
    assert known.mean() > others.mean() + 0.2

    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(images), shares)
    again.partial_fit(digits(5, 0, 40), np.full(40, 5))  # what was unpickled learns on, the other stays
    assert (len(again.classes_), len(classifier.classes_)) == (6, 5)
    fresh = clone(classifier)
    assert fresh.get_params() == classifier.get_params()
    assert not hasattr(fresh, "classes_")
    assert fresh.set_params(unknown=0.2).unknown == 0.2


def test_pipelines_and_cross_validation() -> None:
    images, labels = samples(range(3))
    names = np.array(["zero", "one", "two"])[labels]
    inverted = FunctionTransformer(lambda x: 255 - x)
    pipeline = make_pipeline(inverted, ContinualClassifier("vim_nano", weights="omniglot"))
    assert cross_val_score(pipeline, images, names, cv=3).mean() > 0.8
    table = images.reshape(len(images), -1).astype(float)
    pipeline = make_pipeline(StandardScaler(), ContinualClassifier("mamba_nano", settings=TINY))
    assert set(pipeline.fit(table, names).predict(table)) <= set(names)


def test_samples_that_are_refused() -> None:
    classifier = ContinualClassifier("vim_nano", weights="omniglot")
    with pytest.raises(ValueError, match="images must be uint8"):
        classifier.fit(np.zeros((4, 8, 8, 3)), [0, 0, 1, 1])
    with pytest.raises(ValueError, match="needs at least two"):
        classifier.fit(digits(0, 0, 3), [0, 0, 1])
    assert not hasattr(classifier, "classes_")
    classifier.fit(digits(0, 0, 4), [0, 0, 1, 1])
    with pytest.raises(ValueError, match="needs at least two"):
        classifier.partial_fit(digits(0, 0, 3), [0, 0, 2])
    assert classifier.classes_.tolist() == [0, 1]
