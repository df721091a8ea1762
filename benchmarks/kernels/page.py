"""`python -m benchmarks.kernels.page`: write docs/results/kernels.md from what the last `make bench` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pages import RESULTS, ROOT, markdown_table, read_json

PAGE = RESULTS / "kernels.md"
QUARTER = "... on a quarter"

# ruff: noqa: E501 - the lines of the page are those of the template
TEMPLATE = """\
# Kernels and training steps

The selective scan, forward and backward, takes 1/{scan_times:.0f} of the time of transformers' CPU path, and the states
that the methods compare come out of the same pass at {with_states:.2f} times its price. A training step with
`inf-ssm-exact`, the old model included, takes {exact_small:.2f} times a plain step of Vim-small and {exact_nano:.2f} times
one of Vim-nano; on a quarter of each batch {quarter_small:.2f} and {quarter_nano:.2f} times. A Mamba-2 layer is {mamba2:.1f}
times as fast as transformers', bounded by its projections, which both share.

All figures are of one run of the commands of `make bench BENCH=--cpu-time` on one machine:
{machine}.
Methods take turns, a few rounds each; the tables have the best reading in processor time, because other jobs ran beside
them. `python -m benchmarks.kernels.page` writes this page from that run.

## How fast is the scan?

Forward and backward at (batch, tokens, channels, n) = (4, 197, 768, 16).

{scan}

## How fast is the convolution?

Causal, depthwise, four taps and SiLU at (4, 197, 768), forward and backward.

{conv}

## What does a distance cost?

Value and gradient, from raw states; ms.

{distances}

`output`, `simplified` and `aligned` have compiled kernels. The others, which depend on the poles alone and are in no
recommended method, are formulas in PyTorch, in float64.

`output` of 1,024 systems with 64 states: sampling serves systems whose poles are not known, and where they are, the closed
form is faster.

{sampled}

## What does holding the states add to a step?

Times a plain step; in brackets the plain step in ms and over its matrix products alone.

{steps}

`fraction=0.25` compares old and new model on a quarter of each batch; the old model, without gradient, is most of a
penalty's price.

## How fast is a Mamba-2 layer?

Forward and backward at batch 4, 512 tokens, width 256, heads of 64, the same weights in both libraries.

{ssd}

## What does `accelerate` do for a model of transformers?

`MambaForCausalLM` with 2 layers, width 192, 197 tokens, batch 4, forward and backward.

{accelerated}

## Details

- Malloc thresholds are raised for all methods, so that none pays for mapping its memory anew
  (`benchmarks/kernels/measure.py`).
- Kernels are compiled for three instruction sets (baseline, AVX2, AVX-512), one of which is chosen at run time. The Triton
  kernels for GPUs are tested in Triton's interpreter and were never timed on a GPU.
- `infssm bench METHOD ...` times steps of any method, `infssm study distance-speed` every distance and
  `python -m benchmarks.kernels.loading` the decoding of images beside training steps.
