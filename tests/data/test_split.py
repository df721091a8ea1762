"""Splits: sizes, disjointness, equality with torch's random_split, storage."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import random_split

from infssm.data import Split, TaskStream, few_shots, load_dataset, make_split, write_synthetic
from infssm.data.sets.text import Text, text_dataset
from infssm.errors import ConfigError, DataError

from .helpers import fake

PROTOCOL = [  # images, classes, official test images, sizes
    (30_000, 200, 0, (21_600, 2_400, 6_000)),
    (60_000, 100, 10_000, (45_000, 5_000, 10_000)),
    (11_788, 200, 5_794, (5_394, 600, 5_794)),
]


@pytest.mark.parametrize(("count", "classes", "num_test", "sizes"), PROTOCOL)
def test_protocol_sizes_and_disjointness(count, classes, num_test, sizes):
    split = make_split(fake(count, classes, num_test))
    assert tuple(split.sizes.values()) == sizes
    everything = np.concatenate([split.train, split.val, split.test])
    assert np.array_equal(np.sort(everything), np.arange(count))
    if num_test:
        assert np.array_equal(split.test, np.arange(count - num_test, count))


def test_equals_two_random_splits_of_one_generator():
    """The released code calls random_split twice with one generator; the second splits the first's part."""
    count = 1003
    generator = torch.Generator().manual_seed(0)
    base, test = random_split(range(count), [802, 201], generator=generator)
    train, val = random_split(base, [721, 81], generator=generator)
    split = make_split(fake(count, 7))
    assert split.train.tolist() == list(train)
    assert split.val.tolist() == list(val)
    assert split.test.tolist() == list(test)


def test_equals_one_random_split_of_the_training_set():
    generator = torch.Generator().manual_seed(0)
    train, val = random_split(range(505), [454, 51], generator=generator)
    split = make_split(fake(605, 5, 100))
    assert split.train.tolist() == list(train)
    assert split.val.tolist() == list(val)


def test_same_for_every_run_and_untouched_by_global_seeds():
    torch.manual_seed(1)
    first = make_split(fake(100, 5))
    torch.manual_seed(2)
    assert make_split(fake(100, 5)).hash == first.hash
    assert make_split(fake(100, 5), seed=1).hash != first.hash


def test_subsets_take_the_first_of_each_class():
    dataset = fake(400, 4, 80)
    whole, small = make_split(dataset), make_split(dataset, train_per_class=5, test_per_class=3)
    assert small.sizes == {"train": 20, "val": 12, "test": 12}
    for label in range(4):
        of_class = whole.train[dataset.labels[whole.train] == label]
        kept = small.train[dataset.labels[small.train] == label]
        assert kept.tolist() == of_class[:5].tolist()
    assert make_split(dataset, train_per_class=5, test_per_class=3).hash == small.hash
    with pytest.raises(ConfigError, match="train_per_class must be at least 1"):
        make_split(dataset, train_per_class=0)


@pytest.mark.parametrize(("train", "val"), [(18, 2), (1, 1)])
def test_validation_keeps_its_proportion_to_fewer_training_samples(train, val):
    assert make_split(fake(400, 4, 80), train_per_class=train).sizes == {"train": 4 * train, "val": 4 * val, "test": 80}


def test_stored_split_reloads_exactly_and_without_leakage(tmp_path):
    dataset = fake(300, 3)
    split = make_split(dataset)
    split.save(tmp_path / "split.json")
    back = Split.load(tmp_path / "split.json")
    back.verify(dataset, expected_hash=split.hash)
    assert back.hash == split.hash
    for name in ("train", "val", "test"):
        assert np.array_equal(getattr(back, name), getattr(split, name))
    assert not set(back.train) & set(back.test)
    assert [p.name for p in tmp_path.iterdir()] == ["split.json"]


def test_changed_or_foreign_files_are_refused(tmp_path):
    path = tmp_path / "split.json"
    data = make_split(fake(300, 3)).to_json()
    data["train"][0], data["test"][0] = data["test"][0], data["train"][0]
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match="do not match its hash"):
        Split.load(path)
    path.write_text('{"train": [1')
    with pytest.raises(DataError, match=r"split\.json"):
        Split.load(path)
    path.write_text('{"train": [1]}')
    with pytest.raises(DataError, match="not a stored split"):
        Split.load(path)
    with pytest.raises(DataError, match="No such file"):
        Split.load(tmp_path / "absent.json")


def test_verify_notices_other_data():
    split = make_split(fake(300, 3))
    with pytest.raises(DataError, match="its classes are different"):
        split.verify(fake(300, 4))
    with pytest.raises(
        DataError, match=r"changed since .* its samples, labels or their order are different; .*--overwrite"
    ):
        split.verify(fake(301, 3))
    with pytest.raises(DataError, match="the run was started with"):
        split.verify(fake(300, 3), expected_hash="0" * 64)


