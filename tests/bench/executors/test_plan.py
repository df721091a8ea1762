"""From lists of values to jobs: grids, shared task-0 models, threads."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from infssm.bench.executors import Job, make_plan, share_first_task
from infssm.bench.presets import plan
from infssm.bench.presets import run as run_preset
from infssm.bench.running import run_path
from infssm.errors import ConfigError
from infssm.learner.config.grid import expand_overrides, split_values
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


def names(jobs: list[Job]) -> list[tuple[str, str]]:
    return [(job.name, job.needs.name if job.needs else "") for job in jobs]


def test_task_0_is_trained_once_per_seed_and_setting_that_changes_it() -> None:
    jobs = plan(TINY, ["method=lwf-ac+lda,seq,er", "train.lr=1e-3,1e-4"], seeds=[0, 10])
    first = [f"lwf-ac+lda seed {seed} train.lr={lr}" for seed in (0, 10) for lr in (0.001, 0.0001)]
    assert names(jobs[:4]) == [(name, "") for name in first]
    others = [(f"{m} seed {s}", lr) for s in (0, 10) for m in ("seq", "er") for lr in (0.001, 0.0001)]
    assert names(jobs[4:]) == [
        (f"{name} train.lr={lr}", f"lwf-ac+lda {name.split(' ', 1)[1]} train.lr={lr}") for name, lr in others
    ]
    assert len({run_path(job.config) for job in jobs}) == 12


def test_later_settings_do_not_part_runs() -> None:
    changes = ["train.epochs=1,2", "train.task0_epochs=3", "train.lr_scale=0.5,1", "train.lr_scale_variant=once"]
    jobs = plan(TINY, ["method=seq", *changes])
    assert [job.needs for job in jobs] == [None, *[jobs[0]] * 3]
    for change in ("train.epochs=1,2", "train.batch_size=4,8", "model.options.d_state=4,8", "data.num_tasks=2,5"):
        assert [job.needs for job in plan(TINY, ["method=seq", change])] == [None, None]


def test_who_trains_task_0_itself() -> None:
    alone = plan(TINY, ["method=er,der,si,lucir,clfd,l2p-r,seq+ucl,cosine"])
    assert not any(job.needs for job in alone)  # replay trains task 0 in its own way, the others need their own
    jobs = plan(TINY, ["method=si,er,ewc,lucir,joint,frozen+gda"])
    assert names(jobs) == [
        ("ewc seed 0", ""),
        ("si seed 0", ""),
        ("er seed 0", "ewc seed 0"),
        ("lucir seed 0", ""),
        ("joint seed 0", "ewc seed 0"),
        ("frozen+gda seed 0", "ewc seed 0"),
    ]
    given = plan(TINY, ["method=seq,ewc", "train.task0=somewhere.safetensors"])
    assert not any(job.needs for job in given)


def test_the_main_job_shares_what_seq_trained() -> None:
    jobs = plan(None)
    assert jobs[0].config.method.name == "seq"
    assert len(jobs) > 1
    assert [job.needs for job in jobs] == [None, *[jobs[0]] * (len(jobs) - 1)]


def test_several_runs_have_one_thread_each_unless_told(tmp_path: Path) -> None:
    def threads(overrides: list[str], seeds: list[int]) -> set[int | None]:
        return {job.config.train.threads for job in plan({"method": "seq"}, overrides, seeds=seeds)}

    assert threads([], [0]) == {None}
    assert threads([], [0, 1]) == {1}
    assert threads(["train.threads=2"], [0, 1]) == {2}


def test_what_comes_out_the_same_is_run_once(tmp_path: Path) -> None:
    assert len(plan(TINY, ["method=seq", "train.lr=1e-3,0.001", "train.num_workers=0,2"], seeds=[0, 0])) == 1
    one, other = tiny_config(tmp_path / "a"), tiny_config(tmp_path / "b")
    assert len(make_plan([one, other])) == 2


def test_jobs_of_a_search_share_as_they_come(tmp_path: Path) -> None:
    providers: dict[str, Job] = {}
    jobs = [
        share_first_task(tiny_config(tmp_path, "lwf-ac", {"weight": w}, train={"lr": lr}), providers)
        for w, lr in ((1.0, 1e-3), (2.0, 1e-3), (3.0, 1e-2), (4.0, 1e-3))
    ]
    assert [job.needs for job in jobs] == [None, jobs[0], None, jobs[0]]


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
