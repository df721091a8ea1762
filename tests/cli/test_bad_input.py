"""What cannot be run is refused in one line before work starts, and nothing given is silently replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infssm
from infssm.bench.presets import plan
from infssm.cli.app import invoke, repeat_seeds
from infssm.learner import setup
from infssm.learner.config.load import load_config, merge
from tests.learner.tiny import TINY

LAUGHS = "[&a [x, x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"&{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("model.weights=/etc/passwd", 2, "/etc/passwd is not a checkpoint"),
        ("model.weights=no_such_weights", 2, "none named 'no_such_weights'"),
        ("model.options.embed_dim=1000000", 2, "TiB or more for its weights, and this machine has"),
        ("model.options.depth=-1", 2, "depth=-1 must be a size"),
        ("model.options.depth=0", 2, "depth=0 must be a size"),
        ("model.options.depth=two", 2, "cannot be built with"),
        ("model.options.no_such=1", 2, "unexpected keyword argument 'no_such'"),
        ("train.lr=inf", 2, "train.lr"),
        ("train.lr=.inf", 2, "train.lr: inf is not a finite number"),
        ("train.warmup_epochs=1e400", 2, "train.warmup_epochs: inf is not a finite number"),
        ("train.epochs=true", 2, "train.epochs"),
        (f"data={'a' * 5000}", 2, "longer than any path"),
        (f"data={'a/' * 5000}", 2, "longer than any path"),
        (f"data.root={'b' * 300}", 2, "longer than any path"),
        ("benchmark=../elsewhere", 2, "leads out of the folder"),
        ("model.options=&a [*a]", 2, "contains itself"),
        ("data.options=&a {b: *a}", 2, "contains itself"),
        (f"data.options={LAUGHS}]", 2, "more than 10,000 values"),
        ("method.weight=nan_", 2, "seq"),
    ],
    ids=lambda value: str(value)[:32],
)
def test_refused_before_work_starts(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    override: str,
    code: int,
    message: str,
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("data was loaded")

    monkeypatch.setattr(setup, "load_stream", work)
    monkeypatch.setenv("COLUMNS", "400")
    assert invoke(["run", "method=seq", "-q", "-o", str(tmp_path), override]) == code
    err = capfd.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "a" * 5000], "File name too long"),
        (["resume", "a" * 5000], "File name too long"),
        (["eval", "a" * 5000], "File name too long"),
        (["study", "drift", "--run", "a" * 5000], "File name too long"),
        (["study", "invariance", "systems=-1"], "systems=-1 is too small"),
        (["study", "invariance", "systems=x"], "systems='x': Input should be a valid integer"),
        (["study", "invariance", "system=3"], "has no option 'system'; did you mean 'systems'?"),
        (["bench", "--steps", "0"], "Invalid value"),
        (["bench", "--batch-size", "0"], "Invalid value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_commands_tell_in_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert invoke(arguments) == 2
    assert message in capfd.readouterr().err


def test_a_model_that_would_not_fit_is_not_built() -> None:
    """In a process of its own: what it asked for is seen in its peak memory."""
    code = (
        "import resource, infssm\n"
        "try: infssm.create_model('vim_nano', embed_dim=200000, depth=2)\n"
        "except infssm.ConfigError as error: print('refused', 'for its weights' in str(error))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    refused, gibibytes = done.stdout.splitlines()
    assert refused == "refused True"
    assert int(gibibytes) < 3


def test_building_within_memory_draws_the_same_weights() -> None:
    from infssm.models.registry import MODELS

    torch.manual_seed(3)
    one = infssm.create_model("vim_nano", depth=1, embed_dim=16)
    torch.manual_seed(3)
    other = MODELS["vim_nano"](depth=1, embed_dim=16)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_checking_a_config_leaves_the_generator_alone() -> None:
    config = load_config(TINY)
    state = torch.get_rng_state()
    setup._check_model.cache_clear()
    setup.check_config(config)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 4000, "~no_such_user/x", "x\0y/z"])
def test_names_no_system_can_hold(name: str) -> None:
    with pytest.raises((infssm.DataError, infssm.ConfigError)):
        infssm.load_dataset(name)
    with pytest.raises(infssm.CheckpointError):
        infssm.create_model("vim_nano", depth=1, embed_dim=8, weights=name)


def test_joint_training_cannot_be_attached() -> None:
    model = infssm.create_model("vim_nano", depth=1, embed_dim=8)
    with pytest.raises(infssm.ConfigError, match="data of all tasks at once"):
        infssm.attach(model, "joint")


def test_run_keeps_seed_and_out_of_mapping_and_overrides(tmp_path: Path) -> None:
    values = merge(TINY, {"method": "seq", "seed": 7, "out": str(tmp_path / "a"), "train": {"epochs": 1}})
    result = infssm.run(values)
    assert (result.config.seed, result.config.out) == (7, str(tmp_path / "a"))
    result = infssm.run(values, overrides=["seed=8", f"out={tmp_path / 'b'}"])
    assert (result.config.seed, result.config.out) == (8, str(tmp_path / "b"))
    result = infssm.run(values, overrides=["seed=8"], seed=9, out=tmp_path / "c")
    assert (result.config.seed, result.config.out) == (9, str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("run --seed 0 10 100 -q", "run --seed 0 --seed 10 --seed 100 -q"),
        ("run --seed 0 method=ewc 7", "run --seed 0 method=ewc 7"),
        ("run --seed 3 5 x=1 --seed 6 7", "run --seed 3 --seed 5 x=1 --seed 6 --seed 7"),
        ("run --seed x 10", "run --seed x 10"),
        ("run 1 2", "run 1 2"),
        ("--seed", "--seed"),
    ],
)
def test_only_numbers_right_after_a_seed_are_seeds(given: str, seen: str) -> None:
    assert repeat_seeds(given.split()) == seen.split()


def test_a_bare_number_is_no_seed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert invoke(["run", "--seed", "0", "method=seq", "7", "-o", str(tmp_path)]) == 2
    assert "overrides look like train.epochs=10" in capfd.readouterr().err


def test_seeds_of_the_plan() -> None:
    assert [job.config.seed for job in plan(TINY, ["method=seq", "seed=4"])] == [4]
    assert [job.config.seed for job in plan(TINY, ["method=seq", "seed=4"], seeds=[5, 6])] == [5, 6]
