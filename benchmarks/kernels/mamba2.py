"""`python -m benchmarks.kernels.mamba2 [--threads N] [--repeats N] [--json FILE]`: Mamba-2 beside transformers.

Forward and backward at batch 4, 512 tokens, width 256, heads of 64, of one layer and of a language model of two;
methods interleaved: this library, its scan token by token, transformers' chunked PyTorch, and the layer's two
projections alone, which all methods share. Then the peak memory of a layer, each method in a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infssm.models.mamba2
import infssm.ops.ssd
from benchmarks.kernels.measure import (
    Aim,
    Clock,
    Method,
    add_clock,
    interleaved,
    machine,
    peak_memory,
    with_raised_malloc,
)
from benchmarks.kernels.memory import resident
from benchmarks.pages import write_json
from infssm._torchvision import torchvision
from infssm.models import create_model

BATCH, TOKENS, WIDTH, HEAD = 4, 512, 256, 64
AIMS = {"transformers / ours": Aim(4, at_least=True), "memory: ours / scan": Aim(1.2)}
JOBS = ("ours", "scan", "transformers")


class Problem:
    """The same weights in both libraries, one layer or a whole language model."""

    def __init__(self, n: int, *, whole: bool, tokens: int = TOKENS) -> None:
        torchvision()  # transformers imports it; this makes a CPU torch with a CUDA torchvision work
        from transformers import Mamba2Config, Mamba2ForCausalLM

        torch.manual_seed(0)
        ours = create_model("mamba2_lm_nano", d_model=WIDTH, n_layer=2, d_state=n, headdim=HEAD)
        sizes = {"hidden_size": WIDTH, "state_size": n, "head_dim": HEAD, "num_heads": 2 * WIDTH // HEAD}
        options = {"n_groups": 1, "expand": 2, "num_hidden_layers": 2, "vocab_size": 256, "tie_word_embeddings": False}
        theirs = Mamba2ForCausalLM(Mamba2Config(**sizes, **options))
        theirs.load_state_dict({k.replace("embedding.", "embeddings."): v for k, v in ours.state_dict().items()})
        self.x: Tensor
        if whole:
            self.ours: nn.Module = ours
            self.theirs: Callable[[Tensor], Tensor] = lambda x: theirs(x, use_cache=False).logits
            self.x, width = torch.randint(256, (BATCH, tokens)), 256
        else:
            self.ours, self.theirs = ours.backbone.layers[0].mixer, theirs.backbone.layers[0].mixer
            self.x, width = torch.randn(BATCH, tokens, WIDTH, requires_grad=True), WIDTH
        self.grad = torch.randn(BATCH, tokens, width)
        self.parameters = {"ours": list(ours.parameters()), "theirs": list(theirs.parameters())}

    def run(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        for parameter in (*self.parameters["ours"], *self.parameters["theirs"], self.x):
            parameter.grad = None
        y = model(self.x)
        y.backward(self.grad)
        return y

    def by_scan(self, x: Tensor) -> Tensor:
        """Ours, token by token."""
        ssd, layer = infssm.ops.ssd, infssm.models.mamba2
        kept, ssd.LEAST_STATES = ssd.LEAST_STATES, dict.fromkeys(ssd.LEAST_STATES, sys.maxsize)
        can_fuse, layer.can_fuse = layer.can_fuse, lambda _: False
        try:
            return self.ours(x)
        finally:
            ssd.LEAST_STATES, layer.can_fuse = kept, can_fuse

    def projections(self, x: Tensor) -> Tensor:
        wide = F.linear(x, self.ours.in_proj.weight)
        return F.linear(wide[..., : 2 * WIDTH].contiguous(), self.ours.out_proj.weight)

    def calls(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {"ours": self.ours, "scan": self.by_scan, "transformers": self.theirs}


def print_memory(job: str, n: int) -> None:
    warm = Problem(n, whole=False, tokens=16)
    warm.run(warm.calls()[job])  # load everything
    problem = Problem(n, whole=False)
    before = resident("VmRSS")
    problem.run(problem.calls()[job])
    print(resident("VmHWM") - before)


def report(n: int, repeats: int, clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    print(f"\nn = {n}{'':28}{'median ms':>11}{'best ms':>11}")
    ratios = {}
    for what, whole in (("layer", False), ("model", True)):
        problem = Problem(n, whole=whole)
        calls = problem.calls()
        apart = (problem.run(calls["ours"]) - problem.run(calls["transformers"])).abs().max().item()
        if not whole:
            calls["projections alone"] = problem.projections
        methods = {f"{what}: {name}": Method(partial(problem.run, call)) for name, call in calls.items()}
        table = interleaved(methods, repeats, clock)
        for name, timing in table.items():
            print(f"{name:34}{timing.median:11.1f}{timing.best:11.1f}")
            found[name] = asdict(timing)
        print(f"{what}: largest difference of outputs {apart:.1e}")
        for name in ("transformers", "scan"):
            slow, fast = table[f"{what}: {name}"], table[f"{what}: ours"]
            ratios[f"{what}: {name} / ours"] = slow.median / fast.median, slow.best / fast.best
    for name, (median, best) in ratios.items():
        aim = AIMS.get(name.partition(": ")[2])
        print(f"{name:34}{median:11.2f}{best:11.2f}   {aim.verdict(best) if aim else ''}".rstrip())
    peaks = {job: peak_memory("--memory", job, str(n), module="benchmarks.kernels.mamba2") for job in JOBS}
    print("layer: peak MiB: " + ", ".join(f"{job} {peak:.1f}" for job, peak in peaks.items()))
    share = peaks["ours"] / peaks["scan"]
    print(f"{'memory: ours / scan':34}{'':11}{share:11.2f}   {AIMS['memory: ours / scan'].verdict(share)}")
    return found | {"peak_mib": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.mamba2", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of every method")
    add_clock(parser)
    parser.add_argument("--default-malloc", action="store_true", help="the allocator as it is, for all methods")
    parser.add_argument("--memory", nargs=2, metavar=("JOB", "N"), help="print the peak of one job in MiB, and stop")
    options = parser.parse_args()
    if options.memory:
        print_memory(options.memory[0], int(options.memory[1]))
        return
    if not options.default_malloc:
        with_raised_malloc("benchmarks.kernels.mamba2")
    torch.set_num_threads(options.threads)
    malloc = "default" if options.default_malloc else "raised"
    print(f"batch {BATCH}, {TOKENS} tokens, width {WIDTH}, heads of {HEAD}; {options.threads} threads, {malloc} malloc")
    print(machine())
    found = {f"n = {n}": report(n, options.repeats, options.clock) for n in (64, 128)}
    if options.json:
        write_json(options.json, found | {"machine": machine()})


if __name__ == "__main__":
    main()
