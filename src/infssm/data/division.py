"""Which classes belong to which task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from infssm._registry import suggest
from infssm.errors import ConfigError


def divide_classes(
    classes: Sequence[str],
    num_tasks: int,
    *,
    base_classes: int | None = None,
    class_order_seed: int | None = None,
    tasks: Sequence[Sequence[int | str]] | None = None,
) -> list[list[int]]:
    """The labels of each task, in stream order.

    Classes are shared as equally as can be: where they do not divide evenly, the first tasks have one more.

    Args:
        classes: class names; the position is the label.
        num_tasks: number of tasks; with ``tasks`` their number counts.
        base_classes: classes of task 0; the other tasks share the rest.
        class_order_seed: None keeps the natural order of classes; a number permutes them (NumPy's seeded permutation).
        tasks: labels or names of each task's classes, instead of all of the above; classes not named are left out.
    """
    if tasks is not None:
        if base_classes is not None or class_order_seed is not None:
            raise ConfigError("data.tasks names the classes of every task: leave out base_classes and class_order_seed")
        return _named(classes, tasks)
    order = _class_order(len(classes), class_order_seed).tolist()
    sizes = _sizes(len(classes), num_tasks, base_classes)
    ends = np.cumsum(sizes).tolist()
    return [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _sizes(count: int, num_tasks: int, base: int | None) -> list[int]:
    first, rest, sharing = ([], count, num_tasks) if base is None else ([base], count - base, num_tasks - 1)
    if num_tasks < 1 or num_tasks > count:
        raise ConfigError(f"{count} classes cannot make {num_tasks} tasks: choose data.num_tasks from 1 to {count}")
    if base is not None and not (1 <= base <= count and sharing <= rest and (rest == 0) == (sharing == 0)):
        raise ConfigError(
            f"{base} of {count} classes in task 0 leave {rest} for {sharing} other tasks: change data.base_classes or "
            "data.num_tasks, which counts task 0 too"
        )
    return first + [rest // sharing + (task < rest % sharing) for task in range(sharing)]


def _class_order(count: int, seed: int | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``order[label]`` is the class that gets this stream label."""
    if seed is None:
        return np.arange(count)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"a class order's seed must be from 0 to 2**32 - 1, got {seed}")
    # The legacy generator, because its permutation for a seed is fixed for ever and is the one in common use.
    return np.random.RandomState(seed).permutation(count).astype(np.int64)


def _named(classes: Sequence[str], tasks: Sequence[Sequence[int | str]]) -> list[list[int]]:
    number = {name: label for label, name in enumerate(classes)}
    labels = [[_label(classes, number, wanted) for wanted in task] for task in tasks]
    counts = Counter(label for task in labels for label in task)
    if not labels or not all(labels):
        raise ConfigError("data.tasks: every task needs at least one class")
    if twice := [classes[label] for label in sorted(counts) if counts[label] > 1]:
        raise ConfigError(f"data.tasks: {', '.join(twice)} named twice; a class belongs to one task")
    return labels


def _label(classes: Sequence[str], number: Mapping[str, int], wanted: int | str) -> int:
    """The label that a number or a name in ``data.tasks`` means."""
    if isinstance(wanted, str):
        if wanted not in number:
            raise ConfigError(f"data.tasks: there is no class {wanted!r}{suggest(wanted, classes)}")
        return number[wanted]
    if not 0 <= wanted < len(classes):
        raise ConfigError(f"data.tasks: there is no class {wanted}; labels run from 0 to {len(classes) - 1}")
    if str(wanted) in number and classes[wanted] != str(wanted):
        raise ConfigError(
            f"data.tasks: {wanted} may be the class of that name or the label {wanted}, which is {classes[wanted]!r}: "
            "give names in quotes"
        )
    return wanted
