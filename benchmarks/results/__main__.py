"""Every method on a small stream, weights chosen on validation data, three seeds.

    python -m benchmarks.results digits --out RUNS          # RUNS keeps the run directories, resumable
    python -m benchmarks.results digits-replay --out RUNS
    python -m benchmarks.results cifar --out RUNS --data-root DIR
    python -m benchmarks.results page                       # all three pages from their JSON files alone

Every method gets the same search for its weight (``common.search``), by class-incremental accuracy on the
validation images of all tasks after the last one, averaged over the seeds. Runs already complete under
RUNS are not repeated."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.pages import RESULTS, read_json, write_tables
from benchmarks.results import digits, replay
from benchmarks.results.common import Bench


def write_page(stream: str) -> None:
    data = read_json(RESULTS / f"{stream}.json")
    write_tables(RESULTS / f"{stream}.md", digits.page(data) if stream == "digits" else replay.page(stream, data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=["digits", "digits-replay", "cifar", "page"])
    parser.add_argument("--out", default=Path("runs"), type=Path, help="folder for run directories")
    parser.add_argument("--data-root", help="folder that holds cifar100")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    args = parser.parse_args()
    if args.stream == "page":
        for stream in ("digits", "digits-replay", "cifar"):
            write_page(stream)
        return
    start = time.time()
    base = replay.cifar_base(args.data_root) if args.stream == "cifar" else digits.BASE
    bench = Bench(args.stream, base, args.out.resolve(), args.jobs)
    (digits if args.stream == "digits" else replay).write(bench, RESULTS)
    write_page(args.stream)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
