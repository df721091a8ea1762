"""`Learner`: growth, exactness of frozen backbones, forgetting, unknowns, shift, versions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import infssm
from infssm.errors import ConfigError
from infssm.learner.learner import Learner
from infssm.learner.store.layout import InUseError, locked
from infssm.learner.store.versions import Versions
from tests.learner.frozen import digits, frozen
from tests.learner.test_lock import hold

HEADS = ["ncm", "lda", "gda", "ranpac"]
SMALL = {"ranpac": {"method": {"width": 64}}}


def images(*classes: int) -> list[np.ndarray]:
    """Images that were never taught."""
    return list(digits(*classes, count=5, skip=100)[0])


def logits_by_class(learner: Learner, samples: list[np.ndarray]) -> torch.Tensor:
    """Logits ``[n, K]``, the classes in the order of their names."""
    logits = learner.classifier.logits(learner.classifier.transform(samples))
    return logits[:, sorted(range(logits.shape[1]), key=lambda k: learner.classes[k])]


def contents(folder: Path) -> dict[str, Any]:
    """What is stored but numbers of versions and the times of lessons. There is one version."""
    versions = Versions(folder)
    (number,) = versions.numbers
    stored = versions.content(number)
    for key in ("version", "parent", "files"):
        del stored[key]
    for lesson in stored["history"]:
        del lesson["time"], lesson["seconds"]
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    tensors = f"tensors/{number:06}.safetensors"
    assert names - {"lock"} == {"learner.json", f"versions/{number:06}.json", tensors}
    return {"content": stored, "tensors": (folder / tensors).read_bytes()}


# 1. Nobody announces anything.


def test_classes_and_samples_of_any_number_are_added_at_any_time(tmp_path: Path) -> None:
    learner = frozen(folder=tmp_path / "learner")
    assert (learner.classes, learner.version, learner.modality) == ((), 0, None)
    with pytest.raises(ConfigError, match="knows nothing yet"):
        learner.predict(images(0))
    first = learner.learn(*digits(3, 1, count=20), name="monday")
    assert first.samples == {"digit 1": 20, "digit 3": 20}
    assert learner.config.model.options["embed_dim"] == 16  # as given, beside the model's name
    assert 0.5 < first.score <= 1
    learner.learn(*digits(1, 7, skip=20), name="tuesday")  # more of a known class, and a new one
    learner.learn(*digits(8))
    assert learner.classes == ("digit 1", "digit 3", "digit 7", "digit 8")
    assert [lesson.name for lesson in learner.history] == ["monday", "tuesday", "lesson 3"]
    assert learner.history[1].samples == {"digit 1": 10, "digit 7": 10}
    found = learner.evaluate(*digits(1, 3, 7, 8, skip=100))
    assert found.accuracy > 0.6
    assert found.accuracy == pytest.approx(np.mean(list(found.per_class.values())))
    opened = infssm.load(tmp_path / "learner")
    assert isinstance(opened, Learner)
    assert opened.history == learner.history
    assert opened.predict(images(1, 3, 7, 8)) == learner.predict(images(1, 3, 7, 8))


@pytest.mark.parametrize("method", ["seq", "er", "lwf-f+gda", "ewc", "inf-ssm-exact+lda", "l2p-r", "frozen"])
def test_methods_that_train_learn_new_and_known_classes(method: str) -> None:
    options = {"inf-ssm-exact": {"measure_at": 1}} if "inf-ssm" in method else {}
    learner = frozen(method, train={"task0": "train"}, method=options)
    learner.learn(*digits(0, 1, count=20))
    learner.learn(*digits(2))
    learner.learn(*digits(1, 3, skip=20))
    assert learner.classes == ("digit 0", "digit 1", "digit 2", "digit 3")
    assert logits_by_class(learner, images(0, 3)).isfinite().all()


@pytest.mark.parametrize("method", ["x-der", "der", "lucir", "clfd", "joint"])
def test_methods_that_cannot_grow_are_refused_with_the_reason(method: str) -> None:
    learner = frozen(method, train={"task0": "train"})
    with pytest.raises(ConfigError, match=rf"{method}.*since"):
        learner.learn(*digits(0, 1))
    assert learner.version == 0


# 3. Exact for a frozen backbone.


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To 1e-5 of their range: the last digits of features depend on the other images of a batch."""
    assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.max() - expected.min()))


@pytest.mark.parametrize("head", HEADS)
def test_the_order_of_lessons_makes_no_difference(head: str) -> None:
    orders = [[(0, 1), (2, 3)], [(2, 3), (0, 1)], [(3, 0, 2, 1)], [(2,), (0, 3), (1,)]]
    found = []
    for order in orders:
        learner = frozen(f"frozen+{head}", **SMALL.get(head, {}))
        for classes in order:
            learner.learn(*digits(*classes))
        found.append(logits_by_class(learner, images(0, 1, 2, 3)))
    for logits in found[1:]:
        assert_same_logits(logits, found[0])


