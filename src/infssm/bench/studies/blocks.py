"""Regularize the last block, the last half, or all of them?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from infssm.bench.executors import Experiment, InProcess, gather, results
from infssm.bench.presets import main_job
from infssm.bench.studies.study import Study, axes, register_study
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, parse_overrides, to_dict
from infssm.learner.metrics import summarize
from infssm.learner.result import Result
from infssm.learner.store.directory import RunDirectory
from infssm.models import create_model
from infssm.ssm import find_mixers

_MEASURES = ("aa", "aia", "fm")


@register_study("blocks")
def blocks(
    *,
    run: str | os.PathLike[str] | None = None,
    method: str = "inf-ssm-exact",
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    out: str | os.PathLike[str] = "runs",
    data_root: str | None = None,
) -> Study:
    """Train a method on the states of the last layer, of the last half, and of all layers (Table 7).

    With ``run``, that run's set-up and its task-0 model; else the set-up of ``infssm run`` (digits). ``overrides``
    such as ``train.epochs=2`` shorten it. All start from one task-0 model per seed; plain training is the yardstick.
    """
    changes = merge(parse_overrides(overrides), {} if data_root is None else {"data": {"root": data_root}})
    by_label: dict[str, list[Result]] = {}
    for seed in seeds:
        configs = _configs(run, method, merge(changes, {"seed": seed, "out": os.fspath(out)}))
        jobs = [Experiment.of(config) for config in configs.values()]
        for label, result in zip(configs, results(gather(InProcess(), jobs, quiet=True)), strict=True):
            by_label.setdefault(label, []).append(result)
    rows: list[dict[str, Any]] = []
    for label, runs in by_label.items():
        table = summarize([result.matrix for result in runs])
        stds = {m: table[m].std for m in _MEASURES}
        spread = {m: None if std is None else 100 * std for m, std in stds.items()}
        rows.append({"blocks": label, **{m: 100 * table[m].mean for m in _MEASURES}, "std": spread})
    shown = "; ".join(f"{r['blocks']}: AA {r['aa']:.1f}, AIA {r['aia']:.1f}, FM {r['fm']:.1f}" for r in rows)
    text = (
        f"{method} over {len(seeds)} seed(s), percent: {shown}. AA is highest with "
        f"{max(rows[1:], key=lambda r: r['aa'])['blocks']}. The paper (Table 7) has AA rise with the number of blocks."
    )
    return Study("blocks", {"method": method, "seeds": list(seeds), "rows": rows}, _figure(rows), text)


def _configs(run: str | os.PathLike[str] | None, method: str, changes: dict[str, Any]) -> dict[str, RunConfig]:
    """Plain training first, then the method on ever more layers."""
    values, _ = main_job({"model": {}})
    if run is not None:
        directory = RunDirectory.open(run)
        values = directory.config()
        values["train"]["task0"] = str(directory.weights_path(0).resolve())
    base = to_dict(load_config(merge({**values, "method": {"name": "seq"}}, changes)))
    depth = len(find_mixers(create_model(base["model"]["name"], **base["model"]["options"])))
    configs = {"none (seq)": load_config(base)}
    for layers in sorted({1, max(1, depth // 2), depth}):
        label = f"all {depth}" if layers == depth else "last" if layers == 1 else f"last {layers}"
        configs[label] = load_config({**base, "method": {"name": method, "layers": layers}})
    return configs


def _figure(rows: list[dict[str, Any]]) -> Any:
    figure, panels = axes(3, width=3.2)
    for panel, measure in zip(panels, _MEASURES, strict=True):
        spread = None if rows[0]["std"][measure] is None else [r["std"][measure] for r in rows]
        colours = ["0.6", *["C0"] * (len(rows) - 1)]
        panel.bar(range(len(rows)), [r[measure] for r in rows], 0.6, yerr=spread, capsize=3, color=colours)
        panel.set_xticks(range(len(rows)), [r["blocks"] for r in rows], rotation=20)
        panel.set_title(f"{measure.upper()}, %" + (" (lower is better)" if measure == "fm" else ""))
    panels[1].set_xlabel("regularized blocks")
    return figure
