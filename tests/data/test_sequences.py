"""Sequences: series, tokens, spoken digits, text; streams by domain; padded batches of similar lengths."""

import tarfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from infssm._modality import pad
from infssm._processes import Share
from infssm.data import (
    ArraySequences,
    Dataset,
    ImageLoader,
    SequenceLoader,
    TaskStream,
    Tokens,
    fetch,
    load_dataset,
    make_split,
)
from infssm.data.loader import bucketed_order
from infssm.errors import ConfigError, DataError
from tests.compare import identical

from .helpers import fake_stream
from .test_audio import write_wav


def series(count=60, classes=3, domains=2, *, seed=0):
    """Series of 3 to 20 steps and 2 channels whose first value is their index."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, 20, 2))
    values[:, 0, 0] = np.arange(count)
    labels, domain_of = np.arange(count) % classes, np.arange(count) // classes % domains
    sequences = ArraySequences(values, rng.integers(3, 21, count))
    names = tuple(f"d{k}" for k in range(domains))
    return Dataset("waves", ("a", "b", "c"), sequences, labels, stratified=True, domains=names, domain_of=domain_of)


def stream_of(dataset, num_tasks=1, **options):
    return TaskStream(dataset, make_split(dataset), num_tasks, **options)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000))
def test_bucketed_order_is_a_permutation_of_like_lengths(count, batch, seed):
    lengths = np.random.default_rng(seed).integers(1, 1000, count)
    order = bucketed_order(lengths, batch, torch.Generator().manual_seed(seed))
    assert sorted(order.tolist()) == list(range(count))
    again = bucketed_order(lengths, batch, torch.Generator().manual_seed(seed))
    assert order.tolist() == again.tolist()
    if count <= 50 * batch:  # one pool: neighbours in length are neighbours in a batch
        spans = [lengths[order[i : i + batch]] for i in range(0, count, batch)]
        spans.sort(key=lambda span: (span.max(), span.min()))
        assert all(a.max() <= b.min() for a, b in pairwise(spans))


def test_padding_has_a_mask():
    x, mask = pad([torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 3)])
    assert x.shape == (3, 4, 3)
    assert mask.sum(1).tolist() == [2, 4, 1]
    assert identical(x, mask[:, :, None].expand(-1, -1, 3).float())
    tokens, _ = pad([torch.tensor([5, 6]), torch.tensor([7])])
    assert tokens.tolist() == [[5, 6], [7, 0]]


def test_an_epoch_holds_every_sample_once_with_its_label_and_length():
    dataset = series()
    task = stream_of(dataset)[0]
    seen = []
    for batch in SequenceLoader(task, batch_size=7, seed=3):
        x, y = batch
        assert x.dtype == torch.float32
        assert len(batch) == len(y) == len(x)
        for row, label, mask, index in zip(x, y, batch.mask, batch.index, strict=True):
            assert row[0, 0] == index
            assert dataset.labels[index] == label
            assert int(mask.sum()) == dataset.sequences.lengths[index]
            assert not row[~mask].any()
            seen.append(int(index))
    assert sorted(seen) == sorted(task.train.indices.tolist())


def test_order_depends_on_seed_task_and_epoch_and_skipping_goes_on():
    task = stream_of(series())[0]

    def order(**options):
        return [b.index.tolist() for b in SequenceLoader(task, batch_size=8, **options)]

    first = order(seed=1)
    assert order(seed=1) == first
    assert order(seed=2) != first
    assert order(seed=1, epoch=1) != first
    assert order(seed=1, skip_batches=2) == first[2:]
    assert len(SequenceLoader(task, batch_size=8, drop_last=True)) == len(task.train) // 8
    lengths = [b.mask.sum(1).tolist() for b in SequenceLoader(task, "test", batch_size=5)]
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat)


def test_processes_share_the_batches_of_one():
    task = stream_of(series())[0]
    one = [set(b.index.tolist()) for b in SequenceLoader(task, batch_size=8, seed=5)]
    parts = [list(SequenceLoader(task, batch_size=4, seed=5, share=Share(r, 2))) for r in (0, 1)]
    for whole, a, b in zip(one, *parts, strict=False):
        assert len(a) == len(b)
        assert set(a.index.tolist()) | set(b.index.tolist()) <= whole


def test_batches_move_with_their_mask():
    batch = next(iter(SequenceLoader(stream_of(series())[0], batch_size=4)))
    moved = batch.to("meta")
    assert {moved.x.device.type, moved.y.device.type, moved.mask.device.type} == {"meta"}


def test_tasks_by_domain_keep_labels_and_have_all_classes():
    dataset = series(domains=4, count=120)
    stream = stream_of(dataset, 2, by="domain")
    assert (stream.num_tasks, stream.num_classes, stream.class_names) == (2, 3, ("a", "b", "c"))
    for task, mine in zip(stream, ({0, 1}, {2, 3}), strict=True):
        assert task.classes == range(3)
        for part in (task.train, task.val, task.test):
            assert set(dataset.domain_of[part.indices]) == mine
            assert part.labels.tolist() == dataset.labels[part.indices].tolist()
    joint = stream.cumulative(1)
    assert len(joint.train) == len(stream[0].train) + len(stream[1].train)
    named = stream_of(dataset, tasks=[["d3"], ["d0", 1]], by="domain")
    assert set(dataset.domain_of[named[0].train.indices]) == {3}
    assert set(dataset.domain_of[named[1].test.indices]) == {0, 1}
    with pytest.raises(ConfigError, match="no domains"):
        TaskStream(fake_stream().dataset, fake_stream().split, 2, by="domain")


def test_every_class_of_every_domain_is_in_every_part():
    dataset = series(domains=4, count=120)
    split = make_split(dataset)
    for part in (split.train, split.val, split.test):
        assert len(set(dataset.strata[part].tolist())) == 12
    other = Dataset("x", dataset.classes, dataset.samples, dataset.labels, domains=("d",), domain_of=0 * dataset.labels)
    assert other.fingerprint != dataset.fingerprint


def test_images_and_sequences_are_not_mistaken_for_each_other():
    with pytest.raises(ConfigError, match="waves holds series, not images"):
        ImageLoader(stream_of(series())[0], recipe="light", batch_size=4)
    with pytest.raises(ConfigError, match="fake holds images, not sequences"):
        SequenceLoader(fake_stream()[0], batch_size=4)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (np.zeros((3, 4)), None, r"\[n, time, channels\]"),
        (np.zeros((3, 4, 2), complex), None, "numbers"),
        (np.array([[["a"]]]), None, "numbers"),
        (np.zeros((3, 4, 2)), np.array([1, 2]), r"integers \[3\]"),
        (np.zeros((3, 4, 2)), np.array([1.0, 2, 3]), "integers"),
        (np.zeros((3, 4, 2)), np.array([0, 2, 3]), "from 0 to 3; series of 4 steps need 1 to 4"),
        (np.zeros((3, 4, 2)), np.array([1, 2, 5]), "from 1 to 5"),
        (np.array([[[1.0], [np.nan]]]), None, "not finite, first number 0"),
    ],
)
def test_bad_series(values, lengths, message):
    with pytest.raises(DataError, match=message):
        ArraySequences(values, lengths)


def test_padding_may_hold_anything():
    values = np.array([[[1.0], [np.nan]]])
    assert ArraySequences(values, np.array([1])).sequence(0).tolist() == [[1.0]]


def test_own_series(tmp_path):
    columns = {
        "x": np.arange(48.0).reshape(6, 4, 2),
        "y": np.array([0, 1, 0, 1, 0, 1]),
        "lengths": np.array([4, 3, 2, 1, 4, 4]),
        "classes": np.array(["walk", "run"]),
        "domain": np.array([2021, 2020, 2021, 2020, 2021, 2020]),
        "test": np.array([1, 1, 0, 0, 0, 0], bool),
    }
    np.savez(tmp_path / "steps.npz", **columns)
    dataset = load_dataset("steps", tmp_path)
    assert (dataset.classes, dataset.domains, dataset.num_test) == (("walk", "run"), ("2020", "2021"), 2)
    assert dataset.sequences.lengths.tolist() == [2, 1, 4, 4, 4, 3]
    assert dataset.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert dataset.domain_of.tolist() == [1, 0, 1, 0, 1, 0]
    assert dataset.sequences.sequence(4)[0].tolist() == [0.0, 1.0]
    np.savez(tmp_path / "plain.npz", x=columns["x"], y=columns["y"])
    plain = load_dataset(str(tmp_path / "plain.npz"))
    assert (plain.classes, plain.domain_of, plain.num_test) == (("0", "1"), None, 0)
    for change, message in (({"y": np.arange(5)}, "do not belong together"), ({"y": np.ones(6)}, "must be integers")):
        np.savez(tmp_path / "bad.npz", **columns | change)
        with pytest.raises(DataError, match=message):
            load_dataset(str(tmp_path / "bad.npz"))


def test_bad_tokens():
    with pytest.raises(DataError, match="do not make"):
        Tokens(np.arange(4), [2, 1], 10)
    with pytest.raises(DataError, match="vocabulary has 3"):
        Tokens(np.arange(4), [2, 2], 3)


def make_recordings(folder):
    for digit in range(10):
        for speaker in ("ann", "bob"):
            for number in (0, 4, 5, 6, 17):
                write_wav(folder / f"{digit}_{speaker}_{number}.wav", range(20 + digit))
    (folder / "notes.wav").write_text("not a recording")
    return folder


@pytest.mark.parametrize("inside", ["recordings", "free-spoken-digit-dataset-1.0.10/recordings"])
def test_spoken_digits_from_the_archive(tmp_path, inside):
    make_recordings(tmp_path / "made" / inside)
    (tmp_path / "root").mkdir()
    with tarfile.open(tmp_path / "root" / "fsdd.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "made", arcname=".")
    assert fetch("speech-digits", tmp_path / "root") == [tmp_path / "root" / "fsdd"]
    dataset = load_dataset("speech-digits", tmp_path / "root")
    assert (len(dataset), dataset.num_test, dataset.domains) == (100, 40, ("ann", "bob"))
    for index, path in enumerate(dataset.sequences.paths):
        digit, speaker, number = path.removesuffix(".wav").split("_")
        assert dataset.labels[index] == int(digit)
        assert dataset.domains[dataset.domain_of[index]] == speaker
        assert (index >= 60) == (int(number) < 5)
    speakers = stream_of(dataset, 2, by="domain")
    assert [len(task.test) for task in speakers] == [20, 20]
    digits = stream_of(dataset, 5)
    assert [len(task.classes) for task in digits] == [2] * 5
    batch = next(iter(SequenceLoader(digits[0], batch_size=4)))
    assert batch.x.shape[2] == 1


def test_missing_spoken_digits_say_how_to_get_them(tmp_path):
    with pytest.raises(DataError, match="infssm data fetch speech-digits"):
        load_dataset("speech-digits", tmp_path)


@pytest.mark.parametrize("kind", ["png", "wav"])
def test_a_folder_per_domain(tmp_path, kind):
    for domain in ("day", "night"):
        for name in ("cat", "dog"):
            for number in range(4):
                path = tmp_path / "own" / domain / name / f"{number}.{kind}"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_wav(path, range(30)) if kind == "wav" else Image.new("RGB", (4, 4)).save(path)
    dataset = load_dataset(f"domains:{tmp_path / 'own'}")
    assert (dataset.classes, dataset.domains) == (("cat", "dog"), ("day", "night"))
    stream = stream_of(dataset, 2, by="domain")
    assert all(task.classes == range(2) for task in stream)
    assert {dataset.samples.paths[i].split("/")[0] for i in stream[1].train.indices} == {"night"}
    (tmp_path / "own" / "day" / "cat" / f"x.{'png' if kind == 'wav' else 'wav'}").write_bytes(b"")
    with pytest.raises(DataError, match="keep one kind"):
        load_dataset(f"domains:{tmp_path / 'own'}")
