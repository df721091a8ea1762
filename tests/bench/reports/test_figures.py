from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path

from infssm.cli.app import invoke
from tests.bench.reports.fake import fake_run

HOSTILE = "a$b^c/../<d>&"


def test_figures_of_a_comparison_as_png_svg_and_pdf(tmp_path: Path) -> None:
    for seed in (0, 10):
        fake_run(tmp_path / f"runs/seq{seed}", "seq", seed, shift=seed / 100)
        fake_run(tmp_path / f"runs/other{seed}", HOSTILE, seed)
    folder = tmp_path / "figures"
    assert invoke(["report", str(tmp_path / "runs"), "--figures", str(folder)]) == 0
    stems = {path.stem for path in folder.iterdir()}
    assert stems == {
        f"digits-3-tasks-vim_nano-{x}" for x in ("average", "forgetting", "matrix-seq", "matrix-a-b-c-..-d")
    }
    assert {path.suffix for path in folder.iterdir()} == {".png", ".svg", ".pdf"}
    assert len(list(folder.iterdir())) == 12
    png = (folder / "digits-3-tasks-vim_nano-average.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, _ = struct.unpack(">II", png[16:24])
    assert width == 1680  # 560 pixels are 5.6 inches at 300 dots
    assert all(path.read_bytes()[:5] == b"%PDF-" for path in folder.glob("*.pdf"))
    for path in folder.glob("*.svg"):
        ET.parse(path)


def test_figures_of_one_run_are_those_of_its_report(tmp_path: Path) -> None:
    fake_run(tmp_path / "run")
    assert invoke(["report", str(tmp_path / "run"), "--figures", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").glob("*.pdf")}
    assert {"confusion.pdf", "losses.pdf", "learning-rate.pdf", "matrix.pdf"} < names
