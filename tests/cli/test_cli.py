"""The command line: output, messages, exit codes."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from infssm._catalogue import read_methods
from infssm.cli.app import invoke
from infssm.learner.config.load import load_config, to_dict, to_yaml
from infssm.learner.loop import Loop
from infssm.methods import explain_method, list_methods
from tests.compare import identical
from tests.learner.tiny import TINY, tiny_config

BASELINES = ("frozen", "joint", "linear", "seq")
FAST = [
    "data.num_tasks=2", "data.train_per_class=8", "data.test_per_class=4", "train.batch_size=8",
    "model.options.embed_dim=16", "model.options.depth=1", "model.options.d_state=4", "model.options.patch_size=4",
]  # fmt: skip


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, " ".join(err.split())


@pytest.fixture
def infssm(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        code = invoke([str(a) for a in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def tiny_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "method": "seq"}))
    return path


def test_warnings_of_a_method_are_shown_before_it_trains(infssm: Any, tmp_path: Path) -> None:
    err = infssm("run", *FAST, "method=inf-ssm", "--fast-dev-run", "-o", tmp_path).err
    first = err.index("task 1 done")
    assert 0 <= err.index("warning: inf-ssm is the paper's method") < err.index("weight 1e+06 will destroy") < first


@pytest.mark.filterwarnings("ignore:weight='auto' held nothing")  # two steps are too short to find a weight in
def test_main_job_ends_with_table_sentence_and_report(infssm: Any, tmp_path: Path) -> None:
    done = infssm("run", "--fast-dev-run", "-o", tmp_path, "-q", *FAST)
    assert done.code == 0
    methods = ("seq", "er", "inf-ssm-exact", "inf-ssm-exact+gda", "frozen+gda")
    for method in methods:
        assert f"\n {method} " in done.out
    for heading in ("AA", "AIA", "FM", "task-inc. AA"):
        assert heading in done.out
    assert "plain sequential training" in done.out
    assert f"report: {tmp_path / 'digits-2' / 'comparison.html'}" in done.out
    assert len(list(tmp_path.rglob("result.json"))) == len(methods)
    starts = {p.parts[-5]: load_file(p) for p in tmp_path.rglob("task_00.safetensors")}
    for method in methods:  # one task-0 model, whichever classifier stands on it
        assert all(identical(starts[method][k], v) for k, v in starts["seq"].items() if not k.startswith("head."))
    again = infssm("report", tmp_path)
    assert again.code == 0
    assert "inf-ssm-exact+gda" in again.out


def test_run_resume_eval_report(infssm: Any, tmp_path: Path, tiny_yaml: Path) -> None:
    done = infssm("run", "-c", tiny_yaml, "--seed", "0", "10", "-o", tmp_path, "method=lwf-ac", "-q")
    assert done.code == 0
    runs = sorted(tmp_path.glob("*/lwf-ac/**/config.yaml"))
    assert [load_config(p).seed for p in runs] == [0, 10]
    assert "±" in done.out
    run = runs[0].parent
    assert infssm("resume", run, "-q").code == 0
    tested = json.loads(infssm("eval", run, "--json").out)
    assert len(tested) == 2
    assert "inside the task" in infssm("eval", run, "--task", 0).out
    for form, part in (("md", "| method |"), ("csv", "aa_mean"), ("tex", r"\toprule"), ("json", '"verdict"')):
        assert part in infssm("report", tmp_path, "-f", form).out
    page = tmp_path / "c.html"
    assert f"wrote {page}" in infssm("report", tmp_path, "-o", page).out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(infssm("report", tmp_path, "--json").out)["rows"][0]["seeds"] == [0, 10]


def test_print_config_runs_nothing_and_reads_back(infssm: Any, tmp_path: Path) -> None:
    done = infssm("run", "--print-config", "-o", tmp_path / "x", "method=ewc", "method.weight=2e4", "train.epochs=3")
    config = load_config(yaml.safe_load(done.out))
    assert (config.method.name, config.method.options, config.train.epochs) == ("ewc", {"weight": 2e4}, 3)
    assert to_yaml(config) == done.out.rstrip("\n") + "\n"
    assert not (tmp_path / "x").exists()


def test_dry_run_builds_and_stops(infssm: Any, tmp_path: Path) -> None:
    done = infssm("run", "--dry-run", "-o", tmp_path / "x", *FAST)
    assert done.code == 0
    assert done.out.count("2 tasks of 5 classes") == 5  # the main job
    assert not (tmp_path / "x").exists()


def test_preset_with_variant(infssm: Any) -> None:
    paper = yaml.safe_load(infssm("run", "-p", "cifar100/5-task/inf-ssm", "--print-config").out)
    code = yaml.safe_load(
        infssm("run", "-p", "cifar100/5-task/inf-ssm", "--variant", "authors-code", "--print-config").out
    )
    assert paper["data"]["name"] == "cifar100"
    assert (paper["train"]["schedule"], code["train"]["schedule"]) == ("plain", "authors")


@pytest.mark.parametrize("what", ["methods", "models", "datasets", "distances", "presets"])
def test_lists(infssm: Any, what: str) -> None:
    plain, as_json = infssm("list", what), infssm("list", what, "--json")
    names = [entry["name"] for entry in json.loads(as_json.out)]
    assert [line.split()[0] for line in plain.out.splitlines()] == names
    assert all(entry["summary"] for entry in json.loads(as_json.out))
    assert {"methods": "inf-ssm-exact", "models": "vim_nano", "datasets": "digits"}.get(what, names[0]) in names


@pytest.mark.parametrize("name", list_methods())
def test_a_method_is_explained(infssm: Any, name: str) -> None:
    shown = infssm("list", "methods", name).out
    text = explain_method(name)
    assert text.summary in shown
    assert text.summary.endswith(".")
    assert "``" not in text.summary  # words first, formulas after
    assert bool(text.paper) == (name not in BASELINES)
    for option, default, meaning in text.options:
        assert meaning, f"{name}.{option} has no description"
        assert f"{meaning} (default {default})" in shown
    (entry,) = json.loads(infssm("list", "methods", name, "--json").out)
    assert entry["role"] in ("base", "regularizer", "head")
    assert [option["name"] for option in entry["options"]] == [option for option, _, _ in text.options]


def test_a_list_fits_the_terminal(infssm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = infssm("list", "distances").out.splitlines()
    assert max(map(len, piped)) > 60
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("infssm.cli.listing.sys.stdout.isatty", lambda: True, raising=False)
    shown = infssm("list", "distances").out.splitlines()
    assert max(map(len, shown)) <= 60
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(piped).split())


def test_methods_are_listed_without_torch() -> None:
    read = read_methods()
    assert read is not None
    for name, text in zip(list_methods(), map(explain_method, list_methods()), strict=True):
        assert read.pop(name) == (text.summary, text.details, text.paper)
    assert read == {}
    code = (
        "import sys; from infssm.cli.app import invoke; assert invoke(['list', 'methods']) == 0\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_one_of_a_list(infssm: Any) -> None:
    assert infssm("list", "distances", "martin").out.startswith("martin  ")
    unknown = infssm("list", "methods", "ewk")
    assert unknown.code == 2
    assert "no 'ewk' among methods; did you mean 'ewc'?" in unknown.err


def test_schema_knows_every_setting(infssm: Any) -> None:
    schema = json.loads(infssm("schema").out)

    def check(values: dict[str, Any], node: dict[str, Any]) -> None:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        node = node["anyOf"][1] if {"type": "string"} in node.get("anyOf", [])[:1] else node
        for key, value in values.items():
            field = node["properties"][key]
            if isinstance(value, dict) and value and key != "options":
                check(value, field)
            else:
                assert field["description"], key

    check(to_dict(load_config()), schema)
    sections = schema["$defs"]
    assert {"type": "string"} in sections["MethodConfig"]["anyOf"]
    assert "ewc" in sections["MethodConfig"]["anyOf"][1]["properties"]["name"]["examples"]


def test_completion(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_INFSSM_COMPLETE", "complete_bash")
    for words, offered in (("infssm sch", ["schema"]), ("infssm list met", ["methods"])):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert invoke([]) == 0
        assert capfd.readouterr().out.split() == offered


def test_doctor(infssm: Any) -> None:
    done = infssm("doctor")
    for part in ("python", "torch", "threads", "kernels", "kernels on a GPU", "data root", "timm"):
        assert part in done.out
    found = json.loads(infssm("doctor", "--json").out)
    assert found["threads"] >= 1
    assert "kernels" in found


def test_doctor_imports_what_it_reports_on(infssm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from infssm import integrations
    from infssm.cli import machine

    def broken(name: str) -> None:
        if name == "sklearn":
            raise RuntimeError("undefined symbol: zzz")

    monkeypatch.setattr(machine, "importlib", SimpleNamespace(import_module=broken))
    found = json.loads(infssm("doctor", "--json").out)["optional packages"]
    assert (
        "cannot be imported (undefined symbol: zzz): pip install --force-reinstall scikit-learn"
        in (found["scikit-learn"])
    )
    monkeypatch.setattr(integrations, "mend_torchvision", lambda: True)
    found = json.loads(infssm("doctor", "--json").out)["optional packages"]
    assert "made for another torch" in found["torchvision"]


def test_bench(infssm: Any) -> None:
    done = infssm("bench", "seq", "lwf-ac", "--image-size", 32, "--batch-size", 2, "--steps", 1, "--json")
    assert [t["method"] for t in json.loads(done.out)] == ["seq", "lwf-ac"]
    assert all(t["milliseconds"] > 0 for t in json.loads(done.out))


def test_help_teaches(infssm: Any) -> None:
    for command in ("run", "resume", "eval", "report", "list", "doctor", "bench"):
        done = infssm(command, "--help")
        assert done.code == 0
        assert "Usage: infssm" in done.out
    assert "--seed 0 10 100" in infssm("run", "--help").out
    assert infssm("--version").out.strip()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "method=inf-sm"], 2, "unknown method 'inf-sm'; did you mean 'inf-ssm'?"),
        (["run", "method=ewc", "method.wieght=3"], 2, "has no option 'wieght'; did you mean 'weight'?"),
        (
            ["run", "-p", "cifar10/5-task/ewc"],
            2,
            "unknown preset 'cifar10/5-task/ewc'; did you mean 'cifar100/5-task/ewc'?",
        ),
        (["run", "model=vim_nanoo"], 2, "unknown model 'vim_nanoo'; did you mean 'vim_nano'?"),
        (["run", "data=digitz", "method=seq"], 2, "unknown data set 'digitz'; did you mean 'digits'?"),
        (["run", "train.epoch=3"], 2, "unknown setting train.epoch; did you mean 'epochs'?"),
        (["run", "data.num_tasks=11", "method=seq"], 2, "choose data.num_tasks from 1 to 10"),
        (["run", "-p", "a", "-c", "b"], 2, "not both"),
        (["run", "-c", "none.yaml"], 2, "cannot read the config none.yaml"),
        (["run", "7"], 2, "overrides look like train.epochs=10"),
        (["list", "method"], 2, "did you mean 'methods'?"),
        (["report", "nowhere"], 2, "there is no nowhere"),
        (["resume", "nowhere"], 2, "is not a run directory"),
        (["frobnicate"], 2, "No such command"),
        (["run", "--frob"], 2, "No such option"),
        (["data", "check", "no/such/folder"], 3, "no data at no/such/folder"),
    ],
)
def test_bad_usage(infssm: Any, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    out = ["-o", str(tmp_path)] if arguments[0] == "run" else []
    done = infssm(*arguments, *out)
    assert message in done.err
    assert done.code == code


def test_missing_data(infssm: Any, tmp_path: Path) -> None:
    done = infssm("run", "data=cifar100", "method=seq", "--data-root", tmp_path / "data", "-o", tmp_path, "-q")
    assert done.code == 3
    assert "looked for" in done.err
    assert "infssm data fetch cifar100" in done.err


def test_unreadable_images(infssm: Any, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(12):
            pixels = np.full((8, 8, 3), 20 * i, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{i}.png")
    (tmp_path / "pets" / "dog" / "5.png").write_bytes(b"not an image")
    checked = infssm("data", "check", tmp_path / "pets")
    assert checked.code == 3
    assert "5.png" in checked.err
    settings = [
        f"data={tmp_path / 'pets'}",
        "method=seq",
        "data.image_size=8",
        "train.batch_size=4",
        "data.num_tasks=2",
    ]
    done = infssm("run", *settings, *FAST[4:], "-o", tmp_path / "runs", "-q")
    assert done.code == 3
    assert "1 of 24 files cannot be read" in done.err
    assert "5.png" in done.err


def test_divergence(infssm: Any, tmp_path: Path, tiny_yaml: Path) -> None:
    done = infssm("run", "-c", tiny_yaml, "-o", tmp_path, "train.lr=1e30", "train.warmup_epochs=0", "-q")
    assert done.code == 4
    assert "training diverged at task 0, epoch 0, step" in done.err
    assert "layer" in done.err


def test_resume_with_another_config(infssm: Any, tmp_path: Path, tiny_yaml: Path) -> None:
    infssm("run", "-c", tiny_yaml, "-o", tmp_path, "-q")
    run = next(tmp_path.rglob("config.yaml")).parent
    done = infssm("resume", run, "train.lr=0.5")
    assert done.code == 2
    assert "cannot be resumed with another configuration" in done.err


def test_output_that_cannot_be_written(infssm: Any, tmp_path: Path, tiny_yaml: Path) -> None:
    (tmp_path / "file").write_text("")
    done = infssm("run", "-c", tiny_yaml, "-o", tmp_path / "file", "-q")
    assert done.code == 2
    assert "choose another folder with --out" in done.err


def test_read_only_output(infssm: Any, tmp_path: Path, tiny_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any user but root would meet it."""

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = infssm("run", "-c", tiny_yaml, "-o", tmp_path / "ro", "-q")
    assert done.code == 2
    assert "Permission denied; choose another folder with --out" in done.err


