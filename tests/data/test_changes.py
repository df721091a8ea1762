"""Data that changed since a run began are noticed, and what changed is named."""

import os
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from infssm.bench.executors import LocalProcesses, gather, make_plan
from infssm.bench.running import resume, run
from infssm.data import ArrayImages, ArraySequences, FileImages, SoundFiles, load_dataset, make_split
from infssm.data.files import Files
from infssm.errors import DataError
from infssm.learner.config.load import load_config, merge
from infssm.learner.events import Interrupted, Note
from tests.data.test_unreadable import make_folder
from tests.learner.tiny import TINY


def test_every_value_in_memory_counts():
    series, pixels = np.zeros((3, 40, 2)), torch.zeros(3, 1, 20, 20, dtype=torch.uint8)
    one, other = ArraySequences(series).fingerprint(), ArrayImages(pixels).fingerprint()
    series[1, 7, 1], pixels[1, 0, 7, 3] = 1, 1
    assert ArraySequences(series).fingerprint() != one
    assert ArrayImages(pixels).fingerprint() != other


def write(path, value):
    """A sound or an image whose size does not depend on the value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".bmp":
        Image.new("RGB", (4, 4), (value, 0, 0)).save(path)
    else:
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes([value, 0]) * 9)


@pytest.mark.parametrize("suffix", ["bmp", "wav"])
def test_contents_of_files_count(tmp_path, suffix, monkeypatch):
    for label in "ab":
        for number in range(4):
            write(tmp_path / label / f"{number}.{suffix}", number)
    dataset = load_dataset(str(tmp_path))
    split = make_split(dataset)
    split.verify(load_dataset(str(tmp_path)))
    write(tmp_path / "a" / f"1.{suffix}", 77)
    (tmp_path / "b" / f"0.{suffix}").unlink()
    write(tmp_path / "b" / f"9.{suffix}", 5)
    os.utime(tmp_path / "a" / f"2.{suffix}", (5, 5))  # a new time alone is no change
    expected = (
        rf"data of {tmp_path.name} changed since this run began: 1 files added \(b/9\.{suffix}\); "
        rf"1 files removed \(b/0\.{suffix}\); 1 files changed \(a/1\.{suffix}\); .*--overwrite, or choose another --out"
    )
    read = []
    digest = Files._digest
    monkeypatch.setattr(Files, "_digest", lambda self, path: read.append(path) or digest(self, path))
    changed = load_dataset(str(tmp_path))
    with pytest.raises(DataError, match=expected):
        split.verify(changed)
    assert sorted(read) == [f"a/1.{suffix}", f"a/2.{suffix}", f"b/9.{suffix}"], "other digests are in the cache"
    assert isinstance(changed.samples, FileImages | SoundFiles)


def photos(tmp_path, **changes):
    """A run on photos of two classes."""
    data = {"name": str(tmp_path / "photos"), "num_tasks": 1, "image_size": 8}
    values = {**TINY, "data": data, "method": {"name": "seq"}, "out": str(tmp_path / "runs")}
    return load_config(merge(merge(values, {"train": {"epochs": 1, "select_best": False}}), changes))


def test_a_complete_run_on_other_data_is_not_complete(tmp_path):
    folder = make_folder(tmp_path / "photos", per_class=12)
    config = photos(tmp_path)
    first = run(config, quiet=True)
    assert run(config, quiet=True).path == first.path
    folder.rename(tmp_path / "elsewhere")
    assert run(config, quiet=True).path == first.path, "a complete run is shown where its data are no longer"
    (tmp_path / "elsewhere").rename(folder)
    Image.new("RGB", (9, 7)).save(folder / "a" / "new.png")
    with pytest.raises(DataError, match=r"1 files added \(a/new\.png\)"):
        run(config, quiet=True)
    [end] = gather(LocalProcesses(2), make_plan([config]), quiet=True)
    assert "1 files added" in str(end.error)
    assert run(config, overwrite=True, quiet=True).path == first.path
    assert run(config, quiet=True).path == first.path


def test_an_unfinished_run_does_not_go_on_with_other_data(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "photos", per_class=12)
    config = photos(tmp_path, train={"epochs": 3, "limit_batches": None})

    def stop(*_):
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("infssm.learner.store.directory.RunDirectory.seal_metrics", stop)
        with pytest.raises(Interrupted):
            run(config, quiet=True)
    [path] = (tmp_path / "runs").rglob("last.ckpt")
    Image.new("RGB", (9, 7)).save(folder / "b" / "3.png")
    with pytest.raises(DataError, match=r"1 files changed \(b/3\.png\)"):
        resume(path.parent.parent, quiet=True)


def test_one_class_per_task_warns(tmp_path):
    make_folder(tmp_path / "photos", per_class=12)
    events = []
    run(photos(tmp_path, data={"num_tasks": 2}), listen=events.append)
    note = next(event.text for event in events if isinstance(event, Note))
    assert note.startswith("warning: 2 of 2 tasks have a single class")
    assert note.endswith("lower data.num_tasks")
