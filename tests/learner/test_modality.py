"""A kind of data of one's own, in one file: samples, a modality, a data set; everything else asks the modality."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import infssm
from infssm import _modality
from infssm._batch import Batch
from infssm.bench.running import run
from infssm.data import Dataset, Sequences, Sequential, StreamFacts, register_modality
from infssm.data.registry import DATASETS, register_dataset
from infssm.errors import ConfigError
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


class Drawings(Sequential):
    name = "drawings"
    kinds = frozenset({"strokes"})
    word = "drawings"
    like = "series"
    input_option = "in_dim"
    field = "series"
    settings = {"model": {"name": "mamba_nano"}}  # noqa: RUF012 - as users write it


@pytest.fixture
def drawings() -> Iterator[str]:
    register_modality(Drawings())
    names = ("circle", "line", "star", "wave")

    @register_dataset("my-drawings")
    def load(root: Path) -> Dataset:
        return Dataset("my-drawings", names, Strokes(), np.arange(80) % 4, stratified=True)

    yield load.name
    del _modality._MODALITIES._items["drawings"], DATASETS._items["my-drawings"]


@pytest.mark.parametrize("method", ["er", "inf-ssm-exact"])
def test_a_fifth_kind_of_data_is_trained_on_stored_and_predicted(tmp_path: Path, drawings: str, method: str) -> None:
    options = {"buffer_size": 6} if method == "er" else {"measure_at": 2}
    found = run(config(drawings, tmp_path, method, options, data={"by": "class"}), quiet=True)
    assert np.isfinite(found.matrix.values[1]).all()
    facts = StreamFacts.from_json(RunDirectory(found.path).stream())
    assert (facts.modality.name, facts.modality.word, facts.num_outputs) == ("drawings", "drawings", 4)
    classifier = infssm.load(found.path)
    assert classifier.predict(Strokes().sequence(0).numpy()).label in classifier.classes


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
