"""`python -m benchmarks.learner.streams`: time, memory and error of sequences that are pushed in chunks.

One thread, small models of one input channel, a process for each model. Writes `docs/results/streams.json` and the
table of `docs/results/streams.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.kernels.memory import resident
from benchmarks.pages import RESULTS, markdown_table, write_json, write_table
from infssm.data import SequenceFacts
from infssm.learner.predict import Stream
from infssm.models import create_model

MODELS = ("s4d_nano", "mamba_nano", "mamba2_nano")
CHUNKS = (1, 7, 160)
PUSHES = 300
"""Pushes of a time measurement, the best of three."""
CHECKED, LONG = 16_000, 1_000_000
"""Samples of the comparison with the whole sequence, and of the memory measurement."""
PAGE = RESULTS / "streams.md"


def measure(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = create_model(name, in_dim=1, num_classes=10).eval()
    facts = SequenceFacts("noise", "series", 1)

    def stream() -> Stream[torch.Tensor]:
        return Stream(model, facts, lambda logits: logits)

    seconds: dict[str, float] = {}
    for size in CHUNKS:
        found, chunk = stream(), torch.randn(size, 1)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            for _ in range(PUSHES):
                found.push(chunk)
            best = min(best, time.process_time() - start)
        seconds[str(size)] = best / (PUSHES * size)

    x = torch.randn(CHECKED, 1)
    found = stream()
    for chunk in x.split(160):
        logits = found.push(chunk)
    with torch.no_grad():
        error = float((logits - model(x[None])).abs().max())

    found = stream()
    for i in range(LONG // 160):
        found.push(torch.randn(160, 1))
        if i == 100:
            before, state = resident("VmRSS"), found.state.nbytes
    return {
        "seconds_per_sample": seconds,
        "error": error,
        "state_bytes": state,
        "state_bytes_at_the_end": found.state.nbytes,
        "growth_mib": resident("VmRSS") - before,
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """One line per model."""
    header = ["model", *(f"chunks of {size}" for size in CHUNKS), "state"]
    header += ["growth of memory over 10^6 samples", "difference from the whole sequence"]
    rows = []
    for name, one in found.items():
        times = [f"{1e6 * one['seconds_per_sample'][str(size)]:.0f} µs" for size in CHUNKS]
        state, growth = f"{one['state_bytes'] / 1024:.0f} KiB", f"{one['growth_mib']:.1f} MiB"
        rows.append([f"`{name}`", *times, state, growth, f"{one['error']:.0e}"])
    return markdown_table(header, rows, numbers=len(header) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="measure one model and print JSON")
    chosen = parser.parse_args().model
    if chosen:
        print(json.dumps(measure(chosen)))
        return
    found = {}
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.learner.streams", "--model", name]
        found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(name, found[name], flush=True)
    write_json(PAGE.with_suffix(".json"), found)
    write_table(PAGE, table(found))


if __name__ == "__main__":
    main()
