"""From lists of values to jobs: grids, shared task-0 models, what is decided before the hash."""

import sys
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from infssm.bench.experiment import make_plan, resolve
from infssm.bench.presets import plan
from infssm.bench.presets import run as run_preset
from infssm.errors import ConfigError
from infssm.learner.config.fields import TrainConfig
from infssm.learner.config.load import config_hash, expand_overrides, load_config, split_values
from tests.learner.tiny import TINY, tiny_config


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,1e-4", ["1e-3", "1e-4"]),
        ("[[0, 1], [5]]", ["[[0, 1], [5]]"]),
        ("[0,1],[2]", ["[0,1]", "[2]"]),
        ("seq,{name: lwf-ac, weight: 1}", ["seq", "{name: lwf-ac, weight: 1}"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("['a]', b],c", ["['a]', b]", "c"]),
        ("it's,that's", ["it's", "that's"]),
        ("x],y", ["x]", "y"]),
        ("[1,2", ["[1,2"]),
        ("", [""]),
    ],
)
def test_commas_outside_brackets_and_quotes_separate_values(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_a_grid_is_every_choice_the_last_list_fastest() -> None:
    chosen = expand_overrides(["method=seq, ewc", "seed=3", "train.lr=1,2"])
    assert chosen == [[m, "seed=3", lr] for m in ("method=seq", "method=ewc") for lr in ("train.lr=1", "train.lr=2")]
    assert expand_overrides([]) == [[]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["method=seq,"], "empty value"), (["a=" + ",".join("x" * 101), "b=" + ",".join("y" * 100)], "10,100 runs")],
)
def test_lists_that_make_no_grid(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_overrides(overrides)


def task0(overrides: list[str], **options: Any) -> list[int | None]:
    """For each experiment of a plan, which of the plan's task-0 models it starts from; None: it has its own."""
    found = [experiment.task0_weights for experiment in plan(TINY, overrides, **options)]
    models = list(dict.fromkeys(path for path in found if path is not None))
    return [None if path is None else models.index(path) for path in found]


def test_task_0_is_trained_once_per_seed_and_setting_that_changes_it() -> None:
    grid = ["method=lwf-ac+lda,seq,er", "train.lr=1e-3,1e-4"]
    assert task0(grid, seeds=[0, 10]) == [0, 1] * 3 + [2, 3] * 3
    jobs = plan(TINY, grid, seeds=[0, 10])
    assert len({job.path for job in jobs}) == 12
    assert jobs[2].name == "seq seed 0 train.lr=0.001"


def test_settings_of_later_tasks_do_not_change_task_0() -> None:
    changes = ["train.epochs=1,2", "train.task0_epochs=3", "train.lr_scale=0.5,1", "train.lr_scale_variant=once"]
    assert task0(["method=seq", *changes]) == [0] * 4
    assert task0(["method=seq", "data.evaluate=test,val"]) == [0, 0]
    for change in ("train.epochs=1,2", "train.batch_size=4,8", "model.options.d_state=4,8", "data.num_tasks=2,5"):
        assert task0(["method=seq", change]) == [0, 1]


def test_methods_that_train_task_0_themselves() -> None:
    assert task0(["method=si,lucir,clfd,l2p-r,seq+ucl"]) == [None] * 5
    assert task0(["method=er,der,ewc,joint,frozen+gda"]) == [0] * 5
    assert task0(["method=er,ewc", "model.classes=all,grow"]) == [0, 1, 0, 1]  # other outputs, another task-0 model
    assert task0(["method=seq,ewc", "train.task0=somewhere.safetensors"]) == [None] * 2
    assert task0(["method=er", "train.task0=own"]) == [None]
    assert task0(["method={name: seq, mask: full}"]) == [None]


def test_an_experiment_does_not_depend_on_its_company() -> None:
    """All that decides a result is in the configuration that is hashed."""
    [alone] = plan(TINY, ["method=er"])
    in_grid = plan(TINY, ["method=seq,er"], seeds=[1, 0])[-1]
    assert alone.config == in_grid.config == resolve(alone.config)
    assert alone.path == in_grid.path
    assert alone.task0 is not None
    assert in_grid.task0 is not None
    assert alone.task0.path == in_grid.task0.path


def test_machine_and_method_decide_what_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infssm.learner.devices.bfloat16_unit", lambda: None)
    open_ = {"precision": "bf16-mixed", "accelerator": "cpu"}
    small, large = (
        resolve(load_config({"model": model, "train": open_})).train for model in ("vim_nano", "vmamba_tiny")
    )
    assert (small.threads, small.precision, small.task0) == (1, "32-true", "plain")
    assert large.threads == torch.get_num_threads()
    assert resolve(load_config({"model": "vim_nano", "train": {"threads": 3}})).train.threads == 3


def test_a_new_setting_changes_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings equal to their defaults do not count, so that a new one needs no entry in a list anywhere."""
    before = config_hash(load_config(TINY))
    field = copy(TrainConfig.model_fields["task0_epochs"])
    monkeypatch.setitem(TrainConfig.model_fields, "brand_new", field)
    assert config_hash(load_config(TINY)) == before
    assert config_hash(load_config(TINY, ["train.task0_epochs=7"])) != before


def test_what_comes_out_the_same_is_run_once(tmp_path: Path) -> None:
    assert len(plan(TINY, ["method=seq", "train.lr=1e-3,0.001", "train.num_workers=0,2"], seeds=[0, 0])) == 1
    one, other = tiny_config(tmp_path / "a"), tiny_config(tmp_path / "b")
    assert len(make_plan([one, other])) == 2


def test_planning_is_linear_in_the_number_of_runs() -> None:
    """Calls are counted, built-in functions too: 4 times as many runs may take no more than about 4 times as many."""

    def calls(runs: int) -> int:
        counted = Counter()
        sys.setprofile(lambda _, event, __: counted.update([event]))
        try:
            make_plan(configs[:runs])
        finally:
            sys.setprofile(None)
        return counted["call"] + counted["c_call"]

    configs = [tiny_config(Path("runs"), seed=seed, train={"lr": 1e-3 + 1e-6 * seed}) for seed in range(80)]
    calls(2)  # what is cached once is not counted
    assert calls(80) < 5 * calls(20)


def test_run_carries_out_one_run() -> None:
    with pytest.raises(ConfigError, match="makes 2 runs"):
        run_preset(TINY, overrides=["method=seq,ewc"])
