"""The tables under docs/results: every method on a small stream, weights chosen on validation, three seeds.

    python -m benchmarks.results digits --out RUNS          # or cifar; RUNS keeps the run directories, resumable

Weights are chosen on seed 0 by class-incremental accuracy on the validation images of all tasks after the last one.
Runs already complete under RUNS are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 10, 100)

Run = tuple[str, dict[str, Any], int]
"""Method name, its options, seed."""


class Outcome(NamedTuple):
    """What one run gave, in percent; ``weight`` is what ``auto`` chose."""

    aa: float
    aia: float
    fm: float
    ti: float
    val: float
    seconds: float
    weight: float | None


class Bench:
    """Runs of one stream, each from the task-0 model that seq trained with the same seed."""

    def __init__(self, name: str, base: Mapping[str, Any], out: Path, workers: int) -> None:
        self.name, self.base, self.out, self.workers = name, base, out, workers

    def config(self, run: Run) -> Any:
        from infssm.train import load_config, merge, run_path

        method, options, seed = run
        common = {"seed": seed, "out": str(self.out), "train": {"threads": 1}}
        first = load_config(merge(merge(self.base, common), {"method": "seq"}))
        if method == "seq" and not options:
            return first
        values = merge(merge(self.base, common), {"method": {"name": method, **options}})
        if not _trains_task0(method):
            start = run_path(first) / "checkpoints" / "task_00.safetensors"
            values = merge(values, {"train": {"task0": str(start)}})
        return load_config(values)

    def go(self, runs: Iterable[Run]) -> list[Outcome]:
        """Run all, in as many processes as there are cores; outcomes in order."""
        runs = list(runs)
        with multiprocessing.get_context("spawn").Pool(self.workers, maxtasksperchild=8) as pool:
            return pool.map(self.one, runs, chunksize=1)

    def one(self, run: Run) -> Outcome:
        """One run, or what it gave before."""
        import torch

        from infssm.train import run as train

        torch.set_num_threads(1)
        config = self.config(run)
        result = train(config, quiet=True)
        cached = result.path / "outcome.json"
        if not cached.exists():
            outcome = Outcome(
                *(100 * v for v in (result.aa, result.aia, result.fm, result.matrix.task_incremental.aa)),
                100 * _validation_aa(result.path),
                result.seconds,
                _auto_weight(result.path),
            )
            cached.write_text(json.dumps(outcome))
            print(f"{run[0]} {run[1]} seed {run[2]}: AA {outcome.aa:.1f} val {outcome.val:.1f}", flush=True)
        return Outcome(*json.loads(cached.read_text()))


def _trains_task0(method: str) -> bool:
    """Methods whose heads, prompts or encoders must be there from task 0 on."""
    return method.split("+")[0] in ("lucir", "l2p-r", "clfd", "joint", "si", "ucl")


def _validation_aa(path: Path) -> float:
    from infssm.studies._run import TrainedRun, _fabric
    from infssm.train.evaluate import evaluate
    from infssm.train.setup import load_weights

    run = TrainedRun.open(path)
    load_weights(run.setup.method.module, path / "checkpoints" / f"task_{run.tasks - 1:02}.safetensors")
    stream = run.setup.stream
    seen = stream[run.tasks - 1].classes.stop
    values = [evaluate(_fabric(), run.setup, stream[t], seen=seen, part="val") for t in range(run.tasks)]
    return sum(v.class_incremental for v in values) / len(values)


def _auto_weight(path: Path) -> float | None:
    from infssm.train.checkpoint import load_newest

    state, _ = load_newest(path / "checkpoints" / "last.ckpt")
    components = state["method"]["components"]
    weights = [c["weight"] for c in components.values() if isinstance(c, dict) and "weight" in c]
    return weights[0] if weights else None


def best_weight(bench: Bench, method: str, options: dict[str, Any], weights: Sequence[float], key: str) -> list[Any]:
    """(weight, outcome) for every weight on seed 0."""
    runs = [(method, {**options, key: w}, 0) for w in weights]
    return list(zip(weights, bench.go(runs), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=["digits", "cifar"])
    parser.add_argument("--out", required=True, type=Path, help="folder for run directories")
    parser.add_argument("--data-root", help="folder that holds cifar100")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    from benchmarks import cifar_results, digits_results

    page = {"digits": digits_results, "cifar": cifar_results}[args.stream]
    start = time.time()
    bench = Bench(args.stream, page.base(args.data_root), args.out.resolve(), args.workers)
    page.write(bench, ROOT / "docs" / "results")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
