"""Task streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infssm.data import TaskStream, make_split
from infssm.errors import ConfigError, DataError

from .helpers import fake


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


@pytest.mark.parametrize("num_tasks", [5, 0, 24])
def test_uneven_task_count_names_the_choices(num_tasks):
    dataset = fake(240, 12, 60)
    with pytest.raises(ConfigError, match=r"choose the number of tasks from 1, 2, 3, 4, 6, 12$"):
        TaskStream(dataset, make_split(dataset), num_tasks)


def test_cumulative_task_holds_all_tasks_up_to_it():
    dataset = fake(240, 12, 60)
    stream = TaskStream(dataset, make_split(dataset), 3)
    joint = stream.cumulative(1)
    assert (joint.index, joint.classes) == (1, range(8))
    assert sorted(joint.train.indices) == sorted([*stream[0].train.indices, *stream[1].train.indices])


def test_split_of_other_data_and_empty_tasks_are_refused():
    dataset = fake(240, 12, 60)
    with pytest.raises(DataError, match="not those the split was made for"):
        TaskStream(fake(252, 12, 60), make_split(dataset), 3)
    tiny = fake(6, 3)
    with pytest.raises(DataError, match="has no test images"):
        TaskStream(tiny, make_split(tiny), 3)
