"""What the benchmarks on the package's presets share: one run of a preset with changes, and a page with its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS, read_json, write_json, write_table
from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.result import Result

SEEDS = (0, 10, 100)


def configuration(preset: str, out: Path, seed: int, *changes: dict[str, Any]) -> RunConfig:
    """A preset with ``changes``, laid over it in their order."""
    values = merge(load_preset(preset).values, {"seed": seed, "out": str(out)})
    for change in ({"train": {"threads": 1, "accelerator": "cpu"}}, *changes):
        values = merge(values, change)
    return load_config(values)


def result(preset: str, out: Path, seed: int, *changes: dict[str, Any]) -> Result:
    """The run of :func:`configuration`; one that is complete is read."""
    return run(configuration(preset, out, seed, *changes), quiet=True)


def make_page(
    page: str,
    doc: str | None,
    streams: Sequence[str],
    measure: Callable[[str, Path], Any],
    table: Callable[[dict[str, Any]], list[str]],
) -> None:
    """Measure the streams asked for, and write ``docs/results/{page}.json`` and the table of ``{page}.md``.

    Streams that are not asked for keep their figures.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, default=Path("runs") / page, help="folder of the runs")
    parser.add_argument("--streams", nargs="*", choices=streams, default=list(streams))
    chosen = parser.parse_args()
    path = RESULTS / f"{page}.json"
    for name in chosen.streams:
        found = measure(name, chosen.out)  # before the file is read: other streams may be measured at the same time
        write_json(path, read_json(path) | {name: found})
    write_table(path.with_suffix(".md"), table(read_json(path)))
