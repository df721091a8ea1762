"""docs/results/sequences.md: language one domain after the other, spoken digits, pixels; every arm on one search.

    python -m benchmarks.sequences.manpages --out MANUALS                    # manual pages in six languages
    python -m benchmarks.sequences.manpages --out LARGE --bytes 1000000 --vocabulary 2048 --languages en de fr
    python -m benchmarks.sequences --out RUNS --data-root DIR --manuals MANUALS --pretrained WEIGHTS
    python -m benchmarks.sequences page                            # from sequences.json alone

RUNS keeps the run directories: what is there is not trained again. All arms of a seed start from the task-0 model
that plain training made. Every setting is run with every seed; which one of a family is put forward is decided on
validation samples, the figures are of test samples. DIR holds the spoken digits and cifar100.npz, WEIGHTS the public
S4D weights; what is not given is left out, and the page keeps what it has.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pages import RESULTS, machine, read_json, remembered, write_json
from benchmarks.sequences.arms import (
    LARGER,
    MANUALS,
    PRESET,
    PRESET_RATE,
    RATE,
    SIX,
    SPEECH_MODELS,
    SPEECH_STREAMS,
    STDLIB,
    Arm,
    Stream,
    larger_arms,
    pixel_stream,
    several_arms,
    speech_stream,
    text_stream,
)
from benchmarks.sequences.page import Point, write_page
from infssm.bench.running import run, run_path
from infssm.data import Split
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.devices import launch
from infssm.learner.evaluate import evaluate_seen
from infssm.learner.setup import build, load_weights
from infssm.learner.store.directory import RunDirectory

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SEEDS = [0, 10, 100]


def configs(stream: Stream, seed: int, out: Path) -> list[tuple[Arm, RunConfig]]:
    """The runs of a seed; the first makes the task-0 model that the others start from."""
    common = merge(stream.base, {"seed": seed, "out": str(out)})
    if stream.weights:
        common = merge(common, {"model": {"weights": str(stream.weights[SEEDS.index(seed) % len(stream.weights)])}})
    found: list[tuple[Arm, RunConfig]] = []
    for arm in stream.arms:
        values = merge(common, {"method": arm.method, "train": {"lr": arm.lr, "min_lr": arm.lr / 10, "lr_scale": 1.0}})
        if found:
            start = run_path(found[0][1]) / "checkpoints" / "task_00.safetensors"
            values = merge(values, {"train": {"task0": arm.start or str(start)}})
        found.append((arm, load_config(values)))
    return found


def point(config: RunConfig) -> Point:
    """Train, unless the run is there; what it ended with, and what its last model has on validation samples."""
    result = run(config, quiet=True)
    path = run_path(config)
    validation = load_config(merge(RunDirectory.open(path).config(), {"data": {"evaluate": "val"}}))
    kept = path.with_suffix(".validation-tasks.json")
    by_task = remembered(kept, lambda: launch(validation.train, _validated, validation, path))
    return Point(result.aa, result.fm, float(result.matrix.values[-1, -1]), by_task, result.seconds)


def _validated(fabric: Fabric, config: RunConfig, path: Path) -> list[float]:
    """The last model's value on validation samples of each task."""
    directory = RunDirectory.open(path)
    last = directory.saved_task(None)
    setup = build(config, fabric.device, Split.load(directory.split_path), weights=False)
    load_weights(setup.method, directory.weights_path(last))
    return [score.value for score in evaluate_seen(fabric, setup, last)]


def streams(args: argparse.Namespace) -> list[Stream]:
    """What can be run with what was given, in the order that was asked for."""
    found = [
        text_stream("stdlib-text", STDLIB),
        text_stream("four domains", PRESET, several_arms(PRESET_RATE, 4)),
    ]
    if args.manuals:
        name = {"data": {"name": f"text:{args.manuals}"}}
        found.append(text_stream("manuals", merge(MANUALS, name)))
        found.append(text_stream("six languages", merge(SIX, name), several_arms(RATE, 6)))
    if args.larger:
        tokenizer = {"tokenizer": str(args.larger / "tokenizer.json")}
        name = {"data": {"name": f"text:{args.larger}", "options": tokenizer}}
        found.append(text_stream("larger model", merge(LARGER, name), larger_arms()))
    if args.data_root:
        found += [speech_stream(kind, model, args.data_root) for kind in SPEECH_STREAMS for model in SPEECH_MODELS]
    if args.data_root and args.pretrained:
        found.append(pixel_stream(args.data_root, args.pretrained, args.out))
    return [stream for name in args.only for stream in found if stream.name.startswith(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only_page", nargs="?", choices=["page"], help="write the page again and train nothing")
    parser.add_argument("--out", default=Path("runs"), type=Path, help="folder for run directories")
    parser.add_argument("--data-root", help="folder that holds the spoken digits and cifar100.npz")
    parser.add_argument("--manuals", help="folder that python -m benchmarks.sequences.manpages made")
    parser.add_argument("--larger", type=Path, help="another one, with a tokenizer, for the larger model")
    parser.add_argument("--pretrained", help="folder with the public S4D weights, *.pth")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", default=[""], help="streams whose names begin so, such as 'digits, s4d'")
    parser.add_argument("--arms", nargs="+", default=[""], help="arms whose names begin so; the page keeps the others")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.larger = args.larger and args.larger.resolve()
    path = RESULTS / "sequences.json"
    stored = read_json(path)
    for seed in () if args.only_page else args.seeds:
        for stream in streams(args):
            rows = stored.setdefault(stream.name, {"arms": {}, "bits": stream.bits})
            for number, (arm, config) in enumerate(configs(stream, seed, args.out)):
                if number and not arm.label.startswith(tuple(args.arms)):  # the first makes the task-0 model
                    continue
                found = point(config)
                rows["arms"].setdefault(arm.label, {"family": arm.family, "points": {}})["points"][str(seed)] = found
                print(f"{stream.name} seed {seed} {arm.label}: {found}", flush=True)
                write_json(path, {**stored, "machine": machine()})
    write_page(stored)


if __name__ == "__main__":
    main()
