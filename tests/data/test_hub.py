"""Data sets of the Hugging Face library, written to a folder: images with labels, text with domains."""

import sys

import datasets
import numpy as np
import pytest
from PIL import Image

from infssm.data import ImageFacts, ImageLoader, TaskStream, load_dataset, make_split
from infssm.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def image_table(count, *, offset=0):
    images = [Image.new("RGB", (6, 5), (offset + n, 0, 0)) for n in range(count)]
    columns = {
        "photo": images,
        "what": [n % 2 for n in range(count)],
        "year": [2020 + n // 2 % 2 for n in range(count)],
    }
    kinds = {
        "photo": datasets.Image(),
        "what": datasets.ClassLabel(names=["cat", "dog"]),
        "year": datasets.Value("int64"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def save(path, **parts):
    datasets.DatasetDict(parts).save_to_disk(str(path))
    return f"hf:{path}"


def test_images_with_labels_and_domains(tmp_path):
    name = save(tmp_path / "pets", train=image_table(20), test=image_table(8, offset=100))
    dataset = load_dataset(name, domain="year")
    assert (dataset.name, dataset.classes, dataset.domains) == ("pets", ("cat", "dog"), ("2020", "2021"))
    assert (len(dataset), dataset.num_test) == (28, 8)
    reds = [np.asarray(dataset.images.pil(n))[0, 0, 0] for n in (0, 19, 20, 27)]
    assert reds == [0, 19, 100, 107]
    assert dataset.images.raw([3, 20], 4)[:, 0, 0, 0].tolist() == [3, 100]
    stream = TaskStream(dataset, make_split(dataset), 2)
    x, y = next(iter(ImageLoader(stream[0], recipe="light", batch_size=4)))
    assert x.shape[:2] == (4, 3)
    assert set(y.tolist()) == {0}
    assert load_dataset(name).fingerprint != dataset.fingerprint
    assert load_dataset(name, domain="year").fingerprint == dataset.fingerprint


def test_images_of_a_table_take_the_size_that_a_learner_knows(tmp_path):
    known = load_dataset(save(tmp_path / "pets", train=image_table(8)))
    fitted = ImageFacts("grey", 1, 4, 4).fit(known, None)
    assert fitted.facts == ImageFacts("pets", 1, 4, 4)
    assert len(fitted) == len(known)
    table = datasets.Dataset.from_dict({"text": ["a b c d e f g h i j"] * 3})
    texts = load_dataset(save(tmp_path / "texts", train=table), length=8)
    with pytest.raises(DataError, match="the learner knows images, and texts holds"):
        ImageFacts("grey", 1, 4, 4).fit(texts, None)


def test_a_single_table_has_no_test_part(tmp_path):
    image_table(12).save_to_disk(str(tmp_path / "one"))
    dataset = load_dataset(f"hf:{tmp_path / 'one'}")
    assert (dataset.num_test, dataset.domain_of, dataset.stratified) == (0, None, True)


def test_text_by_domain(tmp_path):
    rows = {"text": ["a b c d e f g h i j"] * 3 + ["zyx" * 8], "source": ["web", "web", "web", "book"]}
    name = save(tmp_path / "texts", train=datasets.Dataset.from_dict(rows))
    with pytest.raises(ConfigError, match=r"2 columns of type Value: choose one with data\.options\.text"):
        load_dataset(name)
    dataset = load_dataset(name, text="text", domain="source", length=8)
    assert dataset.domains == ("book", "web")
    first = bytes(dataset.sequences.sequence(0).tolist())
    assert first == b"zyxzyxzy"


def test_the_test_part_of_text_is_the_test_data(tmp_path):
    def table(part, count):
        rows = {"text": [f"{part} {n:03}" + "." * 20 for n in range(count)], "source": ["web", "book"] * (count // 2)}
        return datasets.Dataset.from_dict(rows)

    name = save(tmp_path / "texts", train=table("train", 60), test=table("test!", 20))
    dataset = load_dataset(name, text="text", domain="source", length=29)
    split = make_split(dataset)

    def parts(indices):
        return {bytes(dataset.sequences.sequence(int(n)).tolist())[:5] for n in indices}

    assert parts(split.test) == {b"test!"}
    assert parts(split.train) == parts(split.val) == {b"train"}
    assert split.sizes == {"train": 54, "val": 6, "test": 20}


def test_damaged_folders_are_one_line_errors(tmp_path):
    """Columns that the test part lacks, missing values, and tables that are cut short."""
    train = datasets.Dataset.from_dict({"text": ["a" * 40, None, "b" * 40], "source": ["x", "y", "x"]})
    name = save(tmp_path / "texts", train=train, test=datasets.Dataset.from_dict({"other": ["a" * 40]}))
    with pytest.raises(ConfigError, match="has no column 'text'; it has other"):
        load_dataset(name, text="text")
    with pytest.raises(ConfigError, match="has no column 'where'; it has text, source"):
        load_dataset(name, text="text", domain="where")
    alone = save(tmp_path / "alone", train=train)
    texts = load_dataset(alone, text="text", length=10)
    assert {bytes(texts.sequences.sequence(n).tolist()) for n in range(len(texts))} == {b"a" * 10, b"b" * 10}
    # Told to be an image, a text raises whatever the decoder raises, as images are read or before.
    info = tmp_path / "alone" / "train" / "dataset_info.json"
    info.write_text(info.read_text().replace('"dtype": "string",', "").replace('"Value"', '"ClassLabel"'))
    with pytest.raises(DataError, match="with the datasets library") as raised:
        load_dataset(alone)
    assert "\n" not in str(raised.value)


def test_bad_names_and_columns(tmp_path, monkeypatch):
    name = save(tmp_path / "pets", train=image_table(4))
    with pytest.raises(ConfigError, match="no column 'colour' of type ClassLabel; it has what"):
        load_dataset(name, label="colour")
    with pytest.raises(ConfigError, match="has no option 'size'; known: domain, image, label"):
        load_dataset(name, size=3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot load"):
        load_dataset(f"hf:{tmp_path / 'empty'}")
    other = save(tmp_path / "other", dev=image_table(4))
    with pytest.raises(DataError, match="no part 'train'; it has dev"):
        load_dataset(other)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install 'infssm\\[hf\\]'"):
        load_dataset(name)


def test_own_folders_refuse_unknown_options(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a" / "0.png")
    with pytest.raises(ConfigError, match="has no option 'colour'; known: max_classes"):
        load_dataset(str(tmp_path), colour=1)
