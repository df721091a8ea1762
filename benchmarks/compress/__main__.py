"""`python -m benchmarks.compress --data DIR --out docs/results/compress.json`: states pruned, accuracy and time.

DIR holds ``fsdd.tar.gz``. Takes some ten minutes of one core; what the file holds already is not measured again, and
docs/results/compress.md is written from all of it.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.compress.jobs import JOBS, Job
from benchmarks.compress.page import write
from benchmarks.kernels.measure import Method, interleaved
from benchmarks.pages import RESULTS, read_json, remembered
from infssm import compress
from infssm.models import CausalBackbone

STATES = (8, 4, 2)
FULL = 16
STEPS = 80


def variants(job: Job, model: nn.Module, n: int) -> dict[str, nn.Module]:
    """Models with n states: pruned by three scores and trained back, pruned alone, and trained from scratch."""
    data = list(islice(job.batches(2), 40))

    def pruned(score: str, steps: int) -> nn.Module:
        return compress(model, states=n, data=data, score=score, steps=steps)

    return {
        "output": pruned("output", STEPS),
        "LAST's score": pruned("last", STEPS),
        "magnitude": pruned("magnitude", STEPS),
        "output, no training": pruned("output", 0),
        "from scratch": job.fit(job.make(n)),
    }


@torch.no_grad()
def times(job: Job, models: dict[int, nn.Module]) -> dict[int, dict[str, float]]:
    """Milliseconds of processor time, medians of interleaved calls: a forward of 32 samples, and one decoding step."""
    calls: dict[tuple[int, str], Method] = {}
    x = job.test[0][:32]
    for n, model in models.items():
        calls[n, "forward"] = Method(partial(model, x))
        if isinstance(model, CausalBackbone):
            _, state = model(x[:1], return_state=True)
            calls[n, "step"] = Method(partial(model, x[:1, :1], state=state, return_state=True))
    medians: dict[int, dict[str, float]] = {n: {} for n in models}
    for (n, what), timing in interleaved(calls, 30, time.process_time).items():
        medians[n][what] = timing.median
    return medians


def run(job: Job) -> dict[str, Any]:
    model = job.fit(job.make(FULL))
    sized: dict[int, nn.Module] = {FULL: model}
    scores: dict[str, dict[str, float]] = {str(FULL): {"full": job.score(model)}}
    for n in STATES:
        made = variants(job, model, n)
        sized[n] = made["output"]
        scores[str(n)] = {name: job.score(other) for name, other in made.items()}
    mixers = job.options.get("depth", job.options.get("n_layer", 0))
    width = 2 * job.options.get("embed_dim", job.options.get("d_model", 0))
    directions = 2 if job.model.startswith("vim") else 1
    memory = {str(n): 4 * n * width * mixers * directions for n in sized}
    measured = {str(n): value for n, value in times(job, sized).items()}
    return {"scores": scores, "ms": measured, "state bytes": memory, "measure": "bits per byte" if job.text else "%"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.compress", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with fsdd.tar.gz")
    parser.add_argument("--out", type=Path, default=RESULTS / "compress.json")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in JOBS.items():
        for seed in range(options.seeds):
            found = remembered(
                options.out, lambda make=make, seed=seed: run(make(options.data)._replace(seed=seed)), f"{name}, {seed}"
            )
            print(f"{name}, seed {seed}: {json.dumps(found['scores'])}", flush=True)
    write(read_json(options.out), options.out.with_suffix(".md"))


if __name__ == "__main__":
    main()