- `make bench` prints every figure, medians too, and says which of the aims in `benchmarks/kernels` hold.
"""


def digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table(header, rows))


def compare(ms: dict[str, Any], names: dict[str, str], *more: dict[str, str]) -> list[list[str]]:
    """Rows of title, best ms and times the first; `names` maps keys of `ms` to titles."""
    first = ms[next(iter(names))]["best"]
    return [
        [title, digits(ms[key]["best"]), digits(ms[key]["best"] / first), *(column.get(key, "") for column in more)]
        for key, title in names.items()
    ]


def main() -> None:
    folder = ROOT / "build" / "bench"
    operations, steps, mamba2 = (read_json(folder / f"{name}.json") for name in ("operations", "steps", "mamba2"))
    ms, ratios, peaks = operations["ms"], operations["ratios"], operations["peak_mib"]
    scans = {"ours": "ours", "ours with states": "ours with states", "reference": "our reference in PyTorch"}
    scans |= {"mambapy": "mambapy's parallel scan", "transformers (mambapy)": "transformers' CPU path"}
    memory = {f"scan f+b: {key}": f"{peaks[key.partition(' (')[0]]:.0f}" for key in scans}
    kinds = ("output", "simplified", "aligned", "martin", "chordal", "geodesic")
    direct = {"simplified": "16: 2n x 2n Gram", "martin": "100: determinants"}
    distances = []
    for kind in kinds:
        found = [ms.get(f"distance f+b n={n}: {kind}") for n in (16, 100)]
        cells = ["" if timing is None else digits(timing["best"]) for timing in found]
        slow = ms[f"distance f+b n={direct[kind]}"]["best"] if kind in direct else None
        if slow:
            index = 0 if kind == "simplified" else 1
            cells[index] += f" (by the formula as published {digits(slow)})"
        distances.append([kind, *cells])
    cases = {"vim_small, batch 4": "Vim-small, batch 4", "vim_nano, batch 64": "Vim-nano, batch 64"}
    rows = {"states recorded": "states recorded", "inf-ssm": "`inf-ssm`", "inf-ssm-exact": "`inf-ssm-exact`"}
    rows[QUARTER] = "`inf-ssm-exact`, `fraction=0.25`"
    plain = [
        f"1 ({steps[case]['plain']['best_ms']:.0f} ms, {steps[case]['plain']['best_over_matmul']:.1f})"
        for case in cases
    ]
    of_steps = [["plain", *plain]]
    of_steps += [
        [title, *(f"{steps[case][key]['best_over_first']:.2f}" for case in cases)] for key, title in rows.items()
    ]
    layers = {"layer: ours": "ours", "layer: scan": "our scan token by token"}
    layers |= {"layer: transformers": "transformers' chunked PyTorch", "layer: projections alone": "projections alone"}
    ssd = []
    for key, title in layers.items():
        cells = []
        for n in (64, 128):
            of_n = mamba2[f"n = {n}"]
            peak = of_n["peak_mib"].get(key.removeprefix("layer: "))
            best, ours = of_n[key]["best"], of_n["layer: ours"]["best"]
            cells += [digits(best), f"{best / ours:.2f}", "" if peak is None else f"{peak:.0f}"]
        ssd.append([title, *cells])
    hub = steps["transformers"]
    page = TEMPLATE.format(
        machine=operations["machine"],
        scan_times=ratios["transformers / ours"][1],
        with_states=ratios["with states / without"][1],
        exact_small=steps["vim_small, batch 4"]["inf-ssm-exact"]["best_over_first"],
        exact_nano=steps["vim_nano, batch 64"]["inf-ssm-exact"]["best_over_first"],
        quarter_small=steps["vim_small, batch 4"][QUARTER]["best_over_first"],
        quarter_nano=steps["vim_nano, batch 64"][QUARTER]["best_over_first"],
        mamba2=mamba2["n = 128"]["layer: transformers"]["best"] / mamba2["n = 128"]["layer: ours"]["best"],
        scan=table(
            ["", "ms", "times ours", "peak MiB"],
            compare(ms, {f"scan f+b: {key}": title for key, title in scans.items()}, memory),
        ),
        conv=table(
            ["", "ms", "times ours"],
            compare(ms, {"conv f+b: ours": "ours", "conv f+b: torch.conv1d + silu": "`torch.conv1d` and SiLU"}),
        ),
        distances=table(["kind", "25,216 systems, n = 16", "1,024 systems, n = 100"], distances),
        sampled=table(
            ["", "ms", "times the kernel"],
            compare(
                ms,
                {
                    "distance f+b n=64: output": "closed form, kernel",
                    "distance f+b n=64: output, reference": "closed form, PyTorch",
                    "distance f+b n=64: output, 128 samples": "128 sampled frequencies, PyTorch",
                },
            ),
        ),
        steps=table(["", *cases.values()], of_steps),
        ssd=table(["", *(f"n = {n}, {unit}" for n in (64, 128) for unit in ("ms", "times ours", "peak MiB"))], ssd),
        accelerated=table(
            ["", "ms", "times accelerated"],
            [
                [title, digits(hub[key]["best_ms"]), digits(hub[key]["best_ms"] / hub["accelerated"]["best_ms"])]
                for key, title in (("accelerated", "accelerated"), ("transformers' own", "as it comes"))
            ],
        ),
    )
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
