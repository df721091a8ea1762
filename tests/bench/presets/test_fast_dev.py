"""Every preset's method trains two tasks of two steps on generated images in the real layout of its data set."""

import pytest

from infssm.bench.presets import fast_dev_config, list_presets, load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, to_dict


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fast-dev")


@pytest.mark.parametrize("name", list_presets())
def test_preset_runs(name, folder):
    config = fast_dev_config(load_config(load_preset(name).values), folder)
    result = run(config, quiet=True)  # presets that are alike in miniature are one run
    assert result.matrix.num_tasks == (1 if config.data.online else 2)  # without told boundaries it is one task
    assert result.matrix.quantity.allows(result.aa)
    assert result.weights.exists()


def test_the_miniature_keeps_what_the_preset_is_about(folder):
    full = load_config(load_preset("imagenet-r/10-task/inf-ssm-last-12", "authors-code").values)
    small = fast_dev_config(full, folder)
    assert small.method.name == full.method.name
    assert small.method.options == full.method.options | {"layers": 2}
    assert small.data.recipe == full.data.recipe
    kept = ("lr", "lr_scale", "schedule", "mixing", "label_smoothing", "weight_decay")
    mine, theirs = to_dict(small)["train"], to_dict(full)["train"]
    assert {k: mine[k] for k in kept} == {k: theirs[k] for k in kept}
    assert (small.data.num_tasks, small.train.limit_batches, small.train.epochs) == (2, 2, 1)


def test_other_data_sets_stay_what_they_are(tmp_path):
    config = load_config({"data": {"name": "digits", "num_tasks": 5}, "method": "er"})
    small = fast_dev_config(config, tmp_path)
    assert (small.data.name, small.data.root, small.data.num_tasks) == ("digits", None, 2)
    assert not list(tmp_path.iterdir())
