"""The notebooks run from top to bottom in an empty folder, and show what they say."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "docs" / "notebooks"


@pytest.fixture
def outputs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the cells of a notebook printed; images by their kind."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    book = nbformat.read(NOTEBOOKS / request.param, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "notebooks are stored without outputs"
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "\n".join(o.get("text", "") + " ".join(o.get("data", ())) for o in shown)


@pytest.mark.parametrize("outputs", ["digits.ipynb"], indirect=True)
def test_digits_end_with_pictures_and_a_better_method(outputs: str) -> None:
    plain, better = (
        float(re.search(rf"^{re.escape(name)} +AA +([\d.]+)", outputs, re.MULTILINE)[1])
        for name in ("seq", "frozen+gda")
    )
    assert better > plain + 10
    assert outputs.count("image/png") == 2


@pytest.mark.parametrize("outputs", ["learner.ipynb"], indirect=True)
def test_a_learner_forgets_nothing_and_knows_what_it_does_not_know(outputs: str) -> None:
    right = [float(found) for found in re.findall(r"after \w+: \d classes, ([\d.]+) % right", outputs)]
    assert len(right) == 3
    assert min(right) > 95
    known = {int(digit): int(share) for digit, share in re.findall(r"digit (\d): (\d+) %", outputs)}
    assert min(known[3], known[7]) > 80
    assert max(known[8], known[9]) < min(known[3], known[7]) - 20
    assert "image/png" in outputs
    assert "('0', '1', '2', '3', '4', '5', '6') True" in outputs


@pytest.mark.parametrize("outputs", ["mamba.ipynb"], indirect=True)
def test_mamba_forgets_less_with_the_penalty(outputs: str) -> None:
    plain, held = (float(found) for found in re.findall(r"after python .*?'english': ([\d.]+)", outputs))
    first = [float(found) for found in re.findall(r"after english .*?'english': ([\d.]+)", outputs)]
    assert first[0] == pytest.approx(first[1], abs=0.05)  # the first task is plain training for both
    assert held < plain