def test_full_disk(infssm: Any, tmp_path: Path, tiny_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    save = Loop.save
    saves = []

    def second_fails(self: Loop, optimizer: Any) -> None:
        saves.append(1)
        with pytest.MonkeyPatch.context() as patch:
            if len(saves) == 2:
                patch.setattr(os, "fsync", full)
                self.log = _NoSync(self.log)  # type: ignore[assignment]
            save(self, optimizer)

    monkeypatch.setattr(Loop, "save", second_fails)
    done = infssm("run", "-c", tiny_yaml, "-o", tmp_path, "-q")
    assert done.code == 2
    assert "No space left on device; the last good one is" in done.err
    monkeypatch.undo()
    assert infssm("resume", next(tmp_path.rglob("config.yaml")).parent, "-q").code == 0


class _NoSync:
    """A log whose own sync still works, so that the checkpoint is the first to fail."""

    def __init__(self, log: Any) -> None:
        self._log = log

    @property
    def position(self) -> int:
        self._log._file.flush()
        return int(self._log._file.tell())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def test_ctrl_c_saves_and_exits_130(tmp_path: Path, tiny_yaml: Path) -> None:
    command = shutil.which("infssm", path=str(Path(sys.executable).parent))
    assert command is not None
    log = tmp_path / "log"
    arguments = ["run", "-c", tiny_yaml, "-o", tmp_path, "train.epochs=4000", "train.limit_batches=5"]
    with open(log, "w") as file:
        process = subprocess.Popen([command, *arguments], stderr=file, stdout=file)
        while process.poll() is None and not list(tmp_path.rglob("last.ckpt")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert "interrupted and saved; continue with: infssm resume" in log.read_text()


def test_missing_command_line_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from infssm.cli import main

    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "typer":
            raise ImportError("no typer", name="typer")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as leaving:
        main(["list", "methods"])
    assert leaving.value.code == 2
    assert "needs typer: pip install 'infssm[bench]'" in capsys.readouterr().err


def test_config_of_the_tiny_run_is_the_yaml(tmp_path: Path, tiny_yaml: Path) -> None:
    assert load_config(tiny_yaml, [f"out={tmp_path}"]) == tiny_config(tmp_path)
