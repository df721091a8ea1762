"""The examples of README and docs run as a user would run them, and the generated tables are current."""

import importlib.util
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import infssm
from infssm.bench.running import run
from infssm.cli.app import invoke
from tests.learner.tiny import tiny_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_THE_NETWORK = ("data fetch",)
PRELOADED = [__name__, "lightning_fabric", "sklearn.datasets"]
TAKES_MINUTES = ("bench", "study latency", "study distance-speed")


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def _commands(page: Path) -> list[str]:
    """The lines of the page's shell examples that call ``infssm``."""
    lines = "\n".join(_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("infssm ")]


COMMANDS = [(page, command) for page in PAGES for command in _commands(page)]


def _execute(script: Path, errors: Path) -> None:
    """Run a script in its folder, what it prints as an error written to a file."""
    os.chdir(script.parent)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_a_script(page, tmp_path):
    if page.name == "README.md":  # the only one that uses photos which it does not make
        make_photos(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("\n".join(_blocks(page, "python")), "utf-8")
    # A new process for each page, forked by one that has imported what takes seconds, but neither transformers nor
    # torchvision: a page must import these in the right order itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_execute, args=(script, tmp_path / "errors"))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "errors").read_text("utf-8")


def make_photos(folder: Path) -> None:
    """The photos that README and guides name."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for place in ("monday/cat", "monday/dog", "tuesday/bird", "tuesday/cat", "test/cat"):
        (folder / "photos" / place).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 200 if place.endswith("cat") else 90, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / place / f"{i}.png")
    Image.fromarray(rng.integers(0, 200, (32, 32, 3), np.uint8)).save(folder / "cat.jpg")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a finished run under ``runs``, an image and a folder of images; and the path of the run."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("workplace")
    for name in ("ant", "bee", "cat", "dog"):
        (folder / "path" / "to" / "folder" / name).mkdir(parents=True)
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "path" / "to" / "folder" / name / f"{i}.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "seven.png")
    make_photos(folder)
    infssm.Learner(weights="cifar100-base", folder=folder / "my-learner").learn(folder / "photos" / "monday")
    result = run(tiny_config(folder / "runs", "seq", benchmark="digits-5"), quiet=True)
    return folder, str(result.path.relative_to(folder))


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p.stem}: {c[7:]}"[:60] for p, c in COMMANDS])
def test_a_command_works(page, command, workplace, monkeypatch, capfd):
    """Runs are only planned (``--print-config``): the settings are read and checked, nothing is trained."""
    folder, finished = workplace
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    words = [finished if word.startswith("runs/") else word for word in shlex.split(command)[1:]]
    called = " ".join(words)
    if called.startswith(NEEDS_THE_NETWORK + TAKES_MINUTES):
        words = [*(words[:2] if words[0] == "data" else words[:1]), "--help"]
    if words[0] in ("run", "sweep"):
        words = [word for word in words if word != "--dry-run"] + ["--print-config"] * ("--print-config" not in words)
    code = invoke(words)
    said = capfd.readouterr()
    # Data that only its owner can hand out is named, not found.
    assert code == 0 or (called.startswith("data check") and code == 3 and "looked for" in said.err), said.err


def test_generated_tables_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_api_reference_has_every_public_name():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    named = set(re.findall(r"^::: infssm\.(\w+)$", generate.on_page_markdown("<!-- api -->"), re.MULTILINE))
    assert named == set(infssm.__all__)


def test_every_local_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_walk_names_what_is_there():
    walk = (ROOT / "docs" / "development" / "walk.md").read_text("utf-8")
    steps = re.findall(r"`([\w./]+\.(?:py|cpp|h))`(?: `([\w.]+)`)?", walk)
    assert len(steps) > 30
    for path, name in steps:
        text = (ROOT / "src" / "infssm" / path).read_text("utf-8")
        for part in filter(None, name.split(".")):
            assert re.search(rf"(def|class|void) {part}\b|^{part}(?::| =)|\b{part}\(", text, re.MULTILINE), (
                f"{path}: {name}"
            )
