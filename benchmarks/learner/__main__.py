"""docs/results/learner.md: what a learner reaches, what it costs, and what it says of samples that it does not know.

    python -m benchmarks.learner unknowns --data-root DIR --out RUNS     # known against unknown, calibration
    python -m benchmarks.learner growth --data-root DIR --out RUNS       # from nothing to 1,000 classes
    python -m benchmarks.learner speed --out RUNS                        # teach, predict, load, store
    python -m benchmarks.learner baselines --data-root DIR --out RUNS    # beside fine-tuning and training again
    python -m benchmarks.learner.streams                                 # docs/results/streams.md

Without a topic all four are measured. DIR holds cifar100.npz, omniglot.npz and the spoken digits (fsdd/recordings).
RUNS keeps a file per part: what is there is not measured again. A topic renews its own table of the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner import baselines, growth, speed, unknowns
from benchmarks.pages import RESULTS, machine, read_json, write_json, write_table

PAGE = RESULTS / "learner.md"
TOPICS: dict[str, Any] = {"baselines": baselines, "unknowns": unknowns, "growth": growth, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", nargs="?", choices=list(TOPICS), help="one topic; all by default")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data")
    parser.add_argument("--out", type=Path, default=Path("runs/learner"), help="folder for the parts that are measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = PAGE.with_suffix(".json")
    found = read_json(stored)
    for topic in [args.topic] if args.topic else TOPICS:
        found[topic] = TOPICS[topic].run(args.data_root, args.out / topic)
        write_json(stored, found | {"machine": machine()})
        lines = TOPICS[topic].table(found[topic])
        write_table(PAGE, lines, topic)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
