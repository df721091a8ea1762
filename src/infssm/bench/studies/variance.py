"""How much of the discretised transition's variance survives averaging over tokens, channels or states."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.bench.presets import paper_numbers
from infssm.bench.studies.study import Study, TrainedRun, axes, register_study
from infssm.errors import ConfigError
from infssm.models import SSMMixer, create_model
from infssm.ops import ScanInputs
from infssm.ssm import find_mixers

AXES = {"tokens": 1, "channels": 2, "states": 3}
_PAPER = {"tokens": "tau", "channels": "o", "states": "n"}


@register_study("variance")
def variance(
    *,
    run: str | os.PathLike[str] | None = None,
    task: int = -1,
    model: str | nn.Module | None = None,
    weights: str | None = None,
    images: int = 4,
    include_dt_bias: bool = True,
    seed: int = 0,
    data_root: str | None = None,
) -> Study:
    """Variance of Ā [batch, tokens, channels, states] along each axis, and what is left after averaging that axis.

    The paper's Table 5 can be read either way; population variances, so the two add up to the whole. From a run's model
    after ``task`` on its images, or from ``model`` (a name with ``weights``, or a module) on noise.
    ``include_dt_bias=False`` repeats the released code, which leaves the bias of the step size out.
    """
    if model is not None:
        module = create_model(model, weights=weights) if isinstance(model, str) else model
        generator = torch.Generator().manual_seed(seed)
        x, source = torch.randn(images, *_input_shape(module), generator=generator), str(type(module).__name__)
    else:
        trained = TrainedRun.open(run, data_root=data_root)
        module, x, source = trained.model(task), trained.images(images), str(run)
    rows: list[dict[str, Any]] = []
    for name, direction, scan in _scans(module.eval(), x):
        spread = axis_variances(discretised(scan, include_dt_bias=include_dt_bias))
        rows.append({"layer": name, "direction": direction, **spread})

    def over_rows(values: list[float]) -> dict[str, float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        return {"mean": float(tensor.mean()), "std": float(tensor.std(correction=0))}

    mean: dict[str, Any] = {"total": over_rows([row["total"] for row in rows])}
    for reading in ("along", "after"):
        mean[reading] = {axis: over_rows([row[reading][axis] for row in rows]) for axis in AXES}
    published = {row["averaged_dimension"]: row for row in paper_numbers()["variance_preserved_A_bar"]["rows"]}
    paper = {axis: {key: published[_PAPER[axis]][key] for key in ("mean", "std")} for axis in AXES}
    data: dict[str, Any] = {
        "source": source,
        "images": len(x),
        "include_dt_bias": include_dt_bias,
        "rows": rows,
        "mean": mean,
        "paper": paper,
    }
    total, left = mean["total"]["mean"], {axis: mean["after"][axis]["mean"] for axis in AXES}
    after = ", ".join(f"{k} {v:.2g} ({f'{100 * v / total:.0f} %' if total else '-'})" for k, v in left.items())
    along = ", ".join(f"{k} {mean['along'][k]['mean']:.2g}" for k in AXES)
    theirs = ", ".join(f"{k} {paper[k]['mean']:.4f}" for k in AXES)
    text = (
        f"Ā has variance {total:.2g}. Left after averaging over {after}; along {along}. Averaging over "
        f"{max(AXES, key=left.__getitem__)} keeps the most. The paper's Table 5 (ImageNet-R, Vim-small): {theirs}."
    )
    return Study("variance", data, _figure(data), text)


@torch.no_grad()
def discretised(scan: ScanInputs, *, include_dt_bias: bool = True) -> Tensor:
    """Ā = exp(Δ A) of one scan: [batch, tokens, channels, n]."""
    bias = scan.delta_bias if include_dt_bias else None
    delta = F.softplus(scan.delta if bias is None else scan.delta + bias)
    return torch.exp(delta.unsqueeze(-1) * scan.A)


def axis_variances(a: Tensor) -> dict[str, Any]:
    """Population variances of ``a: [batch, tokens, channels, n]`` in float64: total, along and after each axis.

    ``along``: variance along the axis, mean over the rest. ``after``: variance of what averaging the axis leaves.
    """
    a = a.double()
    return {
        "total": float(a.var(correction=0)),
        "along": {name: float(a.var(dim=axis, correction=0).mean()) for name, axis in AXES.items()},
        "after": {name: float(a.mean(dim=axis).var(correction=0)) for name, axis in AXES.items()},
    }


@torch.no_grad()
def _scans(model: nn.Module, x: Tensor) -> Iterator[tuple[str, int, ScanInputs]]:
    """The scans of every layer, one layer at a time so that little is held."""
    mixers = {name: mixer for name, mixer in find_mixers(model).items() if isinstance(mixer, SSMMixer)}
    any_scan = False
    for name, mixer in mixers.items():
        scans: list[ScanInputs] = []
        mixer.scan_hook = scans.append
        try:
            model(x)
        finally:
            mixer.scan_hook = None
        # Mamba-2 has one transition per head, so there is no variance over channels to speak of.
        for direction, scan in enumerate(x for x in scans if x.A.ndim == 2):
            any_scan = True
            yield name, direction, scan
    if not any_scan:
        raise ConfigError("the study reads the scans of Vim, Mamba and VMamba layers; this model has none of them")


def _input_shape(model: nn.Module) -> tuple[int, int, int]:
    size = getattr(model, "img_size", (224, 224))
    height, width = (size, size) if isinstance(size, int) else size
    first = next(p for p in model.parameters() if p.ndim == 4)
    return int(first.shape[1]), int(height), int(width)


def _figure(data: dict[str, Any]) -> Any:
    figure, panels = axes(2, width=4.6)
    for panel, (reading, title) in zip(
        panels, (("after", "left after averaging over ..."), ("along", "along ...")), strict=True
    ):
        mine = [data["mean"][reading][k] for k in AXES]
        paper = [data["paper"][k] for k in AXES]
        places = range(len(AXES))
        for shift, values, label in ((-0.2, mine, "measured"), (0.2, paper, "paper, Table 5")):
            heights = [v["mean"] for v in values]
            # On a logarithmic axis a bar's lower whisker must end above 0.
            spread = [[min(v["std"], 0.9 * v["mean"]) for v in values], [v["std"] for v in values]]
            panel.bar([p + shift for p in places], heights, 0.38, yerr=spread, capsize=3, label=label)
        panel.set_xticks(places, list(AXES))
        panel.set(yscale="log", title=title)
    panels[0].set_ylabel("variance of Ā")
    panels[1].legend(frameon=False, loc="upper right", fontsize=8)
    return figure
