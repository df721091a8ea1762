"""Stands in for the learner: nearest mean colour."""

import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from infssm.errors import ConfigError
from infssm.learner.events import Note, RunBegan, StepDone


class Prediction(NamedTuple):
    label: str
    probability: float
    probabilities: dict
    known: bool


class Lesson(NamedTuple):
    name: str
    time: float
    classes: dict
    accuracy: float | None


class Learner:
    modality = "images"
    wait = 0.05

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.version, self.means, self.history = 0, {}, ()
        self._write()

    @classmethod
    def load(cls, folder):
        self = cls.__new__(cls)
        self.folder = Path(folder)
        self.version = int((self.folder / "now").read_text())
        stored = json.loads((self.folder / f"{self.version}.json").read_text())
        self.means = stored["means"]
        self.history = tuple(Lesson(*lesson) for lesson in stored["history"])
        return self

    def _write(self):
        (self.folder / f"{self.version}.json").write_text(json.dumps({"means": self.means, "history": self.history}))
        (self.folder / "new").write_text(str(self.version))
        (self.folder / "new").rename(self.folder / "now")

    @property
    def classes(self):
        return tuple(self.means)

    def learn(self, data, labels, *, name=None, listen=None, control=None):  # noqa: ARG002
        listen(RunBegan("fake", 10, 0))
        for step in range(10):
            listen(StepDone(step + 1, 0, 1, 0, 1, {}, 1.0))
            time.sleep(self.wait)
        listen(Note("fitting"))
        if labels[0] == "bad":
            raise ConfigError(f"{data[0]} is bad: choose another")
        colour = np.mean([np.asarray(Image.open(p).convert("RGB")).mean((0, 1)) for p in data], axis=0)
        self.means = {**self.means, labels[0]: colour.tolist()}
        lesson = Lesson(name or f"lesson {self.version + 1}", time.time(), {labels[0]: len(data)}, 0.95)
        self.history = (*self.history, lesson)
        self.version += 1
        self._write()
        return lesson

    def predict(self, x):
        found = []
        for path in x:
            colour = np.asarray(Image.open(path).convert("RGB")).mean((0, 1))
            distance = {k: float(np.abs(colour - m).sum()) for k, m in self.means.items()}
            weights = {k: np.exp(-d / 20) + 1e-12 for k, d in sorted(distance.items(), key=lambda i: i[1])}
            shares = {k: float(w / sum(weights.values())) for k, w in weights.items()}
            best = next(iter(shares))
            found.append(Prediction(best, shares[best], shares, distance[best] < 60))
        return found

    def forget(self, *classes):
        self.means = {k: v for k, v in self.means.items() if k not in classes}
        self.version += 1
        self._write()

    def undo(self):
        if not self.version:
            raise ConfigError("there is nothing to undo")
        fresh = json.loads((self.folder / f"{self.version - 1}.json").read_text())
        self.version -= 1
        self.means, self.history = fresh["means"], tuple(Lesson(*lesson) for lesson in fresh["history"])
        self._write()
