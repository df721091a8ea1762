"""docs/results/heads.md: which features, and which head on them, when no images may be kept.

    python -m benchmarks.heads b50-5 --data-root DIR --out RUNS     # DIR has cifar100.npz; about 150 runs of 15-110 s
    python -m benchmarks.heads digits --out RUNS                    # about 200 runs of 10-20 s
    python -m benchmarks.heads cost --data-root DIR --out RUNS      # time of a step
    python -m benchmarks.heads page                                 # from heads.json alone

RUNS keeps a file per run; what is there is not trained again. Arms, grids and seeds are in search.py, what a run
is in runs.py, the heads in fit.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.heads import views
from benchmarks.heads.cost import costs
from benchmarks.heads.fit import choose, fitted, load
from benchmarks.heads.page import write
from benchmarks.heads.runs import SEARCHED, Place, Spec
from benchmarks.heads.search import ARMS, PROTOCOLS, REPLAY, Protocol, Work, chosen, replay_of, search
from benchmarks.pages import RESULTS, machine, read_json, write_json
from benchmarks.pretrain import train as pretrain

FROZEN = "frozen"
LONGER, EPOCHS = "lwf-f", 3
"""The arm that is also trained longer on b50-5, and whose images are then looked at more than once."""


def place_of(protocol: str, data_root: Path | None, out: Path) -> Place:
    """Where things are; bases that are missing are trained, for half an hour each."""
    bases = {SEARCHED: "cifar100-base"}
    if protocol == "b50-5":
        assert data_root is not None
        for order in PROTOCOLS[protocol].seeds:
            path = out / f"base{order}" / "cifar100-base.safetensors"
            bases[order] = str(
                path if path.exists() else pretrain("cifar100-base", data_root, path.parent, None, order)
            )
    return Place(None if data_root is None else str(data_root), out, bases)


def measure(work: Work, protocol: Protocol, arms: list[str]) -> dict[str, Any]:
    """The search, then the chosen settings of every arm on the seeds to report."""
    grid = search(work, protocol, {name: (ARMS | REPLAY)[name] for name in arms})
    still = Spec(protocol.name, SEARCHED, FROZEN, {"name": "seq"}, 3e-4, protocol.search_tasks)  # no step is taken
    plan = {FROZEN: still} | {name: chosen(rows) for name, rows in grid.items() if name in ARMS}
    plan |= {
        f"{n}, {size} images": replay_of(chosen(grid[n]), size)
        for n in arms
        if n in REPLAY
        for size in protocol.buffers
    }
    longer = [plan[LONGER]._replace(epochs=EPOCHS)] if protocol.name == "b50-5" and LONGER in plan else []
    plan |= {f"{LONGER}, {EPOCHS} epochs": spec for spec in longer}
    work.go([still, *longer, *(spec._replace(seed=seed, tasks=6) for spec in plan.values() for seed in protocol.seeds)])
    before = {seed: load(work.place.file(still._replace(seed=seed, tasks=6))) for seed in protocol.seeds}
    found: dict[str, Any] = {"arms": {}, "search": {}}
    for name, rows in grid.items():
        found["search"][name] = [
            {"lr": s.rate, "weight": s.options.get("weight"), "aa": v.aa, "all": v.all, "both": v.both} for s, v in rows
        ]
    for name, spec in plan.items():
        found["arms"][name] = _scores(work, spec, before, protocol)
        print(f"{protocol.name}, {name}: fitted", flush=True)
    if longer:
        found["views"] = views.measure(work.place, still, longer[0], protocol.seeds)
    return found


def _scores(work: Work, spec: Spec, before: dict[int, Any], protocol: Protocol) -> dict[str, Any]:
    """An arm's test scores of all heads, by seed; the heads' settings are those of the searched base."""
    still = spec.arm == FROZEN
    settings = {
        d: choose(work.place.file(spec._replace(options=_searched(spec, protocol))), drift=d) for d in (True, False)
    }
    found: dict[str, Any] = {
        "lr": None if still else spec.rate,
        "weight": spec.options.get("weight"),
        "settings": {"drift" if d else "no drift": s._asdict() for d, s in settings.items()},
        "drift": [],
        "heads": {},
    }
    for seed in protocol.seeds:
        path = work.place.file(spec._replace(seed=seed, tasks=6))
        old, new = before[seed].parts["test"][0][0], load(path).parts["test"][0][0]
        found["drift"].append(float((new - old).square().sum() / (old - old.mean(dim=0)).square().sum()))
        for head, value in fitted(path, settings, still=still).items():
            found["heads"].setdefault(head, []).append(value._asdict())
    return found


def _searched(spec: Spec, protocol: Protocol) -> dict[str, Any]:
    """Options of the run that was searched: buffers of one size."""
    return dict(spec.options) | ({"buffer_size": protocol.buffers[0]} if spec.arm in REPLAY else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["b50-5", "digits", "cost", "page"])
    parser.add_argument("--out", type=Path, help="folder for the runs")
    parser.add_argument("--data-root", type=Path, help="folder with cifar100.npz")
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *REPLAY], choices=[*ARMS, *REPLAY])
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "heads.json"
    known = read_json(path)
    if args.what == "cost":
        known["costs"] = costs(Place(str(args.data_root), args.out, {SEARCHED: "cifar100-base"}), args.arms)
        write_json(path, known)
    for name, protocol in PROTOCOLS.items():
        if name.startswith(args.what):
            work = Work(place_of(name, args.data_root, args.out), args.jobs)
            known[name] = measure(work, protocol, args.arms) | {"environment": machine()}
            write_json(path, known)
    write(known)


if __name__ == "__main__":
    main()
