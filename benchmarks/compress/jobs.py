"""Small tasks to compress models on: written digits, spoken digits, text."""

from __future__ import annotations

import pydoc_data
import tarfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm import create_model
from infssm.data.audio import mel_bank


class Job(NamedTuple):
    """A task: model options, training and test data, steps and batch size; text has no labels but the next byte.

    The seed changes the first weights and the order of batches; training and test data stay the same.
    """

    model: str
    options: dict[str, Any]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    steps: int
    batch: int = 32
    text: bool = False
    seed: int = 0

    def make(self, states: int) -> nn.Module:
        torch.manual_seed(self.seed)
        return create_model(self.model, **self.options, d_state=states)

    def batches(self, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end; part 1 is for training, 2 for calibration."""
        draw = torch.Generator().manual_seed(part + 100 * self.seed)
        while True:
            rows = torch.randint(len(self.train[0]), (self.batch,), generator=draw)
            yield self.train[0][rows], self.train[1][rows]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def fit(self, model: nn.Module, steps: int | None = None) -> nn.Module:
        """Adam with a cosine, as short as it can be for the task."""
        steps = steps or self.steps
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        model.train()
        for _, (x, y) in zip(range(steps), self.batches(1), strict=False):
            optimizer.zero_grad()
            self.loss(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.eval()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy in per cent; of text, bits per byte."""
        model.eval()
        total, right, nats = 0, 0.0, 0.0
        for x, y in zip(*(part.split(64) for part in self.test), strict=True):
            logits = model(x)
            total += y.numel()
            right += float((logits.argmax(-1) == y).sum())
            nats += float(F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum"))
        return nats / total / float(np.log(2)) if self.text else 100 * right / total


def digits(_: Path) -> Job:
    """scikit-learn's 8x8 digits, for a Vim of 16 tokens."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images = torch.tensor(x[order], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(y[order])
    options = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 48, "depth": 3, "num_classes": 10}
    return Job("vim_nano", options, (images[:1200], labels[:1200]), (images[1200:], labels[1200:]), 350)


def speech(root: Path) -> Job:
    """FSDD: 64 steps of log energies in 24 bands, for a Mamba."""
    bank = mel_bank(24, 8000).float()
    window = 2 * (bank.shape[1] - 1)
    found: dict[bool, list[tuple[Tensor, int]]] = {True: [], False: []}
    with tarfile.open(root / "fsdd.tar.gz") as archive:
        for member in archive:  # in the order of the archive: going back would unpack it from its beginning
            if not member.name.endswith(".wav"):
                continue
            digit, _, index = Path(member.name).stem.split("_")
            with wave.open(archive.extractfile(member)) as file:
                sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
            frames = (
                torch.tensor(sound.copy()).unfold(0, window, 80) if len(sound) >= window else torch.zeros(1, window)
            )
            energy = torch.fft.rfft(frames * torch.hann_window(window)).abs().square() @ bank.T
            series = torch.log(energy + 1e-6)[:64]
            series = F.pad((series + 6) / 4, (0, 0, 0, 64 - len(series)))
            found[int(index) < 5].append((series, int(digit)))
    (train, test) = (
        (torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])) for rows in (found[False], found[True])
    )
    options = {"in_dim": 24, "vocab_size": None, "d_model": 48, "n_layer": 2, "num_classes": 10}
    return Job("mamba_nano", options, train, test, 400)


def text(_: Path) -> Job:
    """Bytes of Python's help topics, 96 at a time, for a Mamba language model."""
    content = Path(pydoc_data.__path__[0], "topics.py").read_bytes()
    rows = torch.tensor(list(content[: len(content) // 97 * 97])).view(-1, 97)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    x, y, held = rows[:, :-1], rows[:, 1:], len(rows) // 10
    options = {"d_model": 64, "n_layer": 3}
    return Job("mamba_lm_nano", options, (x[held:], y[held:]), (x[:held], y[:held]), 600, 16, text=True)


JOBS: dict[str, Callable[[Path], Job]] = {"written digits": digits, "spoken digits": speech, "text": text}
