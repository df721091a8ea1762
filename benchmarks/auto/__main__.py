"""docs/results/auto.md: `inf-ssm-exact` with the weight it sets itself, beside no penalty, regime by regime.

    python -m benchmarks.auto --out RUNS                             # digits, with replay and heads, and language
    python -m benchmarks.auto --out RUNS --data-root DIR --bases B   # CIFAR-100 too; B: the --out of benchmarks.heads
    python -m benchmarks.auto --out RUNS --only cifar "heads: b50-5" --seeds 0 1
    python -m benchmarks.auto page                                   # from auto.json and sequences.json alone

RUNS keeps the runs: what is there is not trained again. The page keeps what it has of regimes that are left out, and
takes speech, pixels and language through ``infssm run`` from the runs of benchmarks.sequences.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.auto.language import language
from benchmarks.auto.page import pairs_of, write
from benchmarks.auto.regimes import GROUPS, NAME, Places
from benchmarks.pages import RESULTS, machine, read_json, remembered, write_json

SEEDS_OF_LANGUAGE = range(9)
ODD_SEED, ORDERS = 1, (101, 102, 103)
"""A seed in which old text fared badly, and other orders of its batches: is it the seed, or chance?"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "page"], default="all")
    parser.add_argument("--out", type=Path, help="folder for the runs")
    parser.add_argument("--data-root", type=Path, help="folder with cifar100.npz")
    parser.add_argument("--bases", type=Path, help="folder with the bases that benchmarks.heads made")
    parser.add_argument("--sequences", type=Path, default=RESULTS / "sequences.json", help="of benchmarks.sequences")
    parser.add_argument("--only", nargs="+", default=[""], help="regimes whose names begin so; 'language'")
    parser.add_argument("--seeds", nargs="+", type=int, help="of those that a regime has, these alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "auto.json"
    known = read_json(path)
    if args.what == "all":
        places = Places(args.out.resolve(), args.data_root, args.bases)
        for name, seed, measured in _measured(places, args.only, args.seeds):
            known.setdefault(name[0], {}).setdefault(name[1], {})[str(seed)] = measured
            print(f"{': '.join(name)}, seed {seed}: {measured}", flush=True)
            known["environment"] = machine()
            write_json(path, known)
    known["sequences"] = known.get("sequences", {}) | pairs_of(read_json(args.sequences))
    write_json(path, known)
    write(known)


def _measured(places: Places, only: list[str], seeds: list[int] | None) -> Iterator[tuple[tuple[str, str], int, Any]]:
    """Group and regime, seed, and what was found without a penalty and with it."""
    for group, regimes in GROUPS.items():
        for label, regime in regimes.items():
            if _wanted(f"{group}: {label}", only) and all(getattr(places, need) for need in regime.needs):
                for seed in regime.seeds:
                    if seeds is None or seed in seeds:
                        yield (group, label), seed, regime.measure(places, seed)
    if _wanted("language", only):
        for seed in SEEDS_OF_LANGUAGE:
            yield ("language", "seeds"), seed, [_kept(places.out, name, seed, None) for name in ("seq", NAME)]
        for order in ORDERS:
            yield ("language", "orders"), order, [_kept(places.out, name, ODD_SEED, order) for name in ("seq", NAME)]


def _wanted(name: str, only: list[str]) -> bool:
    return any(name.startswith(start) for start in only)


def _kept(out: Path, name: str, seed: int, order: int | None) -> list[list[float]]:
    """A run of the language stream, from its file where there is one."""
    path = out / "language" / (f"{name}-{seed}.json" if order is None else f"{name}-{seed}-{order}.json")
    return cast(list[list[float]], remembered(path, lambda: language(name, seed, order)))


if __name__ == "__main__":
    main()
