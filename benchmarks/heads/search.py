"""Which runs docs/results/heads.md rests on: the search on one base, and the chosen settings on three others."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.heads.fit import Score, judge
from benchmarks.heads.runs import SEARCHED, Place, Spec, train


class Arm(NamedTuple):
    """An arm: a method with options, and the weights to search."""

    options: dict[str, Any]
    weights: tuple[float, ...] = ()
    low: slice = slice(2, None)
    """Which weights are tried at the protocol's low rates: the larger ones, or where those do harm all."""


ARMS: dict[str, Arm] = {
    "plain": Arm({"name": "seq"}),
    "lwf-f": Arm({"name": "lwf-f"}, (0.01, 0.1, 1.0, 10.0)),
    "output": Arm({"name": "inf-ssm-exact"}, (1.5, 15.0, 150.0, 1500.0)),
    "lwf-ac": Arm({"name": "lwf-ac"}, (1e2, 1e3, 1e4, 1e5)),
    "ewc": Arm({"name": "ewc", "fisher_samples": 100}, (1.0, 1e2, 1e4, 1e6)),
    "lwf": Arm({"name": "lwf"}, (0.01, 0.1, 1.0, 10.0)),
    "martin+0.1*c": Arm({"name": "inf-ssm-exact", "distance": "martin+0.1*c"}, (1e2, 1e3, 1e4, 1e5)),
    "inf-ssm": Arm({"name": "inf-ssm"}, (1e-2, 1.0, 1e2, 1e4), low=slice(None)),
}
REPLAY: dict[str, Arm] = {
    "er": Arm({"name": "er", "buffer_size": 500}),
    "x-der": Arm({"name": "x-der", "buffer_size": 500}),
}


class Protocol(NamedTuple):
    """A stream: seeds to report, how many of its tasks a search learns, its grid, and sizes of replay buffers."""

    name: str
    seeds: tuple[int, ...]
    search_tasks: int
    rates: tuple[float, ...]
    low_rates: tuple[float, ...]
    replay_rates: tuple[float, ...]
    weights: slice
    buffers: tuple[int, ...]


DIGITS = Protocol("digits", (10, 100, 1000), 6, (3e-5, 1e-4), (), (3e-4, 1e-3), slice(2, None), (60, 200))
PROTOCOLS = {
    "b50-5": Protocol("b50-5", (1, 2, 3), 3, (3e-4, 1e-3), (3e-5, 1e-4), (1e-4, 3e-4, 1e-3), slice(None), (500, 2000)),
    "digits": DIGITS,
    "digits-omniglot": DIGITS._replace(name="digits-omniglot"),
}


Grid = dict[str, list[tuple[Spec, Score]]]
"""Runs of every arm with their best validation score."""


class Work:
    """Runs specs in a few processes, with a line of progress for each."""

    def __init__(self, place: Place, jobs: int) -> None:
        self.place, self.jobs = place, jobs

    def go(self, specs: Sequence[Spec]) -> None:
        missing = [spec for spec in {s.label: s for s in specs}.values() if not self.place.file(spec).exists()]
        began = time.monotonic()
        with multiprocessing.get_context("spawn").Pool(min(self.jobs, len(missing)) or 1, maxtasksperchild=20) as pool:
            for done, label in enumerate(pool.imap_unordered(_job, [(spec, self.place) for spec in missing]), 1):
                left = (time.monotonic() - began) / done * (len(missing) - done) / 60
                print(f"{time.strftime('%H:%M')} {done}/{len(missing)}, {left:.0f} min left: {label}", flush=True)


def _job(arguments: tuple[Spec, Place]) -> str:
    os.environ["OMP_NUM_THREADS"] = "1"
    return train(*arguments)


def search(work: Work, protocol: Protocol, arms: dict[str, Arm]) -> Grid:
    """Every arm's runs on the searched base with the validation score of the best Gaussian head."""
    grid = {
        name: [
            Spec(protocol.name, SEARCHED, name, _options(arm, protocol, weight), rate, protocol.search_tasks)
            for rate, weight in _points(arm, protocol)
        ]
        for name, arm in arms.items()
    }
    work.go([spec for specs in grid.values() for spec in specs])
    return {
        name: [(spec, judge(work.place.file(spec), replay=name in REPLAY)) for spec in specs]
        for name, specs in grid.items()
    }


def _points(arm: Arm, protocol: Protocol) -> list[tuple[float, float | None]]:
    """The same grid for all: every learning rate with every weight, low rates with fewer weights."""
    if "buffer_size" in arm.options:
        return [(rate, None) for rate in protocol.replay_rates]
    parts = ((protocol.rates, protocol.weights), (protocol.low_rates, arm.low))
    return [(rate, weight) for rates, which in parts for rate in rates for weight in arm.weights[which] or (None,)]


def _options(arm: Arm, protocol: Protocol, weight: float | None) -> dict[str, Any]:
    size = {"buffer_size": protocol.buffers[0]} if "buffer_size" in arm.options else {}
    return arm.options | size | ({} if weight is None else {"weight": weight})


def chosen(rows: Sequence[tuple[Spec, Score]]) -> Spec:
    """The run with the best validation score."""
    return max(rows, key=lambda row: row[1].both)[0]


def replay_of(spec: Spec, images: int) -> Spec:
    """A replay run with a buffer of another size."""
    return spec._replace(options=dict(spec.options) | {"buffer_size": images})
