"""Folders of your own data: what is left out is named, and every file is read the right way up."""

import os
import sys
import wave
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from infssm.data import FileImages, find_unreadable, load_dataset
from infssm.data.images import to_rgb
from infssm.data.npz import read_npz
from infssm.data.stream import divide_classes
from infssm.errors import ConfigError, DataError
from tests.data.test_unreadable import make_folder


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_read_upright(tmp_path, orientation):
    """The corner that is red in the scene is red in what is read, however the camera was held."""
    scene = Image.new("RGB", (32, 16))
    scene.paste((255, 0, 0), (0, 0, 8, 8))
    turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # the inverse of what is needed to read it
    stored = scene if turn is None else scene.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    images = FileImages(tmp_path, ("a.jpg",))
    assert images.size_of(0) == (32, 16)
    for read in (images.pil(0), images.pil(0, 16)):
        assert read.size == (32, 16)
        pixels = np.asarray(read).astype(int)
        assert pixels[4, 4, 0] > 200
        assert pixels[12, 28, 0] < 50


def test_a_damaged_orientation_is_ignored(tmp_path):
    image = Image.new("RGB", (4, 2))
    image.info["exif"] = b"Exif\0\0MM\0*\xff\xff"
    assert to_rgb(image).size == (4, 2)


def test_heic_is_read_by_pillow_heif_or_named(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    (folder / "a" / "0.png").rename(folder / "a" / "photo.HEIC")
    monkeypatch.setattr("infssm.data.sets.own.find_spec", lambda _: None)
    with pytest.warns(
        UserWarning, match=r"left out 1 HEIC images \(pip install pillow-heif to read them\): a/photo\.HEIC"
    ):
        assert len(load_dataset(str(folder))) == 7
    monkeypatch.undo()
    opened = []
    module = ModuleType("pillow_heif")
    module.register_heif_opener = lambda: opened.append(1)
    module.__spec__ = ModuleSpec("pillow_heif", None)
    monkeypatch.setitem(sys.modules, "pillow_heif", module)
    dataset = load_dataset(str(folder))
    assert (len(dataset), find_unreadable(dataset)) == (8, {})
    assert opened


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    (folder / "b" / "deeper").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("deeper"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot list the folder .*b/deeper: Permission denied; make it readable"):
        load_dataset(str(folder))


def test_pipes_are_never_opened(tmp_path):
    folder = make_folder(tmp_path / "mine")
    os.mkfifo(folder / "a" / "pipe.png")
    with pytest.warns(UserWarning, match="left out, not regular files: pipe.png"):
        dataset = load_dataset(str(folder))
    assert len(dataset) == 8
    pipe = FileImages(folder, ("a/pipe.png",))
    assert "not a regular file" in pipe.why_unreadable(0)
    assert pipe.contents == {"a/pipe.png": ""}
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="not a regular file"):
        read_npz(tmp_path / "pipe.npz", ("x",))


def test_links_below_a_class_are_followed_but_not_in_circles(tmp_path):
    folder = make_folder(tmp_path / "mine")
    elsewhere = make_folder(tmp_path / "other")
    (folder / "a" / "more").symlink_to(elsewhere / "a")
    (folder / "a" / "circle").symlink_to(folder / "a")
    (folder / "b" / "gone.png").symlink_to(tmp_path / "nowhere")
    dataset = load_dataset(str(folder))
    assert dataset.labels.tolist() == [0] * 8 + [1] * 5
    assert "a/more/0.png" in dataset.images.paths
    assert list(find_unreadable(dataset)) == [12], "a broken link is named, not left out"


@pytest.mark.parametrize("name", [b"caf\xe9", b"a/caf\xe9.png"])
def test_names_that_are_not_utf8_are_refused(tmp_path, name):
    folder = make_folder(tmp_path / "mine")
    path = os.path.join(os.fsencode(folder), name)
    if name.endswith(b".png"):
        os.link(folder / "a" / "0.png", path)
    else:
        os.mkdir(path)
    with pytest.raises(DataError, match=r"holds the name b'caf\\xe9.*', which is not UTF-8: rename it"):
        load_dataset(str(folder))


def test_labels_that_are_timestamps(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2)), y=np.arange(4) + 1_700_000_000)
    with pytest.raises(DataError, match=r"labels must count classes from 0: save y as np\.unique"):
        load_dataset(str(tmp_path / "a.npz"))


def test_options_of_another_type_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("words " * 100)
    with pytest.raises(ConfigError, match=r"data set 'text:.* \(data\.options\): length='abc': .*valid integer"):
        load_dataset(f"text:{tmp_path}", length="abc")
    assert len(load_dataset(f"text:{tmp_path}", length="60")) == 10


class Counting(str):
    """A class name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counting.compared += 1
        return str.__eq__(self, other)


def test_loading_is_linear_in_the_number_of_classes(tmp_path, monkeypatch):
    """Comparing every file's class with all classes made 20,000 classes of sounds take 14 seconds."""
    names = [f"c{number}" for number in range(300)]
    for name in names:
        (tmp_path / name).mkdir()
        with wave.open(str(tmp_path / name / "a.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(b"\0\0" * 8)
    from infssm.data.sets import own

    scan = own.scan
    monkeypatch.setattr(own, "scan", lambda folder: tuple([Counting(name) for name in part] for part in scan(folder)))
    dataset = load_dataset(str(tmp_path))
    assert dataset.classes == tuple(sorted(names))
    assert 0 < Counting.compared < 20 * len(names)
    Counting.compared = 0
    wanted = [[Counting(name)] for name in names]
    assert divide_classes([Counting(name) for name in names], 1, tasks=wanted) == [[n] for n in range(300)]
    assert Counting.compared < 20 * len(names)