@pytest.mark.parametrize("head", HEADS)
def test_more_samples_of_a_class_are_merged_exactly(head: str) -> None:
    parts, whole = frozen(f"frozen+{head}", **SMALL.get(head, {})), frozen(f"frozen+{head}", **SMALL.get(head, {}))
    parts.learn(*digits(0, 1, count=6))
    parts.learn(*digits(2, 0, count=9, skip=6))
    parts.learn(*digits(1, count=9, skip=6))
    (two, two_names), (one, one_name) = digits(0, 1, count=15), digits(2, count=9, skip=6)
    whole.learn(np.concatenate([two, one]), two_names + one_name)
    assert_same_logits(logits_by_class(parts, images(0, 1, 2)), logits_by_class(whole, images(0, 1, 2)))


# 4. Exact forgetting.


@pytest.mark.parametrize("head", ["ncm", "lda", "gda"])
def test_what_is_stored_after_forgetting_is_that_of_a_learner_that_never_saw_the_class(
    tmp_path: Path, head: str
) -> None:
    # The forgotten classes have lessons of their own: features depend on the other images of a batch in last digits.
    for name, lessons in (("saw", [(0, 1), (2,), (4,), (3,)]), ("never", [(0, 1), (3,)])):
        learner = frozen(f"frozen+{head}", folder=tmp_path / name)
        for number, classes in enumerate(lessons):
            learner.learn(*digits(*classes), name="last" if number == len(lessons) - 1 else f"lesson {number}")
    saw = Learner.load(tmp_path / "saw")
    assert saw.forget("digit 2", "digit 4") == "nothing computed from them remains"
    never = Learner.load(tmp_path / "never")
    never.publish(tmp_path / "alone", never.config)
    ours, theirs = contents(tmp_path / "saw"), contents(tmp_path / "alone")
    theirs["content"]["history"][1]["score"] = None  # what the accuracy would have been nobody knows any more
    assert ours == theirs
    text = b"".join(path.read_bytes() for path in (tmp_path / "saw").rglob("*") if path.is_file())
    assert b"digit 2" not in text
    assert Learner.load(tmp_path / "saw").predict(images(0, 2)) == never.predict(images(0, 2))
    for learner in (saw, never):  # and it goes on in the same way
        learner.learn(*digits(7), name="after")
    assert saw.predict(images(0, 7)) == never.predict(images(0, 7))


def test_a_removal_that_was_interrupted_is_finished_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "learner"
    learner = frozen(folder=folder)
    learner.learn(*digits(0, 1, 2))
    (folder / "versions" / ".000009.json.7.writing").write_text("digit 2")  # of a process that was killed earlier

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Versions, "_remove_others", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.forget("digit 2")
    assert Versions(folder).numbers == [1, 2]
    with locked(folder):  # who cannot change the folder can read it
        assert Learner.load(folder).classes == ("digit 0", "digit 1")
    assert Versions(folder).numbers == [1, 2]
    opened = Learner.load(folder)
    opened.publish(tmp_path / "alone", opened.config)
    assert contents(folder) == contents(tmp_path / "alone")
    assert json.loads((folder / "learner.json").read_text()) == {"format": 1, "version": 2}
    learner.learn(*digits(3))  # the one that was interrupted goes on from what is stored
    assert learner.classes == ("digit 0", "digit 1", "digit 3")


def test_ranpac_says_why_it_cannot_forget() -> None:
    learner = frozen("frozen+ranpac", **SMALL["ranpac"])
    learner.learn(*digits(0, 1, 2))
    with pytest.raises(ConfigError, match="Gram matrix of the images of all classes"):
        learner.forget("digit 0")
    assert learner.classes == ("digit 0", "digit 1", "digit 2")


def test_forgetting_says_what_remains_and_keeps_versions_if_asked(tmp_path: Path) -> None:
    learner = frozen("er", folder=tmp_path / "trained", train={"task0": "train"})
    learner.learn(*digits(0, 1, 2))
    assert "weights of the model were trained" in learner.forget("digit 1", keep_versions=True)
    assert learner.classes == ("digit 0", "digit 2")
    assert {p.label for p in learner.predict(images(1))} <= {"digit 0", "digit 2"}
    assert Versions(tmp_path / "trained").numbers == [1, 2]
    learner.undo()
    assert learner.classes == ("digit 0", "digit 1", "digit 2")
    for names, words in ((("cat",), "does not know"), (learner.classes, "all classes of the learner")):
        with pytest.raises(ConfigError, match=words):
            learner.forget(*names)
    assert Learner.load(tmp_path / "trained").version == learner.version


# 5. Known or unknown, 6. shift.


