"""The rules that CONTRIBUTING states: what a leading underscore means, and which packages there are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import infssm

PACKAGE = Path(infssm.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def modules() -> dict[str, ast.Module]:
    """Every source of the package by dotted name; ``__init__`` keeps its name, since it stands in its folder."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files)
    return {name: ast.parse(f.read_text("utf-8")) for name, f in zip(names, files, strict=True)}


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
        "infssm.learner.loop": "from infssm.methods.heads._drift import Map",
        "infssm.learner.setup": "from infssm.methods.heads import _drift",
        "infssm.methods.heads.lda": "from infssm.methods.heads._drift import Map",
        "infssm.methods.heads.__init__": "import infssm.methods.heads._drift",
        "infssm.methods.bases.er": "from infssm.methods.bases.lucir._losses import imprinted",
    }
    assert trespasses({module: ast.parse(line) for module, line in lines.items()}) == {
        ("infssm.learner.loop", "infssm.methods.heads._drift"),
        ("infssm.learner.setup", "infssm.methods.heads._drift"),
        ("infssm.methods.bases.er", "infssm.methods.bases.lucir._losses"),
    }


def test_the_table_of_packages_has_them_all():
    table = [line for line in CONTRIBUTING.read_text("utf-8").splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)/`", line.split("|")[1])}
    assert named == {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
