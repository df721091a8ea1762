"""`python -m benchmarks [--json FILE] [--repeats N] [--sequential]`: one table per subject, methods interleaved.

The last table has the ratios, with the aim beside those that have one and whether the best readings keep it here."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.kernels import distances, memory
from benchmarks.kernels.distances import DistanceProblem
from benchmarks.kernels.measure import (
    Aim,
    Method,
    Timing,
    add_clock,
    exp_rate,
    interleaved,
    machine,
    matmul_rate,
    peak_memory,
    with_raised_malloc,
)
from benchmarks.kernels.scans import ScanProblem, forward_only
from benchmarks.pages import write_json
from infssm.ops import causal_conv1d

Table = dict[str, Timing]

KINDS = {"output": 20, "simplified": 20, "aligned": 20, "martin": 5, "chordal": 1, "geodesic": 1}
"""Distances that are timed, and how often at most: the last three have no kernel on CPUs."""

AIMS = {
    "mambapy / ours": Aim(20, at_least=True),
    "transformers / ours": Aim(20, at_least=True),
    "with states / without": Aim(1.1),
    "scan f+b / exp-only": Aim(3.0),
    "2n x 2n Gram / simplified": Aim(100, at_least=True),
    "n=100: aligned / simplified": Aim(2),
    "n=100: output / simplified": Aim(2),
}


def scan_methods(p: ScanProblem, sequential: bool, repeats: int) -> dict[str, Method]:
    methods = {
        "scan forward: ours": Method(forward_only(p.ours)),
        "scan forward: reference": Method(forward_only(lambda: p.ours("reference")), 2),
        "scan forward: mambapy": Method(forward_only(p.mambapy), repeats // 2),
        "scan forward: transformers (mambapy)": Method(forward_only(lambda: p.transformers(True)), repeats // 2),
        "scan f+b: ours": Method(lambda: p.backward(p.ours)),
        "scan f+b: ours with states": Method(p.with_states),
        "scan f+b: ours, states outside": Method(p.states_outside, repeats // 2),
        "scan f+b: reference": Method(lambda: p.backward(lambda: p.ours("reference")), 2),
        "scan f+b: mambapy": Method(lambda: p.backward(p.mambapy), repeats // 2),
        "scan f+b: transformers (mambapy)": Method(lambda: p.backward(lambda: p.transformers(True)), repeats // 2),
    }
    if sequential:
        methods["scan f+b: transformers (sequential)"] = Method(lambda: p.backward(lambda: p.transformers(False)), 0)
    return methods


def conv_methods() -> dict[str, Method]:
    """x is the first half of in_proj's output, as in a Mamba block."""
    x = torch.randn(4, 197, 1536)[..., :768].requires_grad_()
    weight, bias = torch.randn(768, 4, requires_grad=True), torch.randn(768, requires_grad=True)
    grad = torch.randn(4, 197, 768)

    def ours() -> torch.Tensor:
        return causal_conv1d(x, weight, bias)

    def theirs() -> torch.Tensor:
        return F.silu(F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=3, groups=768)[..., :197]).mT

    return {
        f"conv f+b: {name}": Method(lambda call=call: torch.autograd.grad(call(), (x, weight, bias), grad))
        for name, call in (("ours", ours), ("torch.conv1d + silu", theirs))
    }


def distance_methods() -> dict[str, Method]:
    problems = {16: DistanceProblem(memory.TOKENS, 16), 100: DistanceProblem(1024, 100)}
    methods = {
        f"distance f+b n={n}: {kind}": Method(partial(problem.ours, kind), repeats)
        for n, problem in problems.items()
        for kind, repeats in KINDS.items()
        if n == 16 or repeats > 1  # with 100 states the last two take most of a minute
    }
    (small, large), middle = problems.values(), DistanceProblem(1024, 64)
    return methods | {
        "distance f+b n=16: 2n x 2n Gram": Method(lambda: small.formula(distances.joint_gram), 3),
        "distance f+b n=16: three Grams": Method(lambda: small.formula(distances.three_grams), 3),
        "distance f+b n=16: closed form": Method(lambda: small.formula(distances.closed_form), 5),
        "distance f+b n=64: output": Method(lambda: middle.ours("output")),
        "distance f+b n=64: output, reference": Method(lambda: middle.ours("output", "reference"), 5),
        "distance f+b n=64: output, 128 samples": Method(lambda: middle.sampled(128), 5),
        "distance f+b n=100: determinants": Method(lambda: large.formula(distances.determinants), 3),
    }