def test_unknown_samples_are_told_from_known_ones_and_data_that_drift_from_those_that_do_not() -> None:
    learner = frozen()
    learner.learn(*digits(0, 1, 4, count=100))
    own = learner.predict(list(digits(0, 1, 4, count=50, skip=100)[0]))
    noise = np.random.default_rng(0).integers(0, 256, (50, 8, 8), dtype=np.uint8)
    other = learner.predict(list(noise))
    assert np.mean([p.known for p in own]) > 0.85
    assert np.mean([p.known for p in other]) < 0.15
    for prediction in (*own, *other):
        assert sum(prediction.probabilities.values()) == pytest.approx(1)
        assert prediction.probability == max(prediction.probabilities.values())
    right = np.mean([p.label == name for p, name in zip(own, digits(0, 1, 4, count=50, skip=100)[1], strict=True)])
    assert np.mean([p.probability for p in own]) == pytest.approx(right, abs=0.1)  # calibrated
    same, drifted = learner.shift(list(digits(0, 1, 4, count=30, skip=100)[0])), learner.shift(list(noise))
    assert same.p_value > 0.05 > drifted.p_value
    assert "look like" in same.sentence
    assert "unlike" in drifted.sentence
    # The share of own samples that may be called unknown is the user's.
    strict = Learner("vim_nano", unknown=0.4, settings=frozen()._given)
    strict.learn(*digits(0, 1, 4, count=100))
    assert np.mean([p.known for p in strict.predict(list(digits(0, 1, 4, count=50, skip=100)[0]))]) < 0.8


def test_without_distances_the_probability_decides() -> None:
    learner = frozen("seq", train={"task0": "train", "epochs": 8})
    learner.learn(*digits(0, 1, count=60))
    known = [p.known for p in learner.predict(list(digits(0, 1, count=50, skip=100)[0]))]
    assert np.mean(known) > 0.8
    with pytest.raises(ConfigError, match="fitted head"):
        learner.shift(images(0))


# 7. Nothing is lost.


def test_every_change_is_a_version_and_unchanged_tensors_are_stored_once(tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    learner = frozen(folder=folder, model={"options": {"embed_dim": 64, "depth": 8}})

    def size() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    learner.learn(*digits(0, 1))
    before, said = size(), learner.predict(images(0, 2))
    learner.learn(*digits(2), name="two")
    later = learner.predict(images(0, 2))
    statistics, held_out = 8 * (64 + 64 * 65 // 2), 4 * 64 * 2  # of the new class: float64 and float32
    assert size() - before < statistics + held_out + 0.01 * before
    learner.learn(*digits(2, skip=10))
    learner.undo()
    assert [lesson.name for lesson in learner.history] == ["lesson 1", "two"]
    assert learner.predict(images(0, 2)) == later
    learner.undo()
    assert Learner.load(folder).predict(images(0, 2)) == said
    with pytest.raises(ConfigError, match="no version before"):
        learner.undo()
    learner.learn(*digits(5))
    assert learner.version == 4  # numbers are never used twice
    assert Versions(folder).numbers == [1, 4]  # what was undone is gone with the next change
    assert Learner.load(folder, version=1).classes == ("digit 0", "digit 1")
    with pytest.raises(ConfigError, match="no version 9"):
        Learner.load(folder, version=9)


def test_two_writers_are_kept_apart_and_see_each_others_changes(tmp_path: Path) -> None:
    one = frozen(folder=tmp_path / "learner")
    one.learn(*digits(0, 1))
    two = Learner.load(tmp_path / "learner")
    two.learn(*digits(2))
    one.learn(*digits(3))
    assert one.classes == ("digit 0", "digit 1", "digit 2", "digit 3")
    with hold(tmp_path / "learner") as process:
        for change in (lambda: two.learn(*digits(4)), lambda: two.forget("digit 0"), two.undo):
            with pytest.raises(InUseError, match=f"in use by process {process.pid} .*then try again"):
                change()
        assert two.predict(images(0)) == Learner.load(tmp_path / "learner", version=two.version).predict(images(0))
        process.kill()
    assert Learner.load(tmp_path / "learner").version == one.version
    two.learn(*digits(4))
    assert two.classes == (*one.classes, "digit 4")


def test_memory_and_folders(tmp_path: Path) -> None:
    learner = frozen()
    learner.learn(*digits(0, 1))
    said = learner.predict(images(0, 1))
    learner.learn(*digits(2))
    learner.undo()
    assert learner.predict(images(0, 1)) == said
    with pytest.raises(ConfigError, match="no version before"):
        learner.undo()
    learner.learn(*digits(2))
    learner.forget("digit 2")
    with pytest.raises(ConfigError, match="forget removed"):
        learner.undo()
    learner.save(tmp_path / "learner")
    learner.learn(*digits(2))
    assert Learner.load(tmp_path / "learner").classes == learner.classes
    for taken in (lambda: learner.save(tmp_path / "learner"), lambda: frozen(folder=tmp_path / "learner")):
        with pytest.raises(ConfigError, match="holds a learner"):
            taken()
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Learner(unknown=0)
    if os.name == "posix":
        (tmp_path / "learner" / "tensors").rename(tmp_path / "gone")
        with pytest.raises(infssm.DataError, match="restore it"):
            Learner.load(tmp_path / "learner")
