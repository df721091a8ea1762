"""A learner that is taught by `generative`: classes come one after the other, and one is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import infssm

SETTINGS: dict[str, Any] = {
    "model": {"options": {"d_model": 16, "n_layer": 1, "d_state": 4, "side": 4, "levels": 4}},
    "data": {"recipe": "none"},
    "train": {"epochs": 2, "batch_size": 8, "accelerator": "cpu"},
    "method": {"samples": 5},
}


def squares(place: int, count: int = 12) -> list[np.ndarray[Any, Any]]:
    """A bright quarter of an image, with noise."""
    images = np.random.default_rng(place).integers(0, 60, (count, 8, 8), dtype=np.uint8)
    images[:, 4 * (place // 2) :, 4 * (place % 2) :][:, :4, :4] += 180
    return list(images)


def log_likelihoods(learner: infssm.Learner) -> torch.Tensor:
    """Of an image under every class, by the learner's model."""
    method, _ = learner._now.taught()
    with torch.no_grad():
        image = torch.from_numpy(squares(0)[0]).expand(1, 3, 8, 8) / 255.0
        found: torch.Tensor = method.module(image)
    return found[0]


def test_it_is_taught_new_classes_and_forgets_one(tmp_path: Path) -> None:
    learner = infssm.Learner(
        "mamba_generative_nano", method="generative", folder=tmp_path / "learner", settings=SETTINGS
    )
    learner.learn([*squares(0), *squares(1)], 12 * ["a"] + 12 * ["b"])
    learner.learn(squares(2), 12 * ["c"])
    assert learner.classes == ("a", "b", "c")
    before = log_likelihoods(learner)
    assert len(before) == 3
    learner.forget("b")
    assert learner.classes == ("a", "c")
    # What is left of the model is as it was: the mixers and the other classes' vectors.
    torch.testing.assert_close(log_likelihoods(learner), before[[0, 2]])
    again = infssm.load(tmp_path / "learner")
    torch.testing.assert_close(log_likelihoods(again), before[[0, 2]])