def summary(table: Table, exp_only: float) -> dict[str, tuple[float, float]]:
    """The ratios that matter: of medians, and of minima (the better reading on a busy machine)."""

    def ratio(slow: str, fast: str) -> tuple[float, float]:
        return table[slow].median / table[fast].median, table[slow].best / table[fast].best

    ours, martin = "scan f+b: ours", "distance f+b n=100: martin"
    return {
        "mambapy / ours": ratio("scan f+b: mambapy", ours),
        "transformers / ours": ratio("scan f+b: transformers (mambapy)", ours),
        "reference / ours": ratio("scan f+b: reference", ours),
        "with states / without": ratio("scan f+b: ours with states", ours),
        "scan f+b / exp-only": (table[ours].median / exp_only, table[ours].best / exp_only),
        "torch conv / ours": ratio("conv f+b: torch.conv1d + silu", "conv f+b: ours"),
        "2n x 2n Gram / simplified": ratio("distance f+b n=16: 2n x 2n Gram", "distance f+b n=16: simplified"),
        **{
            f"n=100: {kind} / simplified": ratio(f"distance f+b n=100: {kind}", "distance f+b n=100: simplified")
            for kind in ("aligned", "output")
        },
        "n=100: determinants / martin": ratio("distance f+b n=100: determinants", martin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of the fast methods")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sequential", action="store_true", help="also time transformers' step-by-step path (slow)")
    add_clock(parser)
    options = parser.parse_args()
    with_raised_malloc()
    torch.set_num_threads(options.threads)

    problem = ScanProblem(*memory.SCAN)
    table: Table = {}
    table |= interleaved(scan_methods(problem, options.sequential, options.repeats), options.repeats, options.clock)
    table |= interleaved(conv_methods(), options.repeats, options.clock)
    table |= interleaved(distance_methods(), options.repeats, options.clock)
    rates = {"exp, G/s": exp_rate(options.clock) / 1e9, "torch.mm, GFLOP/s": matmul_rate(options.clock) / 1e9}
    peaks = {job: peak_memory(job) for job in (*memory.SCAN_JOBS, *memory.DISTANCE_JOBS)}
    rates["exp-only time of scan f+b, ms"] = 2 * problem.size / rates["exp, G/s"] / 1e6
    ratios = summary(table, rates["exp-only time of scan f+b, ms"])

    print(f"scan at (batch, tokens, channels, n) = {memory.SCAN}; {machine()}\n")
    print(f"{'':42}{'median ms':>11}{'best ms':>11}{'runs':>6}")
    for name, timing in table.items():
        print(f"{name:42}{timing.median:11.2f}{timing.best:11.2f}{timing.repeats:6d}")
    for title, values in (("peak MiB, forward + backward", peaks), ("rates", rates)):
        print(f"\n{title}")
        for name, value in values.items():
            print(f"{name:42}{value:11.2f}")
    print(f"\n{'ratios':42}{'of medians':>11}{'of best':>11}")
    for name, (median, best) in ratios.items():
        verdict = AIMS[name].verdict(best) if name in AIMS else ""
        print(f"{name:42}{median:11.2f}{best:11.2f}   {verdict}".rstrip())
    if options.json:
        figures = {name: asdict(timing) for name, timing in table.items()}
        result = {"machine": machine(), "ms": figures, "peak_mib": peaks, "rates": rates, "ratios": ratios}
        write_json(options.json, result)


if __name__ == "__main__":
    main()
