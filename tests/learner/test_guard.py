"""NaN is caught at its step and traced to its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infssm.bench.running import run, run_path
from infssm.errors import DivergedError
from infssm.learner.loop import Loop
from infssm.learner.optim import diagnose, is_finite
from infssm.learner.saving import load_checkpoint
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Method
from tests.learner.tiny import tiny_config


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_loss_and_gradients_are_checked(bad: float) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1))]
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.ones(2, 2)
    assert is_finite(torch.tensor(2.5), parameters)
    assert not is_finite(torch.tensor(bad), parameters)
    parameters[1].grad[1, 0] = 1e30  # finite, although its square is not
    assert is_finite(torch.tensor(2.5), parameters)
    parameters[1].grad[1, 0] = bad
    assert not is_finite(torch.tensor(2.5), parameters)
    assert not is_finite(torch.tensor(bad), [])
    turning = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    turning.grad = torch.ones(2, dtype=torch.complex64)
    assert is_finite(torch.tensor(2.5), [turning])
    turning.grad[1] = complex(1, bad)
    assert not is_finite(torch.tensor(2.5), [turning])


class Poison(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0 * 0


def test_first_layer_with_a_bad_output_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Poison(), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    error = diagnose(model, {"ce": model(x).sum(), "other": torch.zeros(())}, lambda: model(x), "task 1, step 3")
    assert isinstance(error, DivergedError)
    assert "task 1, step 3" in str(error)
    assert "loss term 'ce' is not finite" in str(error)
    assert "output that is not finite: 1." in str(error)


def test_first_bad_gradient_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.grad = torch.full((2, 2), float("nan"))
    error = diagnose(model, {"ce": torch.zeros(())}, lambda: None, "here")
    assert "all loss terms are finite" in str(error)
    assert "gradient that is not finite: 1.weight" in str(error)


def test_run_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "lwf-ac")
    step = Loop.step

    def poisoned(self: Loop, *args: Any) -> Any:
        if self.progress.position.at == 10:
            self.setup.method.module.layers[0].mixer.x_proj.weight.data[0, 0] = float("nan")  # type: ignore[index,union-attr]
        return step(self, *args)

    monkeypatch.setattr(Loop, "step", poisoned)
    with pytest.raises(DivergedError) as error:
        run(config, quiet=True)
    message = str(error.value)
    assert "task 1, epoch 1, step 1" in message
    assert "'ce'" in message
    assert "layers.0.mixer" in message
    saved = load_checkpoint(run_path(config) / "checkpoints" / "last.ckpt")
    assert saved["position"]["task"] == 1
    assert saved["position"]["epoch"] == 1
    assert all(torch.isfinite(value).all() for value in saved["module"].values())
    assert not RunDirectory(run_path(config)).complete


def test_bad_penalty_is_named_as_a_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Method.loss

    def with_nan(self: Method, batch: Any) -> Any:
        terms = loss(self, batch)
        return {**terms, "extra/term": terms["ce"] * float("nan")}

    monkeypatch.setattr(Method, "loss", with_nan)
    with pytest.raises(DivergedError, match=r"task 0, epoch 0, step 0: loss term 'extra/term' is not finite"):
        run(tiny_config(tmp_path), quiet=True)
