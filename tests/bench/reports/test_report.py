from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infssm.bench.reports.charts import Bars, HeatMap, Lines, Series, ticks
from infssm.bench.reports.report import render_report, write_report
from tests.bench.reports.fake import fake_run


def charts(html: str) -> list[ET.Element]:
    """All charts of a page; parsing fails on anything that is not well formed."""
    return [ET.fromstring(text) for text in re.findall(r"<svg[^>]*role=\"img\".*?</svg>", html, re.DOTALL)]


def test_report_is_self_contained_and_whole(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", "inf-ssm", weight=1000.0)
    html = write_report(run).read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert "<script" not in html
    assert "http" not in html
    for text in ("AA, %", "53.33", "Forgetting per task", "Loss terms", "method.weight", "1000.0", "packages.torch"):
        assert text in html, text
    assert len(charts(html)) == 7
    assert len(html) < 60_000


def test_names_are_escaped(tmp_path: Path) -> None:
    html = render_report(fake_run(tmp_path / "a", "<b>&"))
    assert "reg/&lt;b&gt;" in html
    assert "<b>&</h1>" not in html
    charts(html)


def test_heat_map_shows_every_known_cell(tmp_path: Path) -> None:
    html = render_report(fake_run(tmp_path / "a"))
    heat = charts(html)[0]
    cells = [e for e in heat.iter("rect") if e.get("class") == "cell"]
    titles = [e.findtext("title") for e in cells]
    assert len(cells) == 6
    assert "after task 3, on task 2 (two, three): 60.00 %" in titles
    assert [t.text for t in heat.iter("text") if t.get("class") in ("on-dark", "on-light")] == [
        "90.0", "50.0", "80.0", "30.0", "60.0", "70.0",
    ]  # fmt: skip


def test_forgetting_bars(tmp_path: Path) -> None:
    bars = [e.findtext("title") for e in charts(render_report(fake_run(tmp_path / "a")))[3].iter("rect")]
    assert bars == ["forgetting 1: 60.00", "forgetting 2: 20.00"]


def test_unfinished_run_has_a_report(tmp_path: Path) -> None:
    assert "2 of 3 tasks so far" in render_report(fake_run(tmp_path / "a", complete=False))


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    high = low + span
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 7
    tolerance = 1e-6 * max(abs(low), abs(high), 1)
    assert all(low - tolerance <= m <= high + tolerance for m in marks)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=20), st.booleans())
def test_any_numbers_draw(values: list[float], log: bool) -> None:
    series = Series("s", list(range(len(values))), values)
    chart_html = Lines([series], "x", "y", log=log).svg()
    root = ET.fromstring(chart_html[: chart_html.index("</svg>") + 6])
    line = next(root.iter("polyline"))
    shown = [v for v in values if math.isfinite(v) and (not log or v > 0)]
    assert len(line.get("points", "").split()) == len(shown)


def test_line_goes_where_it_should() -> None:
    chart_html = Lines([Series("s", [0, 1], [0, 100])], "x", "y", y_range=(0, 100)).svg()
    points = re.search(r'points="([^"]*)"', chart_html)
    assert points is not None
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in points[1].split())
    assert (x0, y0) == (66.0, 256.0)
    assert (x1, y1) == pytest.approx((546.0, 12.0))


def test_a_term_that_a_logarithm_cannot_show_is_named() -> None:
    terms = [Series("ce", [0, 1], [1.0, 0.5]), Series("penalty", [0, 1], [0.0, 0.0])]
    assert "penalty (never above 0)" in Lines(terms, "x", "y", log=True).svg()
    assert "never" not in Lines(terms, "x", "y").svg()


def test_numbers_of_a_heat_map_stay_inside_their_cells() -> None:
    chart = ET.fromstring(HeatMap([[100.0, 0.04], [99.94, 7.0]], "x", "y", where=lambda i, j: f"{i} {j}").svg())
    texts = [text.text for text in chart.iter("text")]
    assert {"100", "0", "99.9", "7.0"} <= set(texts)


def test_classes_and_what_they_are_taken_for(tmp_path: Path) -> None:
    html = render_report(fake_run(tmp_path / "a"))
    titles = [e.findtext("title") for e in charts(html)[6].iter("rect")]
    assert "three taken for four: 30.00 %" in titles
    assert "zero taken for zero: 100.00 %" in titles
    assert '<span title="five">five</span><i style="width:50.0%"></i><em>50.0</em>' in html
    assert "<li><b>task 2</b> two, three</li>" in html


def test_report_of_a_run_without_recorded_classes(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    (run.path / "confusion.json").unlink()
    html = render_report(run)
    assert len(charts(html)) == 6
    assert "after task 3, on task 2: 60.00 %" in html


def test_forgetting_below_zero_is_drawn_below_the_axis() -> None:
    chart = Bars(["1", "2"], [("s", [10.0, -5.0])], "task", "points").svg()
    up, down = [e for e in ET.fromstring(chart).iter("rect") if "bar" in e.get("class", "")]
    zero = float(up.get("y", 0)) + float(up.get("height", 0))
    assert float(down.get("y", 0)) == pytest.approx(zero, abs=0.11)
    assert float(down.get("height", 0)) == pytest.approx(float(up.get("height", 0)) / 2, abs=0.11)


def test_equal_curves_differ_in_dashes_and_markers() -> None:
    series = [Series(name, [0, 1], [50, 40]) for name in "ab"]
    chart_html = Lines(series, "x", "y").svg()
    chart = ET.fromstring(chart_html[: chart_html.index("</svg>") + 6])
    one, other = chart.iter("polyline")
    assert one.get("points") == other.get("points")
    assert one.get("class") != other.get("class")
    assert len({e.get("d") for e in chart.iter("path")}) == 2


def test_seeds_make_a_band() -> None:
    chart_html = Lines([Series("s", [0, 1], [50, 40], [45, 35], [55, 60])], "x", "y", y_range=(0, 100)).svg()
    points = re.search(r'band" points="([^"]*)"', chart_html)
    assert points is not None
    heights = [float(p.split(",")[1]) for p in points[1].split()]
    scale = [256 - 2.44 * v for v in (55, 60, 35, 45)]
    assert heights == pytest.approx(scale, abs=0.06)
