"""Loading data sets in their real layouts, and own data good and bad."""

import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from infssm.data import (
    ArrayImages,
    Dataset,
    FileImages,
    data_root,
    list_datasets,
    load_dataset,
    make_split,
    register_dataset,
    write_synthetic,
)
from infssm.data.dataset import DATASETS
from infssm.errors import ConfigError, DataError


def save_image(path, value=0, size=(6, 5)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def npz(path, **changes):
    arrays = {
        "x_train": np.zeros((6, 4, 4, 3), np.uint8),
        "y_train": np.array([0, 1, 0, 1, 0, 1]),
        "x_test": np.ones((2, 4, 4, 3), np.uint8),
        "y_test": np.array([0, 1]),
        "classes": np.array(["cat", "dog"]),
    }
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_digits():
    digits = load_dataset("digits")
    assert digits.images.pixels.shape == (1797, 1, 8, 8)
    assert (digits.images.pixels.min(), digits.images.pixels.max()) == (0, 255)
    assert digits.classes == tuple("0123456789")
    assert make_split(digits).sizes == {"train": 1293, "val": 144, "test": 360}
    # The first image is a zero: dark in the middle.
    assert digits.labels[0] == 0
    assert digits.images.pixels[0, 0, 4, 3] == 0


def test_cifar100_layout(tmp_path):
    write_synthetic("cifar100", tmp_path, per_class=2)
    cifar = load_dataset("cifar100", tmp_path)
    assert (len(cifar), cifar.num_test, cifar.num_classes) == (400, 200, 100)
    assert cifar.splits == {"train": range(200), "test": range(200, 400)}
    with (tmp_path / "cifar-100-python" / "test").open("rb") as file:
        row = pickle.load(file)[b"data"][3]
    assert np.array_equal(cifar.images.pixels[203].numpy(), row.reshape(3, 32, 32))
    assert cifar.labels[203] == 1
    (tmp_path / "cifar100").mkdir()
    os.replace(tmp_path / "cifar-100-python", tmp_path / "cifar100" / "cifar-100-python")
    assert load_dataset("cifar100", tmp_path).fingerprint == cifar.fingerprint


def test_cifar100_as_npz(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    npz(
        tmp_path / "cifar100.npz",
        x_train=x,
        y_train=np.arange(200) % 100,
        x_test=x[:100],
        y_test=np.arange(100),
        classes=np.array([f"c{i}" for i in range(100)]),
    )
    cifar = load_dataset("cifar100", tmp_path)
    assert np.array_equal(cifar.images.pixels[7].numpy(), x[7].transpose(2, 0, 1))
    assert cifar.num_test == 100


class Malicious:
    def __reduce__(self):
        return (os.system, ("true",))


def test_cifar100_pickles_run_no_code_and_damage_is_named(tmp_path):
    folder = write_synthetic("cifar100", tmp_path, per_class=1)
    good = (folder / "train").read_bytes()
    for content in (
        pickle.dumps({b"data": Malicious()}),
        good[: len(good) // 2],
        b"",
        pickle.dumps([1]),
        pickle.dumps({}),
    ):
        (folder / "train").write_bytes(content)
        with pytest.raises(DataError, match="damaged or not of CIFAR-100"):
            load_dataset("cifar100", tmp_path)
    (folder / "train").write_bytes(pickle.dumps({b"data": np.zeros((2, 9), np.uint8), b"fine_labels": [0, 1]}))
    with pytest.raises(DataError, match=r"expected uint8 \[n, 3072\]"):
        load_dataset("cifar100", tmp_path)
    (folder / "train").unlink()
    with pytest.raises(DataError, match="is missing"):
        load_dataset("cifar100", tmp_path)


def test_folder_data_sets(tmp_path):
    write_synthetic("imagenet-r", tmp_path, per_class=1, size=8)
    write_synthetic("caltech256", tmp_path, per_class=1, size=8)
    renditions, caltech = load_dataset("imagenet-r", tmp_path), load_dataset("caltech256", tmp_path)
    assert (renditions.num_classes, len(renditions), renditions.num_test) == (200, 200, 0)
    assert caltech.num_classes == 250
    assert caltech.classes[-1] == "250.class"
    assert len(caltech) == 250
    (tmp_path / "imagenet-r" / "001.class" / "image000.jpg").unlink()
    (tmp_path / "imagenet-r" / "001.class").rmdir()
    with pytest.raises(DataError, match=r"199 class folders .* expected 200"):
        load_dataset("imagenet-r", tmp_path)


def test_cub_as_published_and_as_train_test_folders_give_one_order(tmp_path):
    write_synthetic("cub200", tmp_path / "a", per_class=2, size=8)
    published = tmp_path / "b" / "CUB_200_2011"
    names, flags = [], []
    for part in ("test", "train"):
        for file in sorted((tmp_path / "a" / "cub200" / part).rglob("*.jpg")):
            name = f"{file.parent.name}/{part}_{file.name}"
            (published / "images" / file.parent.name).mkdir(parents=True, exist_ok=True)
            os.link(file, published / "images" / name)
            names.append(name)
            flags.append(int(part == "train"))
    (published / "images.txt").write_text("".join(f"{i} {name}\n" for i, name in enumerate(names, 1)))
    (published / "train_test_split.txt").write_text("".join(f"{i} {flag}\n" for i, flag in enumerate(flags, 1)))
    folders, official = load_dataset("cub200", tmp_path / "a"), load_dataset("cub200", tmp_path / "b")
    assert (len(official), official.num_test) == (800, 400)
    assert official.labels.tolist() == folders.labels.tolist()
    for index in (0, 399, 400, 799):
        assert official.images.pil(index).tobytes() == folders.images.pil(index).tobytes()
    (published / "train_test_split.txt").write_text("1 1\n")
    with pytest.raises(DataError, match="does not name"):
        load_dataset("cub200", tmp_path / "b")
    (published / "train_test_split.txt").unlink()
    with pytest.raises(DataError, match=r"train_test_split\.txt is missing"):
        load_dataset("cub200", tmp_path / "b")


def test_own_folders(tmp_path):
    for name, value in (("b", 1), ("a", 2)):
        for number in range(3):
            save_image(tmp_path / "mine" / name / f"{number}.png", value)
    (tmp_path / "mine" / "a" / "notes.txt").write_text("not an image")
    dataset = load_dataset(str(tmp_path / "mine"))
    assert dataset.classes == ("a", "b")
    assert dataset.images.paths[:4] == ("a/0.png", "a/1.png", "a/2.png", "b/0.png")
    assert dataset.images.raw([0, 3], 4)[:, 0, 0, 0].tolist() == [2, 1]
    assert load_dataset("mine", tmp_path).fingerprint == dataset.fingerprint
    save_image(tmp_path / "mine" / "a" / "9.png")
    assert load_dataset("mine", tmp_path).fingerprint != dataset.fingerprint


def test_own_folders_with_train_and_test(tmp_path):
    for part, count in (("train", 2), ("test", 1)):
        for name in "ab":
            for number in range(count):
                save_image(tmp_path / part / name / f"{number}.png")
    dataset = load_dataset(str(tmp_path))
    assert dataset.splits == {"train": range(4), "test": range(4, 6)}
    assert dataset.images.paths[4] == "test/a/0.png"
    save_image(tmp_path / "test" / "zebra" / "0.png")
    with pytest.raises(DataError, match="different classes: zebra"):
        load_dataset(str(tmp_path))


def test_bad_folders(tmp_path):
    with pytest.raises(DataError, match="no class folders"):
        load_dataset(str(tmp_path))
    save_image(tmp_path / "a" / "0.png")
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "0.txt")
    with pytest.raises(DataError, match=r"no class folder of .* holds images or sounds \(\.bmp"):
        load_dataset(str(tmp_path))
    with pytest.raises(DataError, match="no data at"):
        load_dataset(str(tmp_path / "absent" / "place"))


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_unreadable_images_are_named(tmp_path, content):
    path = tmp_path / "a" / "bad.jpg"
    save_image(path, size=(64, 64))
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    images = FileImages(tmp_path, ("a/bad.jpg",))
    with pytest.raises(DataError, match=r"cannot read the image .*bad\.jpg"):
        images.pil(0)
    assert images.why_unreadable(0)


def test_own_npz(tmp_path):
    dataset = load_dataset(str(npz(tmp_path / "pets.npz")))
    assert (dataset.name, dataset.classes, dataset.num_test) == ("pets", ("cat", "dog"), 2)
    assert dataset.images.pixels.shape == (8, 3, 4, 4)
    assert load_dataset("pets", tmp_path).fingerprint == dataset.fingerprint
    grey = npz(tmp_path / "grey.npz", x_train=np.zeros((6, 4, 4), np.uint8), x_test=np.zeros((2, 4, 4), np.uint8))
    assert load_dataset(str(grey)).facts.channels == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None, "classes": None}, "lacks y_test, classes; it has x_train, y_train, x_test"),
        ({"x_train": np.zeros((6, 4, 4, 3), np.float32)}, "must be uint8"),
        ({"x_train": np.zeros((6, 4, 4, 2), np.uint8), "x_test": np.zeros((2, 4, 4, 2), np.uint8)}, "1 or 3"),
        ({"x_train": np.zeros((6, 5, 5, 3), np.uint8)}, r"train images \[5, 5, 3\], test images \[4, 4, 3\]"),
        ({"y_train": np.array([0, 1])}, "do not belong together"),
        ({"y_train": np.array([0, 1, 0, 1, 0, 2])}, "labels run from 0 to 2, but 2 classes need 0 to 1"),
        ({"y_train": np.array([0, 1, 0, 1, 0, -1])}, "labels run from -1"),
        ({"y_train": np.array([0, 1, 0, 1, 0, 1.0]), "y_test": np.array([0.0, 1])}, "labels must be integers"),
        ({"y_test": np.array([0, 0])}, "1 classes have no test samples: dog"),
        ({"classes": np.array(["cat", {"a": 1}], dtype=object)}, "cannot read"),
    ],
)
def test_bad_npz(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        load_dataset(str(npz(tmp_path / "bad.npz", **changes)))


def test_truncated_npz(tmp_path):
    path = npz(tmp_path / "cut.npz")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match="cannot read"):
        load_dataset(str(path))


