"""Counts of true and predicted classes."""

import math

import pytest

from infssm.errors import DataError
from infssm.learner.metrics import Confusion

NAMES = ("a", "b", "c", "d", "e")


def test_measures_and_tasks() -> None:
    found = Confusion.of([[3, 1, 0], [0, 0, 0], [1, 1, 2]], NAMES, (1, 2, 2))
    assert found.classes == ("a", "b", "c")
    assert found.names_per_task == [("a",), ("b", "c")]
    assert found.per_class[0] == 0.75
    assert math.isnan(found.per_class[1])
    assert found.per_class[2] == 0.5


def test_json_and_back() -> None:
    found = Confusion.of([[3, 1, 0], [0, 0, 0], [1, 1, 2]], NAMES, (1, 2, 2))
    stored = found.to_json()
    assert stored["images"] == [[0, 0, 3], [0, 1, 1], [2, 0, 1], [2, 1, 1], [2, 2, 2]]
    back = Confusion.from_json(stored)
    assert back.counts.tolist() == found.counts.tolist()
    assert (back.classes, back.task_sizes) == (found.classes, found.task_sizes)


@pytest.mark.parametrize(
    "damage", [{"classes": ["a"]}, {"images": [[0, 9, 1]]}, {"images": 3}, {"task_sizes": [1]}, {"task_sizes": None}]
)
def test_damaged(damage: dict[str, object]) -> None:
    stored = Confusion.of([[3, 1, 0], [0, 0, 0], [1, 1, 2]], NAMES, (1, 2, 2)).to_json()
    with pytest.raises(DataError, match="not a stored confusion"):
        Confusion.from_json(stored | damage)
