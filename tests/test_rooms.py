"""The rules of the house that CONTRIBUTING states: what an underscore means, and which rooms there are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import infssm

HOUSE = Path(infssm.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def modules() -> dict[str, ast.Module]:
    """Every source of the package by dotted name; ``__init__`` keeps its name, since it stands in its folder."""
    files = sorted(HOUSE.rglob("*.py"))
    return {".".join(f.relative_to(HOUSE.parent).with_suffix("").parts): ast.parse(f.read_text("utf-8")) for f in files}


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that may be modules, of this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("infssm."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "infssm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_folders(name: str) -> Iterator[tuple[str, str]]:
    """What on the way to a name has an underscore, each with the folder that it serves."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            yield ".".join(parts[: place + 1]), ".".join(parts[:place])


def trespasses(sources: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Pairs of a module and what it imports from a folder that keeps it to itself."""
    return {
        (module, private)
        for module, tree in sources.items()
        for name in imported(tree)
        for private, folder in private_folders(name)
        if not module.startswith(f"{folder}.")
    }


def test_what_has_an_underscore_is_used_in_its_folder_alone():
    assert not trespasses(modules())


def test_a_trespass_is_found():
    lines = {
        "infssm.train.loop": "from infssm.methods._build import attach",
        "infssm.train.setup": "from infssm.methods import _build",
        "infssm.methods.heads.lda": "from infssm.methods._build import attach",
        "infssm.methods.__init__": "import infssm.methods._build",
        "infssm.methods.er": "from infssm.methods.lucir._losses import imprinted",
    }
    assert trespasses({module: ast.parse(line) for module, line in lines.items()}) == {
        ("infssm.train.loop", "infssm.methods._build"),
        ("infssm.train.setup", "infssm.methods._build"),
        ("infssm.methods.er", "infssm.methods.lucir._losses"),
    }


def test_the_table_of_rooms_has_them_all():
    table = [line for line in CONTRIBUTING.read_text("utf-8").splitlines() if line.startswith("| `")]
    named = {room for line in table for room in re.findall(r"`(\w+)/`", line.split("|")[1])}
    assert named == {folder.parent.name for folder in HOUSE.glob("*/__init__.py")}
