"""The numbers behind the studies, on cases with known answers."""

import math

import pytest
import torch

from infssm.bench.studies import run_study
from infssm.bench.studies.distances import pearson
from infssm.bench.studies.states import LinearCKA
from infssm.bench.studies.variance import axis_variances, discretised
from infssm.ops import ScanInputs
from infssm.ssm import list_distances


def cka(x, y, parts=1):
    alignment = LinearCKA()
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        alignment.add(a, b)
    return alignment.value()


class TestCKA:
    def test_equal_representations_align(self):
        x = torch.randn(50, 6)
        assert cka(x, x) == pytest.approx(1, abs=1e-12)

    def test_rotation_scale_and_shift_change_nothing(self):
        x = torch.randn(50, 6, dtype=torch.float64)
        q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
        assert cka(x, 3 * x @ q + 5) == pytest.approx(1, abs=1e-12)

    def test_orthogonal_representations_do_not_align(self):
        basis, _ = torch.linalg.qr(torch.cat([torch.ones(40, 1), torch.randn(40, 7)], 1).double())
        assert cka(basis[:, 1:4], basis[:, 4:8]) == pytest.approx(0, abs=1e-12)

    def test_against_the_definition_in_batches(self):
        x, y = torch.randn(60, 5).double(), torch.randn(60, 3).double()
        xc, yc = x - x.mean(0), y - y.mean(0)
        kx, ky = xc @ xc.T, yc @ yc.T
        expected = float((kx * ky).sum() / (kx.norm() * ky.norm()))
        assert cka(x, y, parts=4) == pytest.approx(expected, rel=1e-10)

    def test_nothing_varies(self):
        assert cka(torch.ones(5, 2), torch.ones(5, 2)) == 1
        assert cka(torch.ones(5, 2), torch.randn(5, 2)) == 0


class TestVariance:
    def test_variance_along_one_axis_alone(self):
        values = torch.tensor([0.0, 1.0, 2.0, 3.0])
        along_channels = values[None, None, :, None].expand(2, 3, 4, 5)
        found = axis_variances(along_channels)
        assert found["total"] == pytest.approx(1.25)
        assert found["along"] == pytest.approx({"tokens": 0, "channels": 1.25, "states": 0})
        assert found["after"] == pytest.approx({"tokens": 1.25, "channels": 0, "states": 1.25})

    def test_both_readings_add_up_to_the_whole(self):
        found = axis_variances(torch.rand(3, 4, 5, 6))
        for axis in found["along"]:
            assert found["along"][axis] + found["after"][axis] == pytest.approx(found["total"], rel=1e-12)

    @pytest.mark.parametrize("bias", [True, False])
    def test_discretisation_with_and_without_bias(self, bias):
        delta, A, shift = torch.randn(2, 3, 4), -torch.rand(4, 5), torch.randn(4)
        scan = ScanInputs(delta, delta, A, *torch.randn(2, 2, 3, 5), torch.ones(4), delta_bias=shift)
        found = discretised(scan, include_dt_bias=bias)
        step = math.log1p(math.exp(float(delta[1, 2, 3] + (shift[3] if bias else 0))))
        assert float(found[1, 2, 3, 4]) == pytest.approx(math.exp(step * float(A[3, 4])), rel=1e-5)


def test_pearson_against_torch():
    x, y = torch.arange(20.0), torch.randn(3, 20)
    expected = [float(torch.corrcoef(torch.stack([x, row]))[0, 1]) for row in y]
    assert pearson(x, y).tolist() == pytest.approx(expected, rel=1e-5)


class TestMonteCarlo:
    def test_standard_deviation_reading_reproduces_the_paper(self):
        found = run_study("monte-carlo", iterations=300).data
        assert found["r_mean"] == pytest.approx(-0.8962, abs=0.01)
        assert found["cos_mean"][0] == 1
        assert all(0 <= c <= 1 for c in found["cos_mean"])

    def test_variance_reading_does_not(self):
        assert run_study("monte-carlo", iterations=100, noise="variance").data["r_mean"] > -0.8


def test_invariance_bounds():
    table = run_study("invariance", systems=8, n=6).data["largest_distance"]
    changes = ("none", "permutation", "rescaling", "general P")
    for kind in ("martin", "fubini-study", "binet-cauchy", "chordal", "geodesic", "output"):
        assert max(table[kind][c] for c in changes) < 1e-6
        assert table[kind]["poles + 0.01"] > 1e-6
    assert table["simplified"]["none"] > 0.01
    assert table["simplified"]["permutation"] > 0.01


def test_distance_speed_counts_failures_of_textbook_formulas():
    study = run_study("distance-speed", sizes=(4, 32), systems=4, repeats=1)
    rows = study.data["rows"]
    ratio = {row["formula"]: row["forward_s"] for row in rows if row["n"] == 32}
    above = [name for name in list_distances() if ratio[name] > 3 * ratio["simplified"]]
    assert all(f"{name} (" in study.text.partition("Above 3 times:")[2] for name in above)
    failed = {(row["n"], row["formula"]): row["failed"] for row in rows if "failed" in row}
    assert all(failed[n, kind] == 0 for n in (4, 32) for kind in ("martin", "binet-cauchy"))
    assert failed[32, "martin, determinant"] > 0
