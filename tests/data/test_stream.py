"""Task streams."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infssm.data import TaskStream, make_split
from infssm.data.stream import divide_classes
from infssm.errors import ConfigError, DataError

from .helpers import fake, fake_stream


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.none() | st.integers(0, 1000))
def test_tasks_partition_the_split(num_tasks, order_seed):
    dataset = fake(240, 12, 60)
    split = make_split(dataset)
    stream = TaskStream(dataset, split, num_tasks, class_order_seed=order_seed)
    for name in ("train", "val", "test"):
        together = np.concatenate([getattr(task, name).indices for task in stream])
        assert sorted(together) == sorted(getattr(split, name))
    for t, task in enumerate(stream):
        width = 12 // num_tasks
        assert (task.index, task.num_tasks, task.num_classes) == (t, num_tasks, 12)
        assert task.classes == range(t * width, (t + 1) * width)
        for part in (task.train, task.val, task.test):
            assert set(part.labels.tolist()) <= set(task.classes)
            names = [stream.class_names[label] for label in part.labels]
            assert names == [dataset.classes[k] for k in dataset.labels[part.indices]]


def test_natural_order_keeps_labels_and_split_order():
    dataset = fake(240, 12, 60)
    split = make_split(dataset)
    stream = TaskStream(dataset, split, 3)
    inside = split.train[dataset.labels[split.train] < 4]
    assert stream[0].train.indices.tolist() == inside.tolist()
    assert stream[0].train.labels.tolist() == dataset.labels[inside].tolist()


def test_class_order_is_numpys_seeded_permutation():
    dataset = fake(240, 12, 60)
    stream = TaskStream(dataset, make_split(dataset), 3, class_order_seed=10)
    np.random.seed(10)  # noqa: NPY002
    assert stream.class_order.tolist() == np.random.permutation(12).tolist()  # noqa: NPY002
    assert TaskStream(dataset, make_split(dataset), 3, class_order_seed=11).class_names != stream.class_names


@pytest.mark.parametrize("num_tasks", [0, 13])
def test_a_task_needs_a_class(num_tasks):
    dataset = fake(240, 12, 60)
    with pytest.raises(ConfigError, match=r"choose data\.num_tasks from 1 to 12$"):
        TaskStream(dataset, make_split(dataset), num_tasks)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.none() | st.integers(1, 12), st.none() | st.integers(0, 1000))
def test_unequal_tasks_partition_the_classes(num_tasks, base, seed):
    names = tuple(f"c{k}" for k in range(12))
    others = 12 - (base or 0)
    sharing = num_tasks - (base is not None)
    if base is not None and (sharing > others or (others == 0) != (sharing == 0)):
        with pytest.raises(ConfigError, match=r"in task 0 leave"):
            divide_classes(names, num_tasks, base_classes=base)
        return
    tasks = divide_classes(names, num_tasks, base_classes=base, class_order_seed=seed)
    assert sorted(label for task in tasks for label in task) == list(range(12))
    sizes = [len(task) for task in tasks]
    assert len(sizes) == num_tasks
    if base is not None:
        assert sizes.pop(0) == base
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


def test_ten_classes_in_three_tasks():
    dataset = fake(240, 10, 60)
    stream = TaskStream(dataset, make_split(dataset), 3)
    assert stream.task_sizes == (4, 3, 3)
    assert [task.classes for task in stream] == [range(4), range(4, 7), range(7, 10)]
    assert stream.cumulative(1).classes == range(7)


def test_base_classes_and_class_order():
    dataset = fake(400, 20, 100)
    stream = TaskStream(dataset, make_split(dataset), 6, base_classes=10, class_order_seed=1993)
    assert stream.task_sizes == (10, 2, 2, 2, 2, 2)
    assert stream.class_order.tolist() == np.random.RandomState(1993).permutation(20).tolist()


def test_tasks_by_labels_and_names_leave_the_other_classes_out():
    dataset = fake(240, 12, 60)
    stream = TaskStream(dataset, make_split(dataset), tasks=[[3, "c0"], ["c7"], [1, 2, 11]])
    assert stream.class_names == ("c3", "c0", "c7", "c1", "c2", "c11")
    assert (stream.num_classes, stream.num_tasks, stream.task_sizes) == (6, 3, (2, 1, 3))
    for task in stream:
        for part in (task.train, task.val, task.test):
            assert set(part.labels.tolist()) <= set(task.classes)
            assert [stream.class_names[k] for k in part.labels] == [
                dataset.classes[k] for k in dataset.labels[part.indices]
            ]
    kept = sum(len(part) for task in stream for part in (task.train, task.val, task.test))
    assert kept == np.isin(dataset.labels, [3, 0, 7, 1, 2, 11]).sum()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "at least one class"),
        ([[0], []], "at least one class"),
        ([[0, 1], ["0"]], "0 named twice"),
        ([[0], [12]], "no class 12; labels run from 0 to 11"),
        ([["1O"]], "no class '1O'.*did you mean"),
        ([[2]], "2 may be the class of that name or the label 2, which is '10'"),
    ],
)
def test_bad_task_lists(tasks, message):
    names = sorted(map(str, range(12)))
    with pytest.raises(ConfigError, match=message):
        divide_classes(names, 1, tasks=tasks)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_class_orders_have_seeds_that_numpy_takes(seed):
    with pytest.raises(ConfigError, match="from 0 to"):
        divide_classes(("a", "b"), 2, class_order_seed=seed)


def test_task_lists_do_not_mix_with_other_ways():
    with pytest.raises(ConfigError, match="leave out base_classes and class_order_seed"):
        divide_classes(("a", "b"), 2, tasks=[[0], [1]], base_classes=1)


def test_cumulative_task_holds_all_tasks_up_to_it():
    dataset = fake(240, 12, 60)
    stream = TaskStream(dataset, make_split(dataset), 3)
    joint = stream.cumulative(1)
    assert (joint.index, joint.classes) == (1, range(8))
    assert sorted(joint.train.indices) == sorted([*stream[0].train.indices, *stream[1].train.indices])


def test_a_single_class_per_task_is_questionable():
    assert fake_stream(num_tasks=2).warning is None
    assert "2 of 3 tasks have a single class" in fake_stream(num_tasks=3).warning
    dataset = replace(fake(120, 2), domains=("a", "b", "c"), domain_of=np.arange(120) % 3)
    split = make_split(dataset)
    assert "make tasks of the 3 domains with data.by=domain" in TaskStream(dataset, split, 2).warning
    assert TaskStream(dataset, split, 3, by="domain").warning is None


def test_split_of_other_data_and_empty_tasks_are_refused():
    dataset = fake(240, 12, 60)
    with pytest.raises(DataError, match="changed since this run began"):
        TaskStream(fake(252, 12, 60), make_split(dataset), 3)
    tiny = fake(6, 3)
    with pytest.raises(DataError, match="has no test samples"):
        TaskStream(tiny, make_split(tiny), 3)
