"""Batches: what they hold, and that nothing but (seed, task, epoch, position) decides it."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infssm._processes import Share
from infssm.data import (
    ImageLoader,
    PerImageRecipe,
    TaskStream,
    load_dataset,
    make_mixing,
    make_recipe,
    make_split,
)
from infssm.data.images import FileImages
from infssm.data.loader import eval_slots, train_slots
from infssm.errors import ConfigError, DataError
from tests.compare import assert_rounding, identical

from .helpers import fake_stream
from .test_sets import save_image

# What Python and torch say of the machine: threads at a fork, more workers than cores.
MACHINE = (
    "ignore:This process .* is multi-threaded:DeprecationWarning",
    "ignore:This DataLoader will create:UserWarning",
)
quiet_workers = pytest.mark.filterwarnings(*MACHINE)


def same(a, b):
    assert len(a) == len(b)
    for one, two in zip(a, b, strict=True):
        for name in ("x", "y", "soft", "raw", "index"):
            left, right = getattr(one, name), getattr(two, name)
            assert (left is None) == (right is None)
            assert left is None or identical(left, right), name


def jitter_recipe(size=8):
    """An image recipe that draws from all three global generators."""

    def train(image):
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        return values + random.random() + np.random.rand() + torch.rand(1)  # noqa: NPY002

    def evaluate(image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()

    return PerImageRecipe(train, evaluate, size=size, raw_size=size)


@pytest.fixture
def file_stream(tmp_path):
    for name in "abcd":
        for number in range(8):
            save_image(tmp_path / name / f"{number}.png", value=ord(name) + number, size=(9 + number, 8))
    dataset = load_dataset(str(tmp_path))
    return TaskStream(dataset, make_split(dataset), 2)


def test_a_training_epoch_holds_every_picture_once_with_its_label():
    stream = fake_stream()
    task = stream[1]
    batches = list(ImageLoader(task, recipe="none", batch_size=16, seed=1))
    index = torch.cat([b.index for b in batches])
    assert sorted(index.tolist()) == sorted(task.train.indices.tolist())
    assert index.tolist() != task.train.indices.tolist()
    recipe = make_recipe("none", stream.dataset)
    for batch in batches:
        assert batch.y.tolist() == stream.dataset.labels[batch.index].tolist()
        assert_rounding(batch.x, recipe.eval(stream.dataset.images.pixels[batch.index]))
        assert batch.soft is None
        assert batch.raw is None
    x, y = batches[0]
    assert x is batches[0].x
    assert y is batches[0].y
    assert len(batches[0]) == 16


def test_evaluation_goes_in_order_without_augmentation():
    stream = fake_stream()
    recipe = make_recipe("light", stream.dataset)
    batches = list(ImageLoader(stream[0], "test", recipe=recipe, batch_size=7))
    index = torch.cat([b.index for b in batches])
    assert index.tolist() == stream[0].test.indices.tolist()
    assert_rounding(torch.cat([b.x for b in batches]), recipe.eval(stream.dataset.images.pixels[index]))


def test_epoch_seed_task_and_part_change_order_and_augmentation():
    stream = fake_stream()
    make = lambda task=0, **options: list(ImageLoader(stream[task], recipe="light", batch_size=16, **options))  # noqa: E731
    first = make(seed=0, epoch=0)
    same(first, make(seed=0, epoch=0))
    for options in ({"epoch": 1}, {"seed": 1}):
        other = make(**options)
        assert [b.index.tolist() for b in other] != [b.index.tolist() for b in first]
    unshuffled = [make(shuffle=False, epoch=e) for e in (0, 1)]
    assert identical(unshuffled[0][0].index, unshuffled[1][0].index)
    assert not identical(unshuffled[0][0].x, unshuffled[1][0].x)


def test_global_generators_neither_matter_nor_move(file_stream):
    for stream, recipe in (
        (fake_stream(), "light"),
        (fake_stream(), jitter_recipe()),
        (file_stream, make_recipe("light", file_stream.dataset, size=8)),
    ):
        torch.manual_seed(0)
        random.seed(0)
        first = list(ImageLoader(stream[0], recipe=recipe, batch_size=4))
        state = torch.get_rng_state(), random.getstate()
        torch.manual_seed(1)
        random.seed(1)
        moved = torch.get_rng_state(), random.getstate()
        same(first, list(ImageLoader(stream[0], recipe=recipe, batch_size=4)))
        assert identical(torch.get_rng_state(), moved[0])
        assert random.getstate() == moved[1]
        assert not identical(state[0], moved[0])


@quiet_workers
@pytest.mark.parametrize("batched", [True, False])
def test_workers_do_not_change_batches(file_stream, batched):
    recipe = (
        make_recipe("light", file_stream.dataset, size=8)
        if batched
        else make_recipe("deit", file_stream.dataset, size=16)
    )
    options = {
        "recipe": recipe,
        "batch_size": 6,
        "with_raw": True,
        "mixing": make_mixing(4, "deit", label_smoothing=0.1),
    }
    alone = list(ImageLoader(file_stream[0], **options))
    same(alone, list(ImageLoader(file_stream[0], num_workers=2, **options)))
    assert alone[0].raw.shape == (6, 3, recipe.raw_size, recipe.raw_size)
    assert alone[0].x.shape == (6, 3, recipe.size, recipe.size)


@pytest.mark.parametrize("skip", [1, 3, 99])
def test_going_on_inside_an_epoch(skip):
    stream = fake_stream()
    options = {"recipe": "light", "batch_size": 8, "mixing": make_mixing(4, "deit")}
    whole = ImageLoader(stream[0], **options)
    rest = ImageLoader(stream[0], skip_batches=skip, **options)
    assert len(rest) == max(0, len(whole) - skip)
    same(list(whole)[skip:], list(rest))


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_batches_of_one_process(mix, world):
    """Each image gets the same augmentation and, mixed, the same partner, weight and box as in a single process."""
    stream = fake_stream(200)
    options = {
        "recipe": "light",
        "mixing": make_mixing(4, "deit", label_smoothing=0.1) if mix else None,
        "with_raw": True,
    }
    alone = list(ImageLoader(stream[0], batch_size=4 * world, drop_last=True, **options))
    ranks = [
        list(ImageLoader(stream[0], batch_size=4, drop_last=True, share=Share(r, world), **options))
        for r in range(world)
    ]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert [len(part) for part in parts] == [4] * world
        where = {int(i): position for position, i in enumerate(whole.index)}
        seen = []
        for part in parts:
            rows = torch.tensor([where[int(i)] for i in part.index])
            seen += rows.tolist()
            assert identical(part.y, whole.y[rows])
            assert identical(part.raw, whole.raw[rows])
            assert_rounding(part.x, whole.x[rows])
            assert (part.soft is None) == (whole.soft is None) == (not mix)
            if whole.soft is not None:
                assert_rounding(part.soft, whole.soft[rows])
        assert sorted(seen) == list(range(len(whole)))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 90), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.booleans())
def test_dealing(count, batch_size, world, pairs, drop_last):
    batch_size += pairs and batch_size % 2
    options = {"pairs": pairs, "drop_last": drop_last}
    ranks = [train_slots(count, batch_size, Share(r, world), **options) for r in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = []
    for number, parts in enumerate(zip(*ranks, strict=True)):
        assert len({len(part) for part in parts}) == 1
        assert 0 < len(parts[0]) <= batch_size
        assert not (pairs and len(parts[0]) % 2)
        together = sorted(np.concatenate(parts).tolist())
        assert together == list(range(number * batch_size * world, number * batch_size * world + len(together)))
        dealt += together
        if pairs:
            for part in parts:
                assert len(set((part + part[::-1]).tolist())) == 1
    unit = world * (2 if pairs else 1)
    if drop_last and count >= batch_size * world:
        assert len(dealt) == count - count % (batch_size * world)
    else:
        assert len(dealt) == count - count % unit
    evaluated = [
        slot for r in range(world) for batch in eval_slots(count, batch_size, Share(r, world)) for slot in batch
    ]
    assert sorted(evaluated) == list(range(count))


def test_validation_is_augmented_where_the_recipe_says_so():
    stream = fake_stream()
    plain = make_recipe("light", stream.dataset)
    authors = make_recipe("light", stream.dataset, val_transform="train")
    pixels = stream.dataset.images.pixels[stream[0].val.indices]
    [quiet] = ImageLoader(stream[0], "val", recipe=plain, batch_size=64)
    [loud] = ImageLoader(stream[0], "val", recipe=authors, batch_size=64)
    assert_rounding(quiet.x, plain.eval(pixels))
    assert identical(loud.index, quiet.index)
    assert not identical(loud.x, quiet.x)
    [tested] = ImageLoader(stream[0], "test", recipe=authors, batch_size=64)
    assert_rounding(tested.x, plain.eval(stream.dataset.images.pixels[tested.index]))


def test_raw_pictures_are_those_before_augmentation():
    stream = fake_stream()
    for recipe in (make_recipe("light", stream.dataset), jitter_recipe()):
        for batch in ImageLoader(stream[0], recipe=recipe, batch_size=16, with_raw=True):
            assert identical(batch.raw, stream.dataset.images.pixels[batch.index])


def test_batches_move_to_a_device():
    stream = fake_stream()
    batch = next(iter(ImageLoader(stream[0], recipe="light", batch_size=8, mixing=make_mixing(4, "deit"))))
    moved = batch.to("meta")
    assert moved.x.is_meta
    assert moved.y.is_meta
    assert moved.soft.is_meta
    assert not moved.index.is_meta


@quiet_workers
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_picture_is_named_also_from_a_worker(tmp_path, workers):
    for name in "ab":
        for number in range(6):
            save_image(tmp_path / name / f"{number}.png")
    dataset = load_dataset(str(tmp_path))
    stream = TaskStream(dataset, make_split(dataset), 1)
    bad = dataset.images.paths[stream[0].train.indices[0]]
    (tmp_path / bad).write_bytes(b"junk")
    with pytest.raises(DataError, match=rf"^cannot read the image .*{bad}"):
        list(ImageLoader(stream[0], recipe=make_recipe("light", dataset, size=8), batch_size=4, num_workers=workers))


def test_bad_options():
    task = fake_stream()[0]
    with pytest.raises(ConfigError, match="unknown part 'dev'"):
        ImageLoader(task, "dev", recipe="light", batch_size=4)
    with pytest.raises(ConfigError, match="batch size must be even, got 5"):
        ImageLoader(task, recipe="light", batch_size=5, mixing=make_mixing(4, "deit"))
    with pytest.raises(ConfigError, match="shuffled training batches"):
        ImageLoader(task, "val", recipe="light", batch_size=4, mixing=make_mixing(4, "deit"))
    with pytest.raises(ConfigError, match="no process 2 among 2"):
        ImageLoader(task, recipe="light", batch_size=4, share=Share(2, 2))
    with pytest.raises(ConfigError, match="batches of 0"):
        ImageLoader(task, recipe="light", batch_size=0)


def test_the_only_batch_is_never_dropped():
    task = fake_stream()[0]
    assert len(ImageLoader(task, recipe="light", batch_size=1000, drop_last=True)) == 1


def test_files_are_read_once_per_picture(file_stream, monkeypatch, tmp_path):
    monkeypatch.setenv("INFSSM_CACHE", str(tmp_path / "cache"))
    reads = []
    original = FileImages.pil
    monkeypatch.setattr(FileImages, "pil", lambda self, index, size: reads.append(index) or original(self, index, size))
    recipe = make_recipe("light", file_stream.dataset, size=8)
    list(ImageLoader(file_stream[0], recipe=recipe, batch_size=4, with_raw=True))
    assert sorted(reads) == sorted(file_stream[0].train.indices.tolist())
