"""docs/results/sequences.md: language one domain after the other, spoken digits by speaker and by class.

    python -m benchmarks.sequences --out RUNS --data-root DIR      # RUNS keeps the run directories, resumable

All arms of a seed start from the task-0 model that plain training made. Nothing is chosen: every setting that was run
is in the tables and in the figure. Without --data-root the spoken digits are left out; --text FOLDER adds a stream of
your own text (a folder per domain, in order of their names).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import ROOT, machine

FOLDER = ROOT / "docs" / "results"
RATE = 2e-3
SMALL = {"d_model": 64, "n_layer": 2}
LANGUAGE: dict[str, Any] = {
    "data": {"by": "domain", "options": {"length": 128, "limit": 150_000}},
    "model": {"name": "mamba_lm_nano", "options": SMALL},
    "train": {
        "epochs": 1,
        "task0_epochs": 4,
        "batch_size": 8,
        "lr": RATE,
        "min_lr": RATE / 10,
        "warmup_lr": RATE / 10,
        "warmup_epochs": 0.1,
        "weight_decay": 0.01,
        "threads": 1,
        "accelerator": "cpu",
    },
}
SPEECH: dict[str, Any] = {
    "data": {"name": "speech-digits", "bands": 40, "train_per_class": 20},
    "model": {"options": SMALL},
    "train": {"epochs": 4, "task0_epochs": 10, "batch_size": 16, "lr": RATE, "threads": 1, "accelerator": "cpu"},
}
STREAMS: dict[str, dict[str, Any]] = {
    "speakers": {"data": {"by": "speaker", "num_tasks": 6}},
    "digits": {"data": {"by": "class", "num_tasks": 5, "train_per_class": 10}},
}
MODELS = ("mamba_nano", "s4d_nano")


class Arm(NamedTuple):
    """One setting: what it is called, the family whose points are joined in the figure, what it changes."""

    label: str
    family: str
    method: dict[str, Any]
    lr: float = RATE


def _lwf(weight: float, **more: Any) -> dict[str, Any]:
    name = "lwf+inf-ssm-exact" if more else "lwf"
    return {"name": name, "lwf": {"weight": weight, "temperature": 1.0}, **more}


PLAIN = [Arm(f"plain, lr {lr:g}", "plain", {"name": "seq"}, lr) for lr in (RATE, 1e-3, 3e-4, 1e-4)]
ARMS: list[Arm] = [
    *PLAIN,
    *(Arm(f"lwf {w:g}", "lwf", _lwf(w)) for w in (0.3, 0.5, 1.0)),
    *(
        Arm(f"lwf {w:g} + output 10", "lwf + output", _lwf(w, **{"inf-ssm-exact": {"weight": 10.0}}))
        for w in (0.3, 0.5)
    ),
    *(Arm(f"output {w:g}", "inf-ssm-exact", {"name": "inf-ssm-exact", "weight": float(w)}) for w in (10, 100)),
    *(Arm(f"lwf-ac {w:g}", "lwf-ac", {"name": "lwf-ac", "weight": float(w)}) for w in (10, 100)),
    Arm("frozen", "frozen", {"name": "frozen"}),
    Arm("er, 100 samples", "er", {"name": "er", "buffer_size": 100}),
]
SPOKEN: list[Arm] = [
    PLAIN[0],
    PLAIN[2],
    Arm("frozen", "frozen", {"name": "frozen"}),
    Arm("lwf 1", "lwf", {"name": "lwf"}),
    Arm("lwf-ac 1e4", "lwf-ac", {"name": "lwf-ac"}),
    Arm("inf-ssm-exact, auto", "inf-ssm-exact", {"name": "inf-ssm-exact"}),
    Arm("lwf 1 + inf-ssm-exact, auto", "lwf + output", {"name": "lwf+inf-ssm-exact"}),
    Arm("er, 60 samples", "er", {"name": "er", "buffer_size": 60}),
]


class Point(NamedTuple):
    """What a run ended with: mean over tasks, forgetting, value on the newest task, all as the measure has them."""

    mean: float
    forgetting: float
    newest: float
    seconds: float


def go(base: Mapping[str, Any], arms: Iterable[Arm], seed: int, out: Path) -> dict[str, Point]:
    """Run all arms of a seed, those that are there already excepted."""
    from infssm.train import load_config, merge, run, run_path

    common = merge(base, {"seed": seed, "out": str(out)})
    first = load_config(merge(common, {"method": {"name": "seq"}}))
    found = {}
    for arm in arms:
        values = merge(common, {"method": arm.method, "train": {"lr": arm.lr, "min_lr": arm.lr / 10}})
        if arm is not PLAIN[0]:
            start = str(run_path(first) / "checkpoints" / "task_00.safetensors")
            values = merge(values, {"train": {"task0": start}})
        else:
            values = merge(common, {"method": {"name": "seq"}})
        result = run(load_config(values), quiet=True)
        last = float(result.matrix.values[-1, -1])
        found[arm.label] = Point(result.aa, result.fm, last, result.seconds)
        print(f"seed {seed} {arm.label}: {found[arm.label]}", flush=True)
    return found


def tables(points: Mapping[str, Sequence[Point]], arms: Sequence[Arm], *, bits: bool) -> list[str]:
    """Rows of a table; for language beside plain training."""
    plain = points[PLAIN[0].label]
    head = ["old domain and new, mean", "forgetting", "newest"] if bits else ["AA, %", "FM, points", "newest task, %"]
    more = ["forgetting of plain", "newest, of plain"] if bits else []
    lines = [f"| arm | {' | '.join([*head, *more])} |", "|---" * (len(head) + len(more) + 1) + "|"]
    for arm in arms:
        rows = points[arm.label]
        cells = [_spread([getattr(p, key) for p in rows], bits=bits) for key in ("mean", "forgetting", "newest")]
        if bits:
            lost = [100 * p.forgetting / q.forgetting for p, q in zip(rows, plain, strict=True)]
            new = [100 * (p.newest / q.newest - 1) for p, q in zip(rows, plain, strict=True)]
            cells += [f"{statistics.mean(lost):.0f} %", f"{statistics.mean(new):+.1f} %"]
        lines.append(f"| {arm.label} | {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], *, bits: bool) -> str:
    scale, digits = (1.0, 3) if bits else (100.0, 1)
    text = f"{scale * statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {scale * statistics.stdev(values):.{digits}f}"


def draw(points: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Forgetting against the newest domain, a line per family; plain training at its learning rates is the curve."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6))
    for family in dict.fromkeys(arm.family for arm in ARMS):
        labels = [arm.label for arm in ARMS if arm.family == family and arm.label in points]
        x, y = ([statistics.mean(getattr(p, k) for p in points[n]) for n in labels] for k in ("newest", "forgetting"))
        axes.plot(
            x, y, "o--" if family == "plain" else "o-", label=family, color="black" if family == "plain" else None
        )
        for name, a, b in zip(labels, x, y, strict=True):
            axes.annotate(
                name.removeprefix(f"{family} "), (a, b), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    axes.set_xlabel("bits per byte of the newest domain (left is better)")
    axes.set_ylabel("forgetting of the old domain, bits per byte (down is better)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder for run directories")
    parser.add_argument("--data-root", help="folder that holds the spoken digits")
    parser.add_argument("--text", help="a folder of text with a folder per domain, as a further stream")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 10, 100])
    parser.add_argument("--only", choices=["language", "speech"], help="run one part alone; the page keeps the other")
    args = parser.parse_args()
    from infssm.train import merge

    path = FOLDER / "sequences.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    streams = {"stdlib-text": {"data": {"name": "stdlib-text", "num_tasks": 2, "tasks": [["topics"], ["source"]]}}}
    if args.text:
        streams["text"] = {"data": {"name": f"text:{args.text}", "num_tasks": len([*Path(args.text).iterdir()])}}
    for name, stream in streams.items() if args.only != "speech" else ():
        stored[name] = _all(merge(LANGUAGE, stream), ARMS, args)
    if args.data_root and args.only != "language":
        for name, stream in STREAMS.items():
            for model in MODELS:
                data = {"data": {"root": args.data_root}, "model": {"name": model}}
                base = merge(merge(SPEECH, stream), data)
                stored[f"{name}, {model}"] = _all(base, SPOKEN, args)
    stored["machine"] = machine()
    path.write_text(json.dumps(stored, indent=1) + "\n")
    write_page(stored)


def _all(base: Mapping[str, Any], arms: Sequence[Arm], args: Any) -> dict[str, list[Point]]:
    runs = [go(base, arms, seed, args.out.resolve()) for seed in args.seeds]
    return {arm.label: [run[arm.label] for run in runs] for arm in arms}


def write_page(stored: Mapping[str, Any]) -> None:
    """The tables between the page's markers, and the figure; the words around them are kept."""
    page = FOLDER / "sequences.md"
    text = page.read_text() if page.exists() else "# Sequences\n"
    for name, rows in stored.items():
        if name == "machine":
            continue
        points = {label: [Point(*p) for p in found] for label, found in rows.items()}
        bits = "," not in name
        arms = [arm for arm in (ARMS if bits else SPOKEN) if arm.label in points]
        if name == "stdlib-text":
            draw(points, FOLDER / "sequences.png")
        text = _between(text, name, "\n".join(tables(points, arms, bits=bits)))
    page.write_text(text)


def _between(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->\n", "\n<!-- end -->"
    if start not in text:
        return f"{text}\n## {name}\n\n{start}{content}{end}\n"
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


if __name__ == "__main__":
    main()
