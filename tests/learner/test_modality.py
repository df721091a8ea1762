"""A kind of data of one's own, in one file: samples, what they are like, a modality, a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import infssm
from infssm import _modality
from infssm._batch import Batch
from infssm.bench.running import run
from infssm.cli.app import invoke
from infssm.data import (
    Dataset,
    ExportedInput,
    Recipe,
    SequenceFacts,
    Sequences,
    Sequential,
    StreamFacts,
    register_modality,
)
from infssm.data.dataset import DATASETS, register_dataset
from infssm.errors import ConfigError, DataError
from infssm.learner.export import check_export, export_classifier, usage
from infssm.learner.hub import HubLearner
from infssm.learner.store.directory import RunDirectory
from tests.learner.sequences import config


class Strokes(Sequences):
    """Drawings as steps of a pen, of 4 to 9 steps, two numbers each."""

    kind = "strokes"
    width = 2

    @property
    def lengths(self) -> NDArray[np.int64]:
        return 4 + np.arange(80) % 6

    def sequence(self, index: int) -> Tensor:
        angle = torch.arange(int(self.lengths[index]))[:, None] * (1 + index % 4)
        return torch.cat((angle.cos(), angle.sin()), dim=1)

    def fingerprint(self) -> str:
        return hashlib.sha256(b"strokes").hexdigest()[:16]


class StrokeFacts(SequenceFacts, kind="strokes"):
    """Drawings are read from lists of angles, such as ``0.0 0.5 1.0``, one drawing in a line of a file."""

    suffixes = frozenset({".strokes"})

    def samples_in(self, file: Path) -> dict[str, Any]:
        return {f"{file.name}, line {n}": line for n, line in enumerate(file.read_text().splitlines(), 1)}

    def read(self, sample: Any, recipe: Recipe | None = None) -> Tensor:
        if not isinstance(sample, str):
            return super().read(sample, recipe)
        try:
            angle = torch.tensor([float(word) for word in sample.split()])[:, None]
        except ValueError as error:
            raise DataError(f"a drawing is a list of angles: {error}") from None
        return super().read(torch.cat((angle.cos(), angle.sin()), dim=1))

    def exported(self, recipe: Recipe | None) -> ExportedInput:
        return replace(super().exported(recipe), name="drawing", reading="drawing = numpy.zeros((5, 2), 'f4')")


class Drawings(Sequential):
    name = "drawings"
    kinds = frozenset({"strokes"})
    word = "drawings"
    like = "series"
    input_option = "in_dim"
    field = "series"
    settings = {"model": {"name": "mamba_nano"}}  # noqa: RUF012 - as users write it
    hub_task = "drawing-classification"


@pytest.fixture
def drawings() -> Iterator[str]:
    register_modality(Drawings())
    names = ("circle", "line", "star", "wave")

    @register_dataset("my-drawings")
    def load(root: Path) -> Dataset:
        return Dataset("my-drawings", names, Strokes(), np.arange(80) % 4, stratified=True)

    yield load.name
    del _modality._MODALITIES._items["drawings"], DATASETS._items["my-drawings"]


def written(strokes: Strokes, index: int) -> str:
    x, y = strokes.sequence(index).T
    return " ".join(str(float(angle)) for angle in torch.atan2(y, x))


@pytest.mark.parametrize("method", ["er", "inf-ssm-exact"])
def test_a_fifth_kind_of_data_is_trained_on_stored_and_predicted(tmp_path: Path, drawings: str, method: str) -> None:
    options = {"buffer_size": 6} if method == "er" else {"measure_at": 2}
    found = run(config(drawings, tmp_path, method, options, data={"by": "class"}), quiet=True)
    assert np.isfinite(found.matrix.values[1]).all()
    facts = StreamFacts.from_json(RunDirectory(found.path).stream())
    assert (facts.modality.name, facts.modality.word, facts.num_outputs) == ("drawings", "drawings", 4)
    classifier = infssm.load(found.path)
    assert classifier.predict(Strokes().sequence(0).numpy()).label in classifier.classes


def test_a_learner_is_taught_reads_predicts_exports_and_publishes_it(
    tmp_path: Path, drawings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but this file knows of drawings."""
    settings = {"model": {"options": {"d_model": 8, "n_layer": 1}}, "train": {"epochs": 1, "threads": 1}}
    learner = infssm.Learner("mamba_nano", folder=tmp_path / "learner", settings=settings)
    learner.learn(drawings)
    learner.learn(Strokes(), ["loop" if index % 4 == 0 else "dash" for index in range(80)], name="more")
    assert learner.classes == ("circle", "line", "star", "wave", "dash", "loop")
    learner = infssm.Learner.load(tmp_path / "learner")
    assert isinstance(learner.samples, StrokeFacts)
    drawing, given = written(Strokes(), 1), Strokes().sequence(1)
    of_text, of_tensor = (list(learner.predict(sample).probabilities.values()) for sample in (drawing, given))
    assert of_text == pytest.approx(of_tensor, abs=1e-4)
    with pytest.raises(DataError, match="a list of angles"):
        learner.predict("one two")
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "two.strokes").write_text(f"{drawing}\n{written(Strokes(), 2)}\n")
    assert invoke(["predict", str(tmp_path / "learner"), str(tmp_path / "drawn"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == ["two.strokes, line 1", "two.strokes, line 2"]
    assert lines[0]["label"] == learner.predict(given).label
    target = tmp_path / "drawings.onnx"
    assert export_classifier(learner.classifier, target) < 1e-4
    assert check_export(learner.classifier, target, [drawing, given]) < 1e-3
    assert "drawing = numpy.zeros" in usage(learner.classifier, target)
    assert HubLearner(learner).generate_model_card().data.pipeline_tag == "drawing-classification"


def test_models_and_methods_for_other_kinds_are_refused(tmp_path: Path, drawings: str) -> None:
    with pytest.raises(ConfigError, match="model 'vim_nano' is for images, and my-drawings is drawings: choose model="):
        run(config(drawings, tmp_path, data={"by": "class"}, model={"name": "vim_nano", "options": {}}), quiet=True)
    with pytest.raises(ConfigError, match="'lucir' does not work on drawings"):
        run(config(drawings, tmp_path, "lucir", data={"by": "class"}), quiet=True)
    with pytest.raises(ConfigError, match="already"):
        register_modality(Drawings())


def test_replayed_sequences_join_a_batch_padded_to_the_longest() -> None:
    """Rows of a buffer come after the batch's own; of language, the targets are the next tokens of all rows."""
    tokens = torch.tensor([[1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    language = _modality.LANGUAGE
    batch = Batch(tokens, language.targets(tokens, mask, torch.zeros(2)), mask=mask)
    stored = language.rows(batch, "er")
    assert {field: rows.tolist() for field, rows in stored.items()} == {
        "tokens": tokens.tolist(),
        "length": [3, 2],
        "label": [0, 0],
    }
    longer = {"tokens": torch.tensor([[6, 7, 8, 9, 0]]), "length": torch.tensor([4]), "label": torch.tensor([0])}
    both = language.join(batch, longer, lambda x: x)
    assert both.x.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert both.y.tolist() == [[2, 3, -100, -100], [5, -100, -100, -100], [7, 8, 9, -100]]
    labelled = _modality.TOKENS.join(Batch(tokens, torch.tensor([1, 2]), mask=mask), longer, lambda x: x)
    assert labelled.y.tolist() == [1, 2, 0]
