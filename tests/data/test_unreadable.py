"""Files that cannot be read are found before training, once per file; 16-bit images keep their grey levels."""

import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from infssm.data import FileImages, check, find_unreadable, load_dataset, require_readable
from infssm.data.files import cache_root
from infssm.errors import DataError
from infssm.learner.config.load import load_config
from infssm.learner.setup import load_stream


def make_folder(root, *, per_class=4, bad=()):
    """Two classes of small images; those named in ``bad`` are cut short."""
    for label, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            path = root / name / f"{number}.png"
            Image.effect_noise((9, 7), 30 + label).convert("RGB").save(path)
            if f"{name}/{number}.png" in bad:
                path.write_bytes(path.read_bytes()[:60])
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFSSM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled(tmp_path, suffix):
    levels = np.array([[0, 128, 257], [32896, 65407, 65535]], dtype=np.uint16)
    path = tmp_path / f"deep.{suffix}"
    if suffix == "pgm":
        path.write_bytes(b"P5 3 2 65535\n" + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(path)
    images = FileImages(tmp_path, (path.name,))
    pixels = np.asarray(images.pil(0))
    expected = np.rint(levels / 65535 * 255).astype(np.uint8)
    assert np.array_equal(pixels, np.stack([expected] * 3, axis=-1))
    assert images.why_unreadable(0) is None


def test_big_endian_sixteen_bits(tmp_path):
    levels = np.array([[0, 256, 65535]], dtype=np.uint16)
    image = Image.frombytes("I;16B", (3, 1), levels.astype(">u2").tobytes())
    image.save(tmp_path / "big.tif")
    pixels = np.asarray(FileImages(tmp_path, ("big.tif",)).pil(0))
    assert pixels[0, :, 0].tolist() == [0, 1, 255]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_known_white_are_refused(tmp_path, dtype):
    Image.fromarray(np.array([[0, 70000]], dtype=dtype)).save(tmp_path / "wide.tif")
    images = FileImages(tmp_path, ("wide.tif",))
    with pytest.raises(DataError, match="save 8 or 16 bits"):
        images.pil(0)
    assert "which value is white" in images.why_unreadable(0)


def test_a_run_lists_unreadable_files_before_it_starts_and_can_go_on_without(tmp_path, cache):
    folder = make_folder(tmp_path / "mine", per_class=15, bad=("a/1.png", "b/0.png"))
    settings = {"data": {"name": str(folder), "num_tasks": 1}}
    with pytest.raises(DataError, match=r"2 of 30 files cannot be read") as caught:
        load_stream(load_config(settings))
    for part in (str(folder / "a" / "1.png"), str(folder / "b" / "0.png"), "data.skip_unreadable=true"):
        assert part in str(caught.value)
    with pytest.warns(UserWarning, match="2 files cannot be read and are left out"):
        stream = load_stream(load_config(settings, ["data.skip_unreadable=true"]))
    assert len(stream.dataset) == 28
    assert {"a/1.png", "b/0.png"}.isdisjoint(stream.dataset.images.paths)
    assert sorted(os.listdir(folder)) == ["a", "b"], "nothing is written into the user's folder"


def test_test_images_stay_the_last_when_some_are_left_out(tmp_path, cache):
    make_folder(tmp_path / "mine" / "train", bad=("a/0.png",))
    make_folder(tmp_path / "mine" / "test", bad=("b/3.png",))
    dataset = load_dataset(str(tmp_path / "mine"))
    with pytest.warns(UserWarning, match="2 files"):
        kept = require_readable(dataset, skip_unreadable=True)
    assert (len(kept), kept.num_test) == (14, 7)
    assert all(path.startswith("test/") for path in kept.images.paths[7:])
    assert [path.split("/")[1] for path in kept.images.paths] == [kept.classes[label] for label in kept.labels]


def test_files_are_read_once(tmp_path, cache, monkeypatch):
    folder = make_folder(tmp_path / "mine", bad=("a/1.png",))
    dataset = load_dataset(str(folder))
    read = []
    original = FileImages.why_unreadable
    monkeypatch.setattr(FileImages, "why_unreadable", lambda self, n: read.append(n) or original(self, n))

    def look():
        read.clear()
        steps = []
        bad = find_unreadable(dataset, lambda *step: steps.append(step))
        assert len(steps) == len(read)
        return bad, sorted(read)

    bad, first = look()
    assert (list(bad), first) == ([1], list(range(8)))
    assert look() == (bad, [1]), "a bad file may have been mended without a trace: it is always tried again"
    Image.new("RGB", (3, 3)).save(folder / "a" / "1.png")
    assert look() == ({}, [1])
    assert look() == ({}, [])
    (folder / "b" / "2.png").write_bytes(b"no image")
    bad, again = look()
    assert (list(bad), again) == ([6], [6])
    [store] = (cache / "files").iterdir()
    for damage in ("", "[]", '{"version": 2, "files": {"a/0.png": 3}}', json.dumps({"version": 0, "files": {}})):
        store.write_text(damage)
        assert look()[1] == list(range(8))


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFSSM_CACHE", str(tmp_path / "file" / "below"))
    dataset = load_dataset(str(make_folder(tmp_path / "mine", bad=("b/0.png",))))
    assert list(find_unreadable(dataset)) == [4]


def test_cache_root(monkeypatch):
    monkeypatch.delenv("INFSSM_CACHE")
    assert cache_root().parts[-2:] == (".cache", "infssm")


def test_check_lists_all_unreadable_files(tmp_path, cache):
    report = check(str(make_folder(tmp_path / "mine", bad=("a/1.png", "b/0.png"))))
    assert [path for path, _ in report.unreadable] == ["a/1.png", "b/0.png"]
    assert not report.ok


def test_an_empty_class_folder_is_left_out_with_a_warning(tmp_path):
    folder = make_folder(tmp_path / "mine")
    (folder / "aa").mkdir()
    with pytest.warns(UserWarning, match=re.escape("1 class folders hold no images or sounds and are left out: aa")):
        dataset = load_dataset(str(folder))
    assert dataset.classes == ("a", "b")
    assert dataset.labels.tolist() == [0] * 4 + [1] * 4
