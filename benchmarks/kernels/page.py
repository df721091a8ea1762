"""`python -m benchmarks.kernels.page`: what the last `make bench` measured, into docs/results/kernels.md."""

from __future__ import annotations

from typing import Any

from benchmarks.pages import RESULTS, ROOT, markdown_table, read_json, write_tables

PAGE = RESULTS / "kernels.md"
QUARTER = "... on a quarter"

ANSWER = """\
The selective scan, forward and backward, takes 1/{scan_times:.0f} of the time of transformers' CPU path, and the states
that the methods compare come out of the same pass at {with_states:.2f} times its price. A training step with
`inf-ssm-exact`, the old model included, takes {exact_small:.2f} times a plain step of Vim-small and {exact_nano:.2f}
times one of Vim-nano; on a quarter of each batch {quarter_small:.2f} and {quarter_nano:.2f} times. A Mamba-2 layer is
{mamba2:.1f} times as fast as transformers', bounded by its projections, which both share."""


def digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


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
    answer = ANSWER.format(
        scan_times=ratios["transformers / ours"][1],
        with_states=ratios["with states / without"][1],
        exact_small=steps["vim_small, batch 4"]["inf-ssm-exact"]["best_over_first"],
        exact_nano=steps["vim_nano, batch 64"]["inf-ssm-exact"]["best_over_first"],
        quarter_small=steps["vim_small, batch 4"][QUARTER]["best_over_first"],
        quarter_nano=steps["vim_nano, batch 64"][QUARTER]["best_over_first"],
        mamba2=mamba2["n = 128"]["layer: transformers"]["best"] / mamba2["n = 128"]["layer: ours"]["best"],
    )
    convs = {"conv f+b: ours": "ours", "conv f+b: torch.conv1d + silu": "`torch.conv1d` and SiLU"}
    sampled = {
        "distance f+b n=64: output": "closed form, kernel",
        "distance f+b n=64: output, reference": "closed form, PyTorch",
        "distance f+b n=64: output, 128 samples": "128 sampled frequencies, PyTorch",
    }
    accelerated = [
        [title, digits(hub[key]["best_ms"]), digits(hub[key]["best_ms"] / hub["accelerated"]["best_ms"])]
        for key, title in (("accelerated", "accelerated"), ("transformers' own", "as it comes"))
    ]
    of_scan = compare(ms, {f"scan f+b: {key}": title for key, title in scans.items()}, memory)
    of_ssd = [f"n = {n}, {unit}" for n in (64, 128) for unit in ("ms", "times ours", "peak MiB")]
    tables = {
        "answer": [answer],
        "machine": [f"The machine: {operations['machine']}."],
        "scan": markdown_table(["", "ms", "times ours", "peak MiB"], of_scan),
        "conv": markdown_table(["", "ms", "times ours"], compare(ms, convs)),
        "distances": markdown_table(["kind", "25,216 systems, n = 16", "1,024 systems, n = 100"], distances),
        "sampled": markdown_table(["", "ms", "times the kernel"], compare(ms, sampled)),
        "steps": markdown_table(["", *cases.values()], of_steps),
        "ssd": markdown_table(["", *of_ssd], ssd),
        "accelerated": markdown_table(["", "ms", "times accelerated"], accelerated),
    }
    write_tables(PAGE, tables)


if __name__ == "__main__":
    main()
