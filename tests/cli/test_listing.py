"""How lists name the papers of methods, and what they do about plugins that are broken."""

from types import SimpleNamespace

import pytest

from infssm import _catalogue, _registry
from infssm.cli.app import _format_warning, invoke
from infssm.cli.listing import _citation
from infssm.methods.core import build
from infssm.methods.core.build import list_methods


@pytest.mark.parametrize(
    ("paper", "short"),
    [
        ("Fisher, The Use of Multiple Measurements, 1936; later Hayes and Kanan, 2020", "Fisher 1936"),
        ("after Li and Hoiem, Learning without Forgetting, ECCV 2016", "Li and Hoiem 2016"),
        ("Lee, Mahmoodi, Le and Harandi, Exemplar-Free Continual Learning, 2025", "Lee et al. 2025"),
        ("Hou et al., Learning a Unified Classifier, CVPR 2019", "Hou et al. 2019"),
        ("", ""),
    ],
)
def test_papers_are_cited_by_as_many_authors_as_they_have(paper: str, short: str) -> None:
    assert _citation(paper) == short


@pytest.mark.parametrize("arguments", [["list", "methods"], ["run", "--print-config", "method=broken"]])
def test_a_plugin_that_cannot_be_imported_is_named_and_left_out(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ImportError("no module\nnamed yesterday")

    names = list_methods()
    point = SimpleNamespace(name="broken", value="broken.module:Method", load=load)
    for module in (_registry, _catalogue):
        monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == "infssm.methods" else [])
    monkeypatch.setattr(build.components, "_group", "infssm.methods")
    with pytest.warns(UserWarning, match=r"'broken' .* is left out: ImportError: no module named") as told:
        code = invoke(arguments)
    assert len(_format_warning(told[0].message, told[0].category).splitlines()) == len(told) == 1
    out, err = capfd.readouterr()
    if arguments[0] == "list":
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == names
    else:
        assert code == 2
        assert "unknown method 'broken'" in err
