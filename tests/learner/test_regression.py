"""Series with numbers in the place of classes: loss, measure, methods, replay, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import infssm
from infssm._batch import Batch
from infssm._modality import REGRESSION
from infssm.bench.reports.tables import write_comparison
from infssm.bench.running import run
from infssm.cli.app import app
from infssm.data import MeasuredSeries, load_dataset
from infssm.errors import ConfigError, DataError
from infssm.learner.scoring import Errors
from infssm.learner.setup import load_stream
from infssm.learner.store.directory import RunDirectory
from infssm.methods import build_method
from infssm.models import create_model
from tests.learner.sequences import config

DATA = {"options": {"per_shape": 24, "steps": 12}, "by": "shape"}


def test_errors_are_those_of_numpy_whatever_the_batches(tmp_path: Path) -> None:
    stream = load_stream(config("waves", tmp_path, data=DATA))
    rng = np.random.default_rng(0)
    y, predicted = 3 + rng.normal(size=20), rng.normal(size=20)
    batches = [(slice(0, 7), predicted[:7]), (slice(7, 20), predicted[7:])]
    counts = [
        Errors.counts(
            torch.tensor(p)[:, None], Batch(torch.zeros(len(p), 1, 1), torch.tensor(y[rows])), stream[0], "test", 1
        )
        for rows, p in batches
    ]
    found = Errors.of(sum(counts[1:], start=counts[0]).tolist())
    assert found.rmse == pytest.approx(np.sqrt(np.mean((predicted - y) ** 2)), abs=1e-12)
    assert found.r2 == pytest.approx(1 - np.mean((predicted - y) ** 2) / y.var(), abs=1e-9)
    targets = [stream.dataset.samples.targets[task.test.indices] for task in stream]  # type: ignore[union-attr]
    assert Errors.guess(stream, "test") == pytest.approx([t.std() for t in targets], abs=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("er", {"buffer_size": 6}),
        ("joint", {}),
        ("lwf", {}),
        ("lwf-f", {}),
        ("ewc", {"fisher_samples": 4}),
        ("si", {}),
        ("mas", {}),
        ("frozen", {}),
        ("nullspace", {}),
        ("inf-ssm-exact", {"measure_at": 2}),
    ],
)
def test_methods_learn_numbers(tmp_path: Path, method: str, options: dict[str, int]) -> None:
    found = run(config("waves", tmp_path, method, options, data=DATA), quiet=True)
    assert found.matrix.quantity.key == "rmse"
    assert np.isfinite(found.matrix.values[1]).all()
    steps = [line for line in RunDirectory(found.path).metrics() if line["kind"] == "step"]
    assert steps
    assert all("mse" in line["loss"] and "ce" not in line["loss"] for line in steps)


def test_a_run_is_tested_again_and_reported_and_its_classes_are_refused(tmp_path: Path) -> None:
    found = run(config("waves", tmp_path, data=DATA), quiet=True)
    command = CliRunner()
    rows = json.loads(command.invoke(app, ["eval", str(found.path), "--json"]).stdout)
    assert [row["rmse"] for row in rows] == pytest.approx(found.matrix.values[1].tolist(), rel=1e-5)
    assert "mean RMSE" in command.invoke(app, ["eval", str(found.path)]).stdout
    other = run(config("waves", tmp_path, "lwf", data=DATA), quiet=True)
    comparison, page = write_comparison([RunDirectory(found.path), RunDirectory(other.path)], tmp_path)
    assert "RMSE" in page.read_text()
    assert any("RMSE" in sentence for sentence in comparison.sentences(*comparison.benchmarks))
    for call in (infssm.load, infssm.Learner.load):
        with pytest.raises(ConfigError, match="predicts numbers"):
            call(found.path)
    refused = command.invoke(app, ["eval", str(found.path), "--predictions", str(tmp_path / "all.csv")])
    assert isinstance(refused.exception, ConfigError)
    assert "predicts numbers: only classes can be listed" in str(refused.exception)


@pytest.mark.parametrize("method", ["gda", "frozen+ncm", "efc", "der"])
def test_methods_that_need_classes_are_refused_with_the_reason(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=r"regression, whose targets are numbers: it needs classes.*these do: .*lwf"):
        run(config("waves", tmp_path, method, data=DATA), quiet=True)
    assert not list(tmp_path.rglob("*.safetensors"))  # before a task-0 model is trained


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no classes: make tasks by domain"):
        load_stream(config("waves", tmp_path, data=DATA | {"by": "class"}))
    with pytest.raises(ConfigError, match="model 'vim_nano' is for images"):
        run(config("waves", tmp_path, data=DATA, model={"name": "vim_nano", "options": {}}), quiet=True)
    with pytest.raises(ConfigError, match="a learner is taught classes or text"):
        infssm.Learner().learn(load_dataset("waves", None, per_shape=8, steps=8))
    for targets in (np.zeros(3), np.zeros((2, 2)), np.array([0.0, np.nan])):
        with pytest.raises(DataError, match=r"targets must be finite numbers \[2\]"):
            MeasuredSeries(np.zeros((2, 5, 1)), targets)


def test_own_series_with_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(20, 6, 2)), "target": np.arange(20) / 4, "domain": np.arange(20) % 2}
    np.savez(tmp_path / "own.npz", test=np.arange(20) < 6, **arrays)
    dataset = load_dataset(str(tmp_path / "own.npz"))
    samples = dataset.samples
    assert isinstance(samples, MeasuredSeries)
    assert (dataset.modality, dataset.num_test) == (REGRESSION, 6)
    for index, target in enumerate(samples.targets):  # the test part comes last, each series with its target
        np.testing.assert_allclose(samples.sequence(index), arrays["x"][int(4 * target)], rtol=1e-6)
    for key, wrong, message in [("target", ["a"] * 20, "numbers"), ("target", np.zeros(3), "belong together")]:
        np.savez(tmp_path / "wrong.npz", **arrays | {key: wrong})
        with pytest.raises(DataError, match=message):
            load_dataset(str(tmp_path / "wrong.npz"))
    np.savez(tmp_path / "wrong.npz", x=arrays["x"], target=arrays["target"])
    with pytest.raises(DataError, match="lacks domain"):
        load_dataset(str(tmp_path / "wrong.npz"))


def test_replayed_series_keep_their_targets() -> None:
    """The buffer keeps fractions, and each stays with its series, of any length."""
    model = create_model("mamba_nano", in_dim=1, num_classes=1, d_model=8, n_layer=1)
    method = build_method(model, "er", num_classes=1, data_kind="regression", domains=True, buffer_size=8)
    y = torch.tensor([0.25, -1.5, 3.75])
    batch = REGRESSION.collate([v.expand(n, 1) for v, n in zip(y, (3, 5, 4), strict=True)], y)
    method.begin_task(0)
    method.base.buffer.offer(**method.base.rows_of(batch))  # type: ignore[attr-defined]
    stored = method.base.buffer.get(torch.tensor([2, 0]))  # type: ignore[attr-defined]
    both = REGRESSION.join(batch, stored, lambda x: x)
    assert both.y.tolist() == [0.25, -1.5, 3.75, 3.75, 0.25]
    assert torch.equal(both.x[:, 0, 0], both.y)
    assert both.mask is not None
    assert both.mask.sum(1).tolist() == [3, 5, 4, 4, 3]


def test_losses_and_importances_are_those_of_the_formulas() -> None:
    torch.manual_seed(0)
    model = create_model("mamba_nano", in_dim=1, num_classes=1, d_model=8, n_layer=1).double()
    methods = {
        name: build_method(model, name, num_classes=1, data_kind="regression", domains=True, **options)
        for name, options in {"lwf": {"weight": 3.0}, "ewc": {}, "mas": {}}.items()
    }
    samples = [torch.randn(n, 1, dtype=torch.float64) for n in (6, 9)]
    batch = REGRESSION.collate(samples, torch.randn(2, dtype=torch.float64))

    def outputs() -> list[torch.Tensor]:
        return [model(sample[None])[0, 0] for sample in samples]  # each without the padding of the batch

    parameters = methods["ewc"].regularizers[0].parameters  # type: ignore[attr-defined]
    gradients = [parameters.gradients(output) for output in outputs()]
    squared = parameters.gradients(torch.stack(outputs()).square().sum())
    for name in ("ewc", "mas"):
        methods[name].begin_task(0, [batch])
        methods[name].end_task(0, [batch])
        measured = methods[name].regularizers[0].importance  # type: ignore[attr-defined]
        for key, value in measured.items():
            fisher = (gradients[0][key].square() + gradients[1][key].square()) / 2
            expected = fisher if name == "ewc" else squared[key].abs() / 2
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)

    lwf = methods["lwf"]
    for task in (0, 1):
        lwf.begin_task(task)
        if task == 0:
            lwf.end_task(0)
    before = model(batch.x, batch.mask)[:, 0].detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    terms = lwf.loss(batch)
    after = model(batch.x, batch.mask)[:, 0]
    torch.testing.assert_close(terms["mse"], F.mse_loss(after, batch.y), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(terms["lwf/logits"], 3 * (after - before).square().mean(), rtol=1e-9, atol=1e-12)
