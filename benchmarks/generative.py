"""`python -m benchmarks.generative`: a Mamba that generates what it classifies, beside joint training and statistics.

Runs of `method=generative` on digits, spoken digits by class and by speaker, and 20 letters of 16 x 16 pixels. Writes
`docs/results/generative.json` and the table of `docs/results/generative.md`; what was measured before is kept, so
streams, arms and seeds may be run one by one. The recordings are looked for in `$INFSSM_DATA`; `letters` needs
`--omniglot`, an .npz with `x_train y_train x_test y_test classes`, classes named `Latin/character01` and so on.
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

import infssm
from benchmarks.pages import RESULTS, machine, markdown_table, read_json, remembered, spread, write_json, write_table
from benchmarks.presets import SEEDS
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

_SPEECH = {"name": "speech-digits", "bands": 40}
_LETTERS = [f"Latin/character{number:02}" for number in range(1, 21)]
_VALUES = {"side": 16, "levels": 5}
STREAMS: dict[str, dict[str, Any]] = {
    "digits": {"data": {"name": "digits", "num_tasks": 5, "recipe": "none"}, "train": {"epochs": 12}},
    "speech": {"data": {**_SPEECH, "by": "class", "num_tasks": 5}, "train": {"epochs": 7}},
    "speakers": {"data": {**_SPEECH, "by": "speaker", "num_tasks": 6}, "train": {"epochs": 8}},
    "letters": {
        "data": {"tasks": [_LETTERS[start : start + 4] for start in range(0, 20, 4)]},
        "model": {"options": _VALUES},
        "train": {"epochs": 40, "batch_size": 16},
    },
}
GENERATIVE: dict[str, Any] = {
    "method": {"name": "generative"},
    "model": {"name": "mamba_generative_nano"},
    "train": {"batch_size": 32, "lr": 6e-3, "weight_decay": 0.05, "warmup_epochs": 1, "threads": 1},
}
ARMS: dict[str, dict[str, Any]] = {
    "generative": {},
    "without replay": {"method": {"weight": 0}},
    "joint training": {"data": {"num_tasks": 1}},
    # The head is fitted to the values that the model reads, so a single step of training is enough. The limit holds for
    # tests, too, so all samples of a task are one batch.
    "gda on the values": {
        "method": {"name": "generative+gda"},
        "train": {"epochs": 1, "limit_batches": 1, "eval_batch_size": 512},
    },
}


def measure(stream: str, arm: str, seed: int, out: Path, omniglot: Path | None, part: str) -> dict[str, Any]:
    """Accuracies in percent after every task, what follows from them, and the cost of this process."""
    where: dict[str, Any] = {"seed": seed, "out": str(out), "data": {"evaluate": part}}
    if stream == "letters":
        where["data"]["name"] = str(omniglot)
        if arm == "joint training":
            where["data"]["tasks"] = [_LETTERS]
    values = reduce(merge, (GENERATIVE, STREAMS[stream], ARMS[arm], where))
    began = time.process_time()
    matrix = run(load_config(values), quiet=True).matrix
    rows = [
        [round(100 * value, 2) for value in row if value == value] for row in matrix.class_incremental.values.tolist()
    ]
    found = {"aa": 100 * matrix.aa, "matrix": rows, "cpu": time.process_time() - began}
    if len(rows) > 1:
        found |= {"fm": 100 * matrix.fm(), "new": sum(row[-1] for row in rows) / len(rows)}
    return found | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


@torch.no_grad()
def figure(folder: Path, path: Path) -> None:
    """Draw four samples of each digit that a run's last model generates: what it would rehearse next."""
    model = infssm.load(folder).model
    drawn = model.head.generate(torch.arange(10).repeat_interleave(4), torch.Generator().manual_seed(0))
    pixels = (drawn.view(10, 4, *model.grid) * (255 / (model.levels - 1))).to(torch.uint8)
    sheet = F.pad(pixels, (0, 1, 0, 1), value=255).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
    Image.fromarray(sheet.numpy()).resize((8 * sheet.shape[1], 8 * sheet.shape[0]), Image.Resampling.NEAREST).save(path)


def table(stored: dict[str, Any]) -> list[str]:
    """One line per stream and arm, of test samples."""
    rows = []
    for stream in STREAMS:
        for arm in ARMS:
            runs = [one for key, one in stored.items() if key.startswith(f"{stream}, {arm}, test, ")]
            if runs:
                aa, fm, new = (spread([one[key] for one in runs if key in one]) for key in ("aa", "fm", "new"))
                each = ", ".join(f"{one['aa']:.1f}" for one in runs)
                cost = [spread([one[key] for one in runs], digits=0) for key in ("cpu", "mib")]
                rows.append([stream, arm, aa, each, fm, new, *cost])
    header = ["stream", "arm", "AA", "seeds", "FM", "new task", "processor, s", "memory, MiB"]
    return markdown_table(header, rows, numbers=2)


def main() -> None:
    """Measure what is asked for and not known, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=["digits"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", choices=("val", "test"), default="test")
    parser.add_argument("--omniglot", type=Path, help=".npz of the letters")
    parser.add_argument("--figure", type=Path, help="folder of a run on digits: draw what its model generates")
    parser.add_argument("--out", type=Path, default=Path("runs/generative"), help="folder of the runs")
    chosen = parser.parse_args()
    path = RESULTS / "generative.json"
    if chosen.figure:
        figure(chosen.figure, path.with_suffix(".png"))
    for stream in () if chosen.figure else chosen.streams:
        for arm in chosen.arms:
            for seed in chosen.seeds:
                key = f"{stream}, {arm}, {chosen.part}, {seed}"
                found = remembered(
                    chosen.out / f"{key}.json",
                    lambda where=(stream, arm, seed): measure(*where, chosen.out, chosen.omniglot, chosen.part),
                )
                # Read only now: another process may have measured something in the meantime.
                write_json(path, read_json(path) | {key: found, "machine": machine()})
                write_table(path.with_suffix(".md"), table(read_json(path)))
                print(key, {name: found[name] for name in ("aa", "cpu")}, flush=True)


if __name__ == "__main__":
    main()
