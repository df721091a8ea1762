"""How lists name the papers of methods."""

import pytest

from infssm.cli.listing import _citation


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
