"""Presets by name: variants, rows that build on others, errors."""

import numpy as np
import pytest
import torch

from infssm.bench.experiment import resolve
from infssm.bench.presets import list_presets, load_preset, plan
from infssm.data import write_synthetic
from infssm.errors import ConfigError
from infssm.learner.config.load import load_config, to_dict
from infssm.learner.setup import build, check_config, load_stream
from infssm.methods import method_options
from infssm.models import find_weights
from infssm.models.pretrained import read_state_dict


def test_variants_settle_the_divergences_as_one_choice():
    paper, code = (load_preset("cifar100/5-task/inf-ssm", v).values for v in ("paper", "authors-code"))
    assert paper["method"]["states"]["include_dt_bias"] is True
    assert code["method"]["states"]["include_dt_bias"] is False
    assert paper["method"]["inf-ssm"]["equality"] == "token"
    assert code["method"]["inf-ssm"]["equality"] == "tensor"
    assert code["data"]["eval_normalization"] == "authors"
    assert paper["data"]["eval_normalization"] == "same"
    assert code["train"]["schedule"] == "authors"


@pytest.mark.parametrize("method", ["inf-ssm+", "lwf-abc", "er+lwf-abc", "mas+inf-ssm+"])
def test_the_paper_holds_the_zero_order_hold_of_b(method):
    """`B̃ = SN(mean over channels of B̄)` with B̄ the zero-order hold; the released code averages B itself."""
    for variant, mode in (("paper", "zoh"), ("authors-code", "raw")):
        config = load_config(load_preset(f"cifar100/5-task/{method}", variant).values)
        assert method_options(config.method.name, config.method.options)["states"].b_mode == mode
    assert "b_mode" not in load_preset("cifar100/5-task/inf-ssm-exact").values["method"]["states"]


def test_methods_that_train_on_labels_get_them():
    for method in ("er", "der", "lucir+ewc", "clfd"):  # with a row of their own and without
        preset = load_preset(f"cifar100/5-task/{method}")
        assert (preset.values["train"]["mixing"], preset.values["train"]["label_smoothing"]) == ("none", 0)
        assert "hard labels" in preset.assumed["train.mixing"]
        check_config(load_config(preset.values))
    assert load_preset("cifar100/5-task/ewc").values["train"]["mixing"] == "deit"


@pytest.mark.parametrize("setting", ["train.mixing=deit", "train.label_smoothing=0.1"])
@pytest.mark.parametrize("method", ["er", "der++", "x-der+inf-ssm", "l2p-r", "clfd"])
def test_soft_targets_are_refused_where_they_would_be_dropped(method, setting):
    with pytest.raises(ConfigError, match=r"trains on class labels.*set train.mixing=none train.label_smoothing=0"):
        check_config(load_config({"method": method}, [setting]))
    check_config(load_config({"method": "lwf-ac"}, [setting]))


def test_overlays_keep_out_of_methods_they_do_not_concern():
    assert "inf-ssm" not in load_preset("cifar100/5-task/ewc").values["method"]


def test_a_row_like_another_takes_its_settings_and_keeps_its_own_result():
    er, both = load_preset("imagenet-r/5-task/er"), load_preset("imagenet-r/5-task/er+inf-ssm")
    assert both.values["train"] == er.values["train"]
    assert both.values["method"]["buffer_size"] == er.values["method"]["buffer_size"]
    assert both.values["method"]["weight"] == 1.5e5
    assert (er.paper["method"], both.paper["method"]) == ("ER", "ER+Inf-SSM")


def test_a_row_is_found_by_any_spelling_of_its_method():
    assert load_preset("cifar100/5-task/inf-ssm+er").values == load_preset("cifar100/5-task/er+inf-ssm").values


def test_a_method_without_a_row_runs_with_its_defaults():
    preset = load_preset("cifar100/5-task/inf-ssm-exact")
    assert preset.paper is None
    assert "method" in preset.assumed
    assert preset.values["method"]["name"] == "inf-ssm-exact"


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("cifar10/5-task/seq", "paper", "unknown preset"),
        ("cifar100/5-task/inf-sm", "paper", "did you mean 'inf-ssm'"),
        ("cifar100/5-task/seq", "release", "unknown variant"),
    ],
)
def test_unknown_names_are_refused(name, variant, message):
    with pytest.raises(ConfigError, match=message):
        load_preset(name, variant)