def test_bad_data_sets():
    pixels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    with pytest.raises(DataError, match="4 samples but 3 labels"):
        Dataset("x", ("a",), ArrayImages(pixels), np.zeros(3, dtype=int))
    with pytest.raises(DataError, match="no samples"):
        Dataset("x", ("a",), ArrayImages(pixels[:0]), np.zeros(0, dtype=int))


def test_synthetic_can_be_learnt():
    """Nearest class mean of the training images labels most test images rightly."""
    dataset = load_dataset("synthetic", classes=6, per_class=12, size=16)
    pixels = dataset.images.pixels.float().flatten(1)
    labels = torch.from_numpy(dataset.labels)
    train, test = dataset.splits["train"], dataset.splits["test"]
    means = torch.stack([pixels[train][labels[train] == k].mean(0) for k in range(6)])
    guesses = torch.cdist(pixels[test], means).argmin(1)
    assert (guesses == labels[test]).float().mean() > 0.95
    with pytest.raises(ConfigError, match="no synthetic layout"):
        write_synthetic("digits", "nowhere")


def test_root_and_missing_data(tmp_path, monkeypatch):
    monkeypatch.setenv("INFSSM_DATA", str(tmp_path / "env"))
    assert data_root() == tmp_path / "env"
    assert data_root(tmp_path) == tmp_path
    with pytest.raises(DataError) as caught:
        load_dataset("cifar100")
    message = str(caught.value)
    for part in (
        "CIFAR-100 not found",
        str(tmp_path / "env" / "cifar100.npz"),
        "infssm data fetch cifar100",
        "INFSSM_DATA",
    ):
        assert part in message
    monkeypatch.delenv("INFSSM_DATA")
    assert data_root().parts[-3:] == (".cache", "infssm", "data")


def test_names_and_options():
    assert {"digits", "cifar100", "imagenet-r", "caltech256", "cub200", "synthetic"} <= set(list_datasets())
    with pytest.raises(ConfigError, match="did you mean 'cifar100'"):
        load_dataset("cifar10")
    with pytest.raises(ConfigError, match="has no option 'colour'; known: none"):
        load_dataset("digits", colour=True)


def test_registering_a_data_set(monkeypatch):
    monkeypatch.setattr(DATASETS, "_items", dict(DATASETS._items))

    @register_dataset("tiny", summary="two images", classes=2)
    def tiny(root, *, value=0):
        pixels = torch.full((2, 1, 2, 2), value, dtype=torch.uint8)
        return Dataset("tiny", ("a", "b"), ArrayImages(pixels), np.arange(2))

    assert load_dataset("tiny", value=3).images.pixels.max() == 3
    assert tiny.summary == "two images"
    with pytest.raises(ConfigError, match="registered already"):
        register_dataset("tiny")(tiny.load)
