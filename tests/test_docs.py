"""The examples of README and docs run as they stand, page by page, and the generated tables are current."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# transformers imports torchvision, whose wheel may not fit the torch that is installed.
PREAMBLE = "from infssm.data import torchvision; torchvision.torchvision()"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _examples(page):
    return BLOCK.findall(page.read_text("utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if _examples(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, tmp_path):
    code = "\n".join([PREAMBLE, *_examples(page)])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_generated_tables_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_local_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