def test_summaries_show_the_published_result():
    assert load_preset("imagenet-r/5-task/inf-ssm").summary == (
        "inf-ssm; paper, Table 11: AA 49.34 ± 3.36, AIA 67.51 ± 1.47, FM 25.14 ± 3.86"
    )
    assert load_preset("cub200/10-task/seq").summary == "seq; no published result"


@pytest.mark.parametrize(("name", "sizes"), [("b50-5", (50,) + 5 * (10,)), ("b50-10", (50,) + 10 * (5,))])
def test_base_classes_then_equal_tasks(tmp_path, name, sizes):
    write_synthetic("cifar100", tmp_path, per_class=3)
    preset = load_preset(f"cifar100/{name}/seq")
    assert preset.paper is None
    stream = load_stream(load_config(preset.values, [f"data.root={tmp_path}"]))
    assert stream.task_sizes == sizes
    assert stream.class_order.tolist() == np.random.RandomState(0).permutation(100).tolist()
    by_run = load_config(preset.values, [f"data.root={tmp_path}", "data.class_order_seed=run", "seed=7"])
    assert load_stream(by_run).class_order.tolist() == np.random.RandomState(7).permutation(100).tolist()


@pytest.mark.parametrize(
    ("name", "data", "sizes"),
    [
        ("cifar100/cold-5", "cifar100", 5 * (20,)),
        ("cifar100/cold-10", "cifar100", 10 * (10,)),
        ("tiny-imagenet/cold-10", "tiny-imagenet-200/train", 10 * (20,)),
    ],
)
def test_a_cold_start_has_equal_tasks_in_an_order_of_the_seed(tmp_path, name, data, sizes):
    write_synthetic(data, tmp_path, per_class=3, size=8)
    config = load_config(load_preset(f"{name}/lwf-f+gda").values, [f"data.root={tmp_path}", "seed=7"])
    stream = load_stream(config)
    assert stream.task_sizes == sizes
    assert stream.class_order.tolist() == np.random.RandomState(7).permutation(sum(sizes)).tolist()
    assert config.model.weights is None
    assert config.method.options["first_model"] is True


def test_the_main_job_is_a_benchmark_too():
    """`digits/5-task` is what `infssm run` does without arguments."""
    names = [name for name in list_presets() if name.startswith("digits/5-task/")]
    configs = [job.config for job in plan(None)]
    for name, config in zip(names, configs, strict=True):
        preset = to_dict(resolve(load_config(load_preset(name).values)))
        mine = to_dict(config)
        method = mine.pop("method")
        assert preset.pop("method").items() >= method.items()
        assert preset == mine | {"benchmark": "digits/5-task"}


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ("method=ewc", True),
        ("data.num_tasks=2", True),
        ("model.options.depth=2", False),
        ("model.weights=null", False),
        ("data=synthetic", False),
        ("data.image_size=16", False),
    ],
)
def test_the_main_job_starts_from_weights_that_fit(change: str, starts: bool) -> None:
    """With another model or other images it begins from scratch, at the learning rate for that."""
    for config in (job.config for job in plan(None, [change])):
        assert (config.model.weights == "omniglot") is starts
        assert config.train.lr == (1e-4 if starts else 1e-3)


@pytest.mark.parametrize("name", ["b50-5", "b50-10"])
def test_a_learned_base_of_the_package_stands_for_task_0(tmp_path, name):
    """The recommended method on a large first task: a prior over tasks, weights named as `model.weights` are."""
    write_synthetic("cifar100", tmp_path, per_class=3)
    changes = [f"data.root={tmp_path}", "train.task0=cifar100-base"]
    config = load_config(load_preset(f"cifar100/{name}/frozen+gda").values, changes)
    assert config.method.options["prior"] == "task"
    setup = build(config, torch.device("cpu"))
    stored = read_state_dict(find_weights("cifar100-base"))
    assert torch.equal(setup.method.module.state_dict()["head.weight"], stored["head.weight"].float())
