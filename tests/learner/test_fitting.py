"""Data without a model get one that fits them: size of the images, number of classes, the machine."""

import numpy as np
import pytest
import torch
from PIL import Image

import infssm
from infssm.bench.presets import plan
from infssm.learner.config import resolve
from infssm.learner.config.load import load_config
from infssm.learner.config.resolve import fitted
from infssm.learner.setup import build


def make_folder(root, *, classes=6, per_class=6, size=(90, 70)):
    rng = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"class{label}" / f"{number}.png")
    return root


def planned(*arguments):
    return [job.config for job in plan(*arguments)]


def tokens(model):
    return int(model.num_patches)


@pytest.mark.parametrize(
    ("size", "pixels", "patches"),
    [((8, 8), 8, 16), ((15, 40), 14, 49), ((33, 29), 28, 49), ((48, 48), 48, 144), ((90, 70), 64, 64)],
)
def test_model_and_image_size_follow_the_images(tmp_path, size, pixels, patches):
    folder = make_folder(tmp_path / "mine", size=size)
    [config] = planned(None, [f"data={folder}", "method=seq"])
    assert config.data.image_size == pixels
    setup = build(config, torch.device("cpu"))
    assert tokens(setup.method.module) == patches
    batch = next(iter(setup.train_loader(setup.stream[0], 0)))
    assert batch.x.shape[-2:] == (pixels, pixels)


def test_a_gpu_gets_a_larger_model_where_images_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve.torch.cuda, "is_available", lambda: True)
    chosen = fitted({"data": str(make_folder(tmp_path / "large", size=(130, 120), per_class=2))})
    assert (chosen["data"]["image_size"], chosen["model"]["name"]) == (224, "vim_tiny_patch16_224")
    chosen = fitted({"data": str(make_folder(tmp_path / "small", size=(32, 32), per_class=2))})
    assert chosen["model"]["name"] == "vim_nano"


@pytest.mark.parametrize(("classes", "tasks"), [(1, 1), (2, 2), (3, 2), (5, 2), (7, 3), (10, 5), (30, 5)])
def test_tasks_follow_the_classes(tmp_path, classes, tasks):
    folder = make_folder(tmp_path / "mine", classes=classes, per_class=1, size=(4, 4))
    assert fitted({"data": {"name": str(folder)}})["data"]["num_tasks"] == tasks


@pytest.mark.parametrize(("per_class", "batch_size"), [(2, 4), (20, 4), (40, 8), (200, 32), (5000, 32)])
def test_small_tasks_get_small_batches(per_class, batch_size):
    """Ten classes in five tasks; a whole batch of 32 would be most of a task of 60 images."""
    data = {"name": "synthetic", "options": {"classes": 10, "per_class": per_class, "size": 4}}
    assert fitted({"data": data})["train"]["batch_size"] == batch_size


def test_what_was_given_stays(tmp_path):
    folder = make_folder(tmp_path / "mine", per_class=2)
    [config] = planned(None, [f"data={folder}", "method=seq", "data.image_size=16", "data.num_tasks=2"])
    assert (config.data.image_size, config.data.num_tasks) == (16, 2)
    [config] = planned(None, [f"data={folder}", "method=seq", "model=s4d_nano"])
    assert (config.model.name, config.data.image_size, config.data.num_tasks) == ("s4d_nano", None, 3)
    [chosen], [named] = (planned(None, [f"data={folder}", "method=seq", *model]) for model in ([], ["model=vim_nano"]))
    assert named == chosen
    [config] = planned(None, [f"data={folder}", "method=seq", "data.tasks=[[0, 1], [5]]"])
    assert config.data.num_tasks == 2
    assert fitted({}) == fitted({"data": "digits"}) == fitted({"data": {"num_tasks": 2}}) == {}


def test_a_file_without_a_model_gets_one_too(tmp_path):
    folder = make_folder(tmp_path / "mine", per_class=2)
    (tmp_path / "run.yaml").write_text(f"data: {{name: {folder}}}\nmethod: seq\ntrain: {{epochs: 1}}\n")
    [config] = planned(tmp_path / "run.yaml")
    assert (config.data.image_size, config.model.options["patch_size"], config.train.epochs) == (64, 8, 1)


def test_the_library_call_fits_too(tmp_path):
    folder = make_folder(tmp_path / "mine", classes=2, per_class=8)
    settings = {"data": {"name": str(folder), "num_tasks": 1}, "method": "seq"}
    changes = ["train.limit_batches=1", "train.epochs=1", "train.batch_size=4"]
    result = infssm.run(settings, out=tmp_path / "runs", overrides=changes)
    assert (result.config.data.image_size, result.config.model.options["patch_size"]) == (64, 8)


def test_epochs_alone_hold_for_task_0_too():
    [config] = planned(None, ["method=seq"])
    assert (config.train.epochs, config.train.task0_epochs) == (6, 12)
    [config] = planned(None, ["method=seq", "train.epochs=3"])
    assert (config.train.epochs, config.train.task0_epochs) == (3, None)
    [config] = planned(None, ["method=seq", "train.epochs=3", "train.task0_epochs=7"])
    assert (config.train.epochs, config.train.task0_epochs) == (3, 7)
    [config] = planned(None, ["method=seq", "train.lr=0.1"])
    assert config.train.task0_epochs == 12
    setup = build(load_config({"data": {"num_tasks": 2}}, ["train.epochs=3"]), torch.device("cpu"))
    assert [setup.epochs(task) for task in (0, 1)] == [3, 3]
