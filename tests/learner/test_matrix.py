"""Measures on matrices worked by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infssm.errors import ConfigError, DataError
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, AccuracyMatrix, summarize

# Task 0: 0.9 -> 0.5 -> 0.6 (best of steps 0..1 is 0.9, falls by 0.3 whichever way it is counted).
# Task 1: 0.4 -> 0.7, improves at the end: code counts 0, paper counts 0.4 - 0.7 = -0.3.
ROWS = [[0.9], [0.5, 0.4], [0.6, 0.7, 0.8]]
TASK_ROWS = [[0.9], [0.8, 0.7], [0.7, 0.7, 1.0]]
SAMPLES = [10, 30, 60]


def make(rows=ROWS, task_rows=TASK_ROWS, samples=SAMPLES, num_tasks=None) -> AccuracyMatrix:
    matrix = AccuracyMatrix(num_tasks or len(rows))
    for i, row in enumerate(rows):
        matrix.update(row, task_rows[i] if task_rows else None, samples=samples[: i + 1] if samples else None)
    return matrix


def test_measures_worked_by_hand():
    matrix = make()
    assert matrix.aa_curve == pytest.approx([0.9, 0.45, 0.7])
    assert matrix.aa == pytest.approx(0.7)
    assert matrix.aia == pytest.approx((0.9 + 0.45 + 0.7) / 3)
    assert matrix.fm() == pytest.approx((0.3 + 0.0) / 2)
    assert matrix.fm("paper") == pytest.approx((0.3 - 0.3) / 2)
    assert matrix.bwt == pytest.approx(((0.6 - 0.9) + (0.7 - 0.4)) / 2)
    new = (0.7 * 30 + 0.8 * 60) / 90
    assert matrix.class_incremental.harmonic == pytest.approx(2 / (1 / 0.6 + 1 / new))
    assert math.isnan(make(ROWS[:1], TASK_ROWS[:1]).class_incremental.harmonic)
    assert make([[0.5], [0.0, 0.0]], None, [1, 1]).class_incremental.harmonic == 0
    assert matrix.class_incremental.forgetting_per_task("code") == pytest.approx([0.3, 0.0])
    assert matrix.class_incremental.forgetting_per_task("paper") == pytest.approx([0.3, -0.3])
    assert matrix.class_incremental.transfer_per_task() == pytest.approx([-0.3, 0.3])


def test_best_accuracy_between_first_and_last_step_counts():
    matrix = make([[0.5], [0.9, 0.2], [0.4, 0.2, 0.1]], None, None)
    assert matrix.fm("code") == pytest.approx(0.25)
    assert matrix.fm("paper") == pytest.approx(0.25)
    assert matrix.bwt == pytest.approx(-0.05)


def test_weighted_average_counts_images_not_tasks():
    matrix = make()
    view = matrix.class_incremental
    assert view.weighted_aa == pytest.approx((0.6 * 10 + 0.7 * 30 + 0.8 * 60) / 100)
    assert view.weighted_aa_curve == pytest.approx([0.9, (0.5 * 10 + 0.4 * 30) / 40, 0.75])
    assert view.weighted_aia == pytest.approx((0.9 + 0.425 + 0.75) / 3)
    assert math.isnan(make(samples=None).class_incremental.weighted_aa)


def test_task_incremental_measures_stand_beside():
    view = make().task_incremental
    assert view.aa == pytest.approx(0.8)
    assert view.fm() == pytest.approx(0.1)
    assert math.isnan(make(task_rows=None).task_incremental.aa)


def test_measures_of_an_unfinished_run_are_those_of_its_steps():
    matrix = make(ROWS[:2], TASK_ROWS[:2], SAMPLES, num_tasks=5)
    assert matrix.steps == 2
    assert matrix.aa == pytest.approx(0.45)
    assert matrix.fm() == pytest.approx(0.4)
    assert np.isnan(matrix.values[0, 1])
    assert np.isnan(matrix.values[2:]).all()


def test_one_task_neither_forgets_nor_transfers():
    matrix = make([[0.5]], [[0.5]], [4])
    assert matrix.aa == 0.5
    assert math.isnan(matrix.fm())
    assert math.isnan(matrix.bwt)
    empty = AccuracyMatrix(3)
    assert all(math.isnan(value) for value in empty.summary().values())


fractions = st.floats(0, 1, allow_nan=False)


@given(
    st.integers(2, 5).flatmap(
        lambda t: st.tuples(*[st.lists(fractions, min_size=i, max_size=i) for i in range(1, t + 1)])
    )
)
def test_forgetting_relations(rows):
    matrix = make(list(rows), None, None)
    code = matrix.class_incremental.forgetting_per_task("code")
    paper = matrix.class_incremental.forgetting_per_task("paper")
    assert code == pytest.approx(np.maximum(paper, 0))
    assert (paper >= -matrix.class_incremental.transfer_per_task() - 1e-12).all()


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_json_round_trip(steps):
    matrix = make(ROWS[:steps], TASK_ROWS[:steps], SAMPLES, num_tasks=3)
    assert AccuracyMatrix.from_json(json.loads(json.dumps(matrix.to_json(), allow_nan=False))) == matrix


def test_csv_round_trip(tmp_path):
    matrix = make([[1 / 3], [0.1 + 0.2, 0.7]], None, [3, 4], num_tasks=4)
    path = tmp_path / "accuracy_matrix.csv"
    path.write_text(matrix.to_csv())
    assert AccuracyMatrix.from_csv(path) == matrix
    assert AccuracyMatrix.from_csv(matrix.to_csv()) == matrix
    assert matrix.to_csv().splitlines()[1] == "0,0,0.3333333333333333,,3.0,4"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "step,task,num_tasks\n0,x,3\n"])
def test_foreign_csv_is_refused(text):
    with pytest.raises(DataError, match="not a stored accuracy matrix"):
        AccuracyMatrix.from_csv(text)
    with pytest.raises(DataError, match="not a stored accuracy matrix"):
        AccuracyMatrix.from_json({"num_tasks": 2})


def test_bad_rows_are_refused_and_leave_the_matrix_alone():
    matrix = make(ROWS[:1], TASK_ROWS[:1], SAMPLES, num_tasks=2)
    before = matrix.to_json()
    for row, kwargs, message in [
        ([0.5], {}, "must hold 2 values"),
        ([0.5, 53.0], {}, r"fractions in \[0, 1\]"),
        ([0.5, float("nan")], {}, r"fractions in \[0, 1\]"),
        ([0.5, 0.5], {"task_accuracies": [0.1]}, "task_accuracies after task 1"),
        ([0.5, 0.5], {"samples": [1, 0]}, "positive counts"),
    ]:
        with pytest.raises(ConfigError, match=message):
            matrix.update(row, **kwargs)
        assert matrix.to_json() == before
    matrix.update([0.5, 0.5])
    with pytest.raises(ConfigError, match="all its 2 tasks"):
        matrix.update([0.5, 0.5, 0.5])
    with pytest.raises(ConfigError, match="at least one task"):
        AccuracyMatrix(0)
    with pytest.raises(ConfigError, match="'code' or 'paper'"):
        matrix.fm("max")


def test_summarize_uses_the_sample_deviation():
    summary = summarize([{"aa": 0.1}, {"aa": 0.2}, {"aa": 0.6}])["aa"]
    assert summary.mean == pytest.approx(0.3)
    assert summary.std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert summary.format() == "30.00 ± 26.46"
    one = summarize([make()])
    assert one["aa"].std is None
    assert one["aa"].format() == "70.00"
    assert one["fm_paper"].format(digits=1) == "0.0"
    assert summarize([make([[0.5]], None, None)])["fm"].format() == "-"


def test_summarize_refuses_nothing_and_mixed_measures():
    with pytest.raises(ConfigError, match="at least one"):
        summarize([])
    with pytest.raises(ConfigError, match=r"\['fm'\]"):
        summarize([{"aa": 0.1}, {"aa": 0.1, "fm": 0.2}])


def test_a_measure_has_a_direction():
    """Forgetting is positive where a task got worse, whichever direction the measure has; unknown values never win."""
    assert (ACCURACY.higher_is_better, BITS_PER_BYTE.higher_is_better) == (True, False)
    assert ACCURACY.improves(0.6, 0.5)
    assert not BITS_PER_BYTE.improves(0.6, 0.5)
    assert BITS_PER_BYTE.improves(0.4, 0.5)
    assert not BITS_PER_BYTE.improves(math.nan, None)
    bits = AccuracyMatrix(2, BITS_PER_BYTE)
    bits.update([2.0], samples=[100], tokens=[25])
    bits.update([3.0, 1.0], samples=[100, 60], tokens=[25, 20])
    assert (bits.fm(), bits.bwt) == (1.0, -1.0)
    assert bits.bits_per_token == (3.0 * 4 + 1.0 * 3) / 2
    assert bits.summary()["bits_per_token"] == bits.bits_per_token
    assert AccuracyMatrix.from_json(bits.to_json()) == AccuracyMatrix.from_csv(bits.to_csv()) == bits
