"""A learner grown from nothing to 1,000 classes of Omniglot, 20 in a call, beside one that is taught them at once."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learner.data import omniglot
from benchmarks.pages import markdown_table, remembered
from infssm import Learner

CLASSES, STEP = 1000, 20
SHOWN = (20, 100, 200, 400, 600, 800, 1000)
HEADS = ("gda", "lda")


def measure(root: Path, head: str) -> dict[str, Any]:
    """Processor time and folder size of each call, and the accuracy at the end."""
    train, test = omniglot(root)
    calls = []
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(weights="omniglot", method=f"frozen+{head}", folder=Path(folder) / "learner")
        for first in range(0, CLASSES, STEP):
            samples = train.of(range(first, first + STEP)).given
            start = time.process_time()
            learner.learn(*samples)
            seconds = time.process_time() - start
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            calls.append({"classes": first + STEP, "seconds": seconds, "bytes": size})
        asked = test.of(range(CLASSES)).given
        grown = learner.evaluate(*asked).accuracy
        at_once = Learner(weights="omniglot", method=f"frozen+{head}")
        start = time.process_time()
        at_once.learn(*train.of(range(CLASSES)).given)
        seconds = time.process_time() - start
        accuracy = at_once.evaluate(*asked).accuracy
    return {"calls": calls, "accuracy": grown, "at_once": accuracy, "seconds_at_once": seconds}


def run(data_root: Path, out: Path) -> dict[str, Any]:
    return {head: remembered(out / f"{head}.json", lambda head=head: measure(data_root, head)) for head in HEADS}


def table(found: dict[str, Any]) -> list[str]:
    growth, totals = [], []
    for head, one in found.items():
        calls = [next(call for call in one["calls"] if call["classes"] == shown) for shown in SHOWN]
        growth.append([f"`{head}`", "this call", *(f"{call['seconds']:.2f} s" for call in calls)])
        growth.append(["", "folder", *(f"{call['bytes'] / 2**20:.1f} MiB" for call in calls)])
        seconds = [sum(call["seconds"] for call in one["calls"]), one["seconds_at_once"]]
        accuracies = [f"{100 * one[key]:.2f} %" for key in ("accuracy", "at_once")]
        totals.append([f"`{head}`", *(f"{value:.0f} s" for value in seconds), *accuracies])
    shown = ["head", "", *(f"{k:,} classes" for k in SHOWN)]
    ends = ["head", "50 calls of 20 classes", "one call", "accuracy, 50 calls", "accuracy, one call"]
    return [
        *markdown_table(shown, growth, numbers=len(SHOWN)),
        "",
        *markdown_table(ends, totals, numbers=4),
    ]
