"""What a learner can be taught: images, sounds, series, text, modules of a user's own; and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from typer.testing import CliRunner

import infssm
from infssm.bench.running import run
from infssm.cli.app import app
from infssm.errors import ConfigError, DataError
from infssm.learner.config.fields import DataConfig
from infssm.learner.learner import Learner
from infssm.learner.lessons import as_dataset
from infssm.learner.predict import load_classifier
from tests.learner.frozen import SETTINGS, digits, frozen
from tests.learner.sequences import TRAIN, series_file, sound_folder, text_folder
from tests.learner.sequences import config as sequence_config
from tests.learner.tiny import tiny_config


def image_folder(root: Path, *classes: int, count: int = 6, skip: int = 0) -> Path:
    """One folder of PNG files per class."""
    pixels, names = digits(*classes, count=count, skip=skip)
    for number, (image, name) in enumerate(zip(pixels, names, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name / f"{number}.png")
    return root


# 8. All modalities.


def test_images_in_every_form(tmp_path: Path) -> None:
    learner = frozen()
    pixels, _ = digits(0, 1)
    learner.learn(image_folder(tmp_path / "monday", 0, 1))
    assert learner.history[0].name == "monday"
    learner.learn([Image.fromarray(image) for image in digits(2)[0]], "two")
    learner.learn(sorted((tmp_path / "monday" / "digit 0").iterdir()), "zero")
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(digits(3)[0]), torch.full((10,), 3))
    learner.learn(pairs)
    learner.learn(torch.utils.data.DataLoader(pairs, batch_size=4))
    assert learner.history[3].samples == learner.history[4].samples == {"3": 10}
    large = np.repeat(np.repeat(np.stack([pixels[:10]] * 3, axis=-1), 5, axis=1), 4, axis=2)
    learner.learn(large, "coloured")  # of another size, shape and colour
    assert learner.classes == ("digit 0", "digit 1", "two", "zero", "3", "coloured")
    assert learner.predict(large[0]).label in learner.classes
    # A test part that comes with the data is not taught.
    for part, skip in (("train", 20), ("test", 40)):
        image_folder(tmp_path / "both" / part, 7, 8, count=4, skip=skip)
    assert learner.learn(tmp_path / "both").samples == {"digit 7": 4, "digit 8": 4}
    assert learner.evaluate(tmp_path / "both").confusion.counts.sum() == 8


def test_named_data_are_sought_under_the_root_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "there"))):
        as_dataset("cifar100", settings=DataConfig(root=str(tmp_path / "there")))


def test_series_and_sounds(tmp_path: Path) -> None:
    series = Learner("mamba_nano", settings={"model": {"options": {"d_model": 16, "n_layer": 1}}, "train": TRAIN})
    series.learn(series_file(tmp_path))
    series.learn([np.random.default_rng(k).normal(size=(4 + k, 3)).astype(np.float32) for k in range(6)], "noise")
    assert (series.modality, len(series.classes)) == ("series", 5)
    assert series.predict(np.zeros((9, 3))).label in series.classes
    sounds = Learner(settings={"model": {"options": {"d_model": 16, "n_layer": 1}}, "train": TRAIN})
    sounds.learn(sound_folder(tmp_path) / "ann")
    lesson = sounds.learn(tmp_path / "sounds" / "bob", name="another voice")
    assert lesson.samples == {"no": 10, "yes": 10}
    assert sounds.config.data.bands == 40  # chosen, as for `infssm run`
    assert sounds.predict(tmp_path / "sounds" / "bob" / "no" / "1.wav").label in ("no", "yes")


def test_language_learns_domains_with_bits_per_byte(tmp_path: Path) -> None:
    folder = text_folder(tmp_path)
    settings = {
        "model": {"options": {"d_model": 16, "n_layer": 1}},
        "data": {"options": {"length": 16}},
        "train": TRAIN,
    }
    learner = Learner("mamba_lm_nano", method="lwf", settings=settings, folder=tmp_path / "lm")
    learner.learn(f"text:{folder / 'letters'}")  # a folder of files is one domain
    learner.learn(f"text:{folder}", name="all")
    assert learner.classes == ("letters", "all")
    assert all(0 < lesson.score < 12 for lesson in learner.history)
    bits = learner.evaluate(f"text:{folder / 'letters'}").bits
    assert bits.bits_per_byte == pytest.approx(
        Learner.load(tmp_path / "lm").evaluate(f"text:{folder / 'letters'}").bits.bits_per_byte
    )
    text = learner.generate("the q", 6, temperature=0)
    ids = torch.tensor(list(b"the q"))
    with torch.no_grad():
        for _ in range(6):  # one full forward for each token
            ids = torch.cat([ids, learner._now.taught()[0].module(ids[None])[0, -1].argmax()[None]])
    assert learner.generate(torch.tensor(list(b"the q")), 6, temperature=0).tolist() == ids.tolist()
    assert text == bytes(ids.tolist()).decode("utf-8", "replace")
    assert learner.generate("the q", 20, seed=1) == learner.generate("the q", 20, seed=1)
    with pytest.raises(ConfigError, match="no classes"):
        learner.predict(np.zeros(3))
    for wrong, words in (("", "empty"), (torch.tensor([999]), "from 0 to")):
        with pytest.raises(DataError, match=words):
            learner.generate(wrong, 3)


def test_a_language_model_of_tokens_continues_text(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"?": 0, "the": 1, "quick": 2, "fox": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("the quick fox " * 100)
    options = {"length": 16, "tokenizer": str(tmp_path / "words.json")}
    settings = {"model": {"options": {"d_model": 16, "n_layer": 1}}, "data": {"options": options}, "train": TRAIN}
    learner = Learner("mamba_lm_nano", method="seq", settings=settings)
    learner.learn(f"text:{tmp_path / 'texts'}")
    ids = learner.generate(torch.tensor([1, 2]), 4, temperature=0).tolist()
    assert learner.generate("the quick", 4, temperature=0) == words.decode(ids)
    with pytest.raises(DataError, match="at least one token"):
        learner.generate(" ", 4)
    (tmp_path / "words.json").unlink()
    with pytest.raises(DataError, match="no such file"):
        learner.generate("the quick", 4)


# Modules of a user's own.


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 12)
        self.fc = nn.Linear(12, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x.flatten(1)).relu())


def to_input(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("L").resize((8, 8)), dtype=np.float32))[None] / 255


@pytest.mark.parametrize("method", ["frozen+gda", "seq"])
def test_a_module_of_ones_own(tmp_path: Path, method: str) -> None:
    module = Own()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    learner = Learner(
        module,
        transform=to_input,
        method=method,
        folder=tmp_path / "own",
        settings={"train": SETTINGS["train"] | {"task0": "skip" if "frozen" in method else "train"}},
    )
    learner.learn(*digits(0, 1, count=20))
    learner.learn(*digits(2))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    said = learner.predict(list(digits(0, 1, 2, skip=50)[0]))
    other = Own()  # with other weights: those of the folder are loaded
    assert (
        infssm.load(tmp_path / "own", model=other, transform=to_input).predict(list(digits(0, 1, 2, skip=50)[0]))
        == said
    )
    for wrong in (None, nn.Sequential(nn.Linear(3, 3))):
        with pytest.raises(ConfigError, match=r"of class Own|no classifier"):
            Learner.load(tmp_path / "own", model=wrong)
    for options, words in (({"transform": lambda _: 3}, "makes int"), ({"weights": "omniglot"}, "leave weights out")):
        with pytest.raises(ConfigError, match=words):
            Learner(Own(), **options).learn(*digits(0, 1))
    with pytest.raises(ConfigError, match="transform is for a module"):
        Learner("vim_nano", transform=to_input)


# 9. Bad input.


def test_bad_input_is_refused_and_the_version_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    learner = frozen(folder=folder)
    learner.learn(*digits(0, 1))
    said, image = learner.predict(list(digits(0)[0])), digits(2)[0]
    empty, broken, single, lone = (tmp_path / name for name in ("empty", "broken", "single", "lone"))
    empty.mkdir()
    (image_folder(broken, 2, 3) / "digit 2" / "bad.png").write_bytes(b"no image")
    image_folder(single, 5, count=1)
    (lone / "digit 4").mkdir(parents=True)
    nan = np.full((4, 5, 3), np.nan)
    wrong: list[tuple[Any, Any, str]] = [
        (empty, None, "no class folders"),
        (lone, None, "holds images"),
        (broken, None, r"bad\.png"),
        (single, None, "has one sample"),
        (tmp_path / "nowhere", None, "no data at"),
        (image, "Digit 1", "differ in case"),
        (image, ["cafe\u0301"] * 5 + ["caf\u00e9"] * 5, "use one"),
        (image, "../up", "without slashes"),
        (image, " ", "without slashes"),
        (image, ["a"] * 9, "give one label per sample"),
        (image[:0], [], "no samples"),
        (image.astype(np.float32), "x", "learner knows images"),
        (nan, "x", "not finite"),
        (np.ones((4, 5, 2)), "x", "learner knows images"),
        ([tmp_path / "gone.png"] * 3, "x", "gone"),
        (image, None, "samples without labels"),
        (object(), None, "cannot learn from"),
    ]
    for data, labels, words in wrong:
        with pytest.raises((DataError, ConfigError), match=words):
            learner.learn(data, labels)
        assert learner.version == 1
    with pytest.raises(DataError, match="twice"):
        infssm.data.Dataset(
            "twice", ("a", "a"), infssm.data.ArrayImages.from_numpy(image), np.zeros(10, dtype=np.int64)
        )
    opened = Learner.load(folder)
    assert opened.predict(list(digits(0)[0])) == learner.predict(list(digits(0)[0])) == said
    with pytest.raises(DataError, match="does not know the class"):
        learner.evaluate(image, "new")
    with pytest.raises(ConfigError, match="holds a learner"):
        Learner(folder=folder)


# The command line, and runs that go on.


def invoke(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_on_a_learner_and_on_a_run(tmp_path: Path) -> None:
    first, second = image_folder(tmp_path / "first", 0, 1), image_folder(tmp_path / "second", 2)
    settings = ["model=vim_nano", "model.options.embed_dim=16", "model.options.depth=1", "train.epochs=1"]
    assert "learnt first: 12 samples" in invoke("learn", tmp_path / "learner", first, *settings)
    invoke("learn", tmp_path / "learner", second / "digit 2", "--label", "two", "--quiet", *settings)  # the same
    assert "0, digit 1, two" in invoke("show", tmp_path / "learner")
    assert "forgot digit 0" in invoke("forget", tmp_path / "learner", "digit 0", "--keep-versions")
    assert json.loads(invoke("show", tmp_path / "learner", "--json"))["classes"] == ["digit 1", "two"]
    assert "knows 3 classes again (version 2)" in invoke("undo", tmp_path / "learner")
    result = CliRunner().invoke(app, ["learn", str(tmp_path / "learner"), str(second), "seed=3"])
    assert isinstance(result.exception, ConfigError)
    found = run(tiny_config(tmp_path / "runs", "er"), quiet=True)
    assert "knows 12 classes" in invoke("learn", found.path, first)
    assert infssm.load(found.path).classes[:3] == ("0", "1", "2")
    invoke("undo", found.path)  # to what the run had learnt
    image = digits(3)[0][0]
    assert infssm.load(found.path).predict(image) == load_classifier(found.path).predict(image)
    assert "run it continues" in invoke("forget", found.path, "0")
    assert len(infssm.load(found.path).classes) == 9


def test_runs_that_cannot_grow_say_why_and_runs_on_domains_learn_more_of_them(tmp_path: Path) -> None:
    found = run(tiny_config(tmp_path / "runs", "der"), quiet=True)
    with pytest.raises(ConfigError, match="der cannot be taught new classes at any time, since"):
        Learner.load(found.path).learn(*digits(0))
    series = run(sequence_config(str(series_file(tmp_path)), tmp_path / "runs", "lda"), quiet=True)
    learner = Learner.load(series.path)
    samples = np.random.default_rng(0).normal(size=(6, 9, 3)).astype(np.float32)
    learner.learn(samples, learner.classes[0], name="third")
    learner.learn(samples + 3, "new class")
    assert len(Learner.load(series.path).classes) == 5
    with pytest.raises(ConfigError, match="domain cannot be forgotten"):
        learner.forget(learner.classes[0])
