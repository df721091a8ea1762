"""docs/results/digits-replay.md and cifar.md: replay, prompt and frequency methods, with and without Inf-SSM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import machine, markdown_table, read_json, spread, write_json
from benchmarks.results.common import SEEDS, Bench, Outcome, gain, outcomes, short_table, table

BUFFER = {"digits-replay": 60, "cifar": 250}
REPLAY: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"er, mask {mask}": ("er", {"mask": mask}) for mask in ("full", "seen", "current+seen")},
    **{name: (name, {}) for name in ("der", "der++", "lucir")},
    "lucir, stronger fine-tuning": ("lucir", {"finetune_batch": 8, "finetune_lr": 0.1}),
    **{name: (name, {}) for name in ("x-der", "l2p-r", "clfd")},
}
ALONE = ("er, mask seen", "der", "der++", "lucir")
"""Bases shown on digits only, without a state penalty."""

PLUS = ("inf-ssm", "inf-ssm-exact")
UNMASKED = "seq, mask full"
"""The reference for replay methods with a softmax over all classes."""

ANSWER = {
    "digits-replay": """\
A buffer of 60 images raises AA from {seq} % (plain sequential training) to {er} % with `er` and {xder} % with
`x-der`. Adding a state penalty to a buffer does not help: `er+inf-ssm-exact` ends at {both} %. Without a buffer, a
softmax over all classes costs {mask} points, because the logits of old classes sink while none of their images is
seen.""",
    "cifar": """\
A buffer of 250 images raises AA from {seq} % (plain sequential training) to {er} % with `er` and {xder} % with
`x-der`. Without a buffer `inf-ssm-exact` gains {exact} points; added to a buffer, no state penalty helps
(`er+inf-ssm-exact`: {both} %). Without a buffer, a softmax over all classes costs {mask} points.""",
}
ER = "er, mask current+seen"
SHOWN = {
    "seq": "plain sequential training",
    "inf-ssm": "`inf-ssm`",
    "inf-ssm-exact": "`inf-ssm-exact`, automatic weight",
    UNMASKED: "`seq`, softmax over all classes",
    ER: "`er`",
    f"{ER}+inf-ssm": "`er+inf-ssm`",
    f"{ER}+inf-ssm-exact": "`er+inf-ssm-exact`",
    "x-der": "`x-der`",
}


def cifar_base(data_root: str | None) -> Mapping[str, Any]:
    part = _half_of_each_task(Path(data_root or ".").expanduser().resolve())
    return {
        "benchmark": "cifar50-5",
        "data": {"name": str(part), "num_tasks": 5, "train_per_class": 100, "test_per_class": 50},
        "model": {"name": "vim_nano", "options": {"patch_size": 8, "embed_dim": 64, "depth": 4}},
        "train": {"epochs": 3, "task0_epochs": 6, "batch_size": 32},
    }


def _half_of_each_task(root: Path) -> Path:
    """The first ten of each twenty classes of CIFAR-100, as an ``.npz`` beside ``cifar100.npz``."""
    part = root / "cifar50.npz"
    if part.exists():
        return part
    arrays = np.load(root / "cifar100.npz")
    kept = [c for c in range(100) if c % 20 < 10]
    label = np.full(100, -1)
    label[kept] = np.arange(50)
    found = {"classes": arrays["classes"][kept]}
    for half in ("train", "test"):
        mask = label[arrays[f"y_{half}"]] >= 0
        found |= {f"x_{half}": arrays[f"x_{half}"][mask], f"y_{half}": label[arrays[f"y_{half}"][mask]]}
    np.savez(part, **found)
    return part


def write(bench: Bench, folder: Path) -> None:
    stream, buffer = bench.name, BUFFER[bench.name]
    weight = float(read_json(folder / "digits.json")["weights"]["inf-ssm"])
    plus: dict[str, dict[str, Any]] = {"": {}, "+inf-ssm": {"weight": weight}, "+inf-ssm-exact": {}}
    methods: dict[str, tuple[str, dict[str, Any]]] = {"seq": ("seq", {})}
    methods |= {name: (name, plus[f"+{name}"]) for name in PLUS}
    methods[UNMASKED] = ("seq", {"mask": "full"})
    bases = {k: v for k, v in REPLAY.items() if stream != "cifar" or k not in ALONE}
    for label, (base, options) in bases.items():
        for name, more in plus.items() if label not in ALONE else [("", {})]:
            methods[f"{label}{name}"] = (f"{base}{name}", {**options, "buffer_size": buffer, **more})
    rows = bench.every_seed(methods)
    data = {
        "environment": machine(),
        "seeds": SEEDS,
        "methods": methods,
        "rows": {k: [o._asdict() for o in v] for k, v in rows.items()},
    }
    write_json(folder / f"{stream}.json", data)


def page(stream: str, data: Mapping[str, Any]) -> dict[str, list[str]]:
    """What of the page is computed, from what the JSON file holds."""
    rows = outcomes(data["rows"])
    weights = {k: f"{options['weight']:g}" for k, (_, options) in data["methods"].items() if "weight" in options}
    weights |= {k: ", ".join(f"{o.weight:.2g}" for o in v) for k, v in rows.items() if v[0].weight is not None}
    named = {"seq": "seq", "er": ER, "xder": "x-der", "both": f"{ER}+inf-ssm-exact"}
    answer = ANSWER[stream].format(
        **{key: spread([o.aa for o in rows[label]]) for key, label in named.items()},
        exact=gain(rows["inf-ssm-exact"], rows["seq"], "aa").removeprefix("+"),
        mask=gain(rows["seq"], rows[UNMASKED], "aa").removeprefix("+"),
    )
    return {
        "answer": [answer],
        "short": short_table(rows, SHOWN),
        "table": table(rows, weights),
        "gains": _gains(rows),
    }


def _gains(rows: Mapping[str, list[Outcome]]) -> list[str]:
    """What each method adds."""
    header = ["base", "AA - seq", "- seq, mask full"]
    for name in PLUS:
        header += [f"+{name}: AA", "task-inc. AA"]
    gains = []
    for label in ("seq", UNMASKED, *(k for k in REPLAY if k in rows)):
        base = rows[label]
        cells = ["-" if label == "seq" else gain(base, rows["seq"], "aa")]
        cells += ["-" if label in ("seq", UNMASKED) else gain(base, rows[UNMASKED], "aa")]
        for name in PLUS if label not in (UNMASKED, *ALONE) else ():
            other = rows[name] if label == "seq" else rows[f"{label}+{name}"]
            cells += [gain(other, base, key) for key in ("aa", "ti")]
        cells += ["-"] * (2 + 2 * len(PLUS) - len(cells))
        gains.append([label, *cells])
    return markdown_table(header, gains)