@pytest.mark.parametrize(("train", "message"), [([0, 1, 5], "twice"), ([0, 99], "outside 0..9")])
def test_verify_notices_overlap_and_range(train, message):
    dataset = fake(10, 2)
    parts = [np.array(part) for part in (train, [2], [5])]
    with pytest.raises(DataError, match=message):
        Split("fake", dataset.classes, dataset.fingerprint, *parts).verify(dataset)


@pytest.mark.parametrize("num_test", [0, 60])
def test_own_data_are_divided_class_by_class(num_test):
    """Sizes of classes from 1 to 40: every class of at least 3 images is in every part, in the same shares."""
    counts = [40, 30, 20, 10, 5, 3, 2, 1]
    labels = np.repeat(np.arange(8), counts)
    if num_test:
        labels = np.concatenate([labels, np.arange(num_test) % 8])
    dataset = replace(fake(len(labels), 8, num_test), labels=labels, stratified=True)
    split = make_split(dataset, seed=3)
    assert np.array_equal(np.sort(np.concatenate([split.train, split.val, split.test])), np.arange(len(labels)))
    sizes = {part: np.bincount(labels[getattr(split, part)], minlength=8).tolist() for part in split.sizes}
    if num_test:
        assert sizes["val"] == [4, 3, 2, 1, 1, 1, 1, 0]
        assert split.test.tolist() == list(range(len(labels) - num_test, len(labels)))
    else:
        assert sizes["test"] == [8, 6, 4, 2, 1, 1, 1, 0]
        assert sizes["val"] == [3, 2, 2, 1, 1, 1, 0, 0]
    assert make_split(dataset, seed=3).hash == split.hash
    assert make_split(dataset, seed=4).hash != split.hash


def test_the_end_of_every_domain_of_a_text_validates():
    """A stretch between two that are trained on is too easy: training, validation and test follow one another."""
    texts = [Text("a", bytes(range(200)) * 4, "a"), Text("b", b"other words " * 50, "b")]
    text = text_dataset("text", texts, length=10)
    split = make_split(text, seed=3)
    for domain in (0, 1):
        parts = [getattr(split, part) for part in ("train", "val", "test")]
        train, val, test = (np.sort(part[text.domain_of[part] == domain]) for part in parts)
        assert train[-1] < val[0] <= val[-1] < test[0]
        assert len(val) == pytest.approx(len(train) / 9, abs=1)
    assert make_split(text, seed=4).hash == split.hash


def test_benchmarks_keep_the_protocol_and_stored_splits_keep_their_indices(tmp_path):
    """A split stored before own data were divided by class is used as it is."""
    write_synthetic("cub200", tmp_path, per_class=2, size=8)
    assert not load_dataset("cub200", tmp_path).stratified
    assert not load_dataset("digits").stratified
    own = load_dataset(str(tmp_path / "cub200"))
    assert own.stratified
    old = make_split(replace(own, stratified=False))
    assert old.hash != make_split(own).hash
    old.save(tmp_path / "split.json")
    stream = TaskStream(own, Split.load(tmp_path / "split.json"), 5)
    assert stream.split.hash == old.hash


def test_few_shots_of_later_classes_by_number_and_by_list():
    dataset = fake(200, 5, 50)
    split, later = make_split(dataset), np.array([3, 4])
    few = few_shots(split, dataset, later, 2)
    counts = np.bincount(dataset.labels[few.train], minlength=5)
    assert counts[3:].tolist() == [2, 2]
    assert counts[:3].tolist() == np.bincount(dataset.labels[split.train], minlength=5)[:3].tolist()
    assert np.isin(few.train, split.train).all()
    assert few.hash != split.hash
    of_class = np.flatnonzero(dataset.labels[:150] == 3)
    listed = [int(i) for i in (*np.intersect1d(of_class, split.val)[:1], *np.intersect1d(of_class, split.train)[:1])]
    chosen = few_shots(split, dataset, later, listed)
    assert sorted(i for i in chosen.train if dataset.labels[i] in later) == sorted(listed)
    assert not np.isin(listed, chosen.val).any(), "what trains does not validate"
    chosen.verify(dataset)
    base = int(np.flatnonzero(dataset.labels == 0)[0])
    for wrong in ([base], [199], [-1], [10**6]):
        with pytest.raises(ConfigError, match=f"data.shots: {wrong[0]} is not the index"):
            few_shots(split, dataset, later, wrong)
    with pytest.raises(ConfigError, match="names a sample twice"):
        few_shots(split, dataset, later, [*listed, listed[0]])
