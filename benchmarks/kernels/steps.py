"""`python -m benchmarks.steps [--json FILE]`: training steps with and without Inf-SSM, beside their matmul time.

Vim-small at batch 4 and Vim-nano at batch 64, interleaved in one run: a plain step, one that records states, and steps
with `inf-ssm`, with `inf-ssm-exact` and with it on a quarter of the batch (`fraction`), the old model's forward
included. Then transformers' Mamba with and without ours.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import infssm
from benchmarks.kernels.measure import (
    Aim,
    Method,
    Timing,
    add_clock,
    interleaved,
    machine,
    matmul_rate,
    with_raised_malloc,
)
from benchmarks.pages import write_json

CASES: dict[str, dict[str, Any]] = {
    "vim_small, batch 4": {"name": "vim_small_patch16_224", "options": {"num_classes": 200}, "shape": (4, 3, 224, 224)},
    "vim_nano, batch 64": {"name": "vim_nano", "options": {"num_classes": 100}, "shape": (64, 3, 32, 32)},
}

QUARTER = "... on a quarter"
# Of the best readings: a plain step over its matrix products alone, and a step with Inf-SSM over a plain one.
AIMS = {
    "vim_small, batch 4": {"plain": Aim(1.9), "inf-ssm-exact": Aim(1.30), QUARTER: Aim(1.12)},
    "vim_nano, batch 64": {"plain": Aim(4.0), "inf-ssm-exact": Aim(1.35), QUARTER: Aim(1.12)},
}


class Trained:
    """A model with its optimizer, and optionally a method in its second task."""

    def __init__(self, case: dict[str, Any], method: str | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = infssm.create_model(case["name"], **case["options"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.x, self.y = torch.randn(case["shape"]), torch.randint(0, case["options"]["num_classes"], case["shape"][:1])
        self.method = None
        if method is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.method = infssm.attach(self.model, method, weight=1.0, **options)
            self.method.begin_task(0)
            self.method.end_task(0)
            self.method.begin_task(1)

    def step(self) -> None:
        loss = F.cross_entropy(self.model(self.x), self.y)
        if self.method is not None:
            loss = loss + self.method.penalty(self.x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded_step(self) -> None:
        with infssm.record_states(self.model):
            loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def matmul_flops(self) -> int:
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.zero_grad()
        return counter.get_total_flops()


def step_methods(case: dict[str, Any]) -> tuple[dict[str, Method], int]:
    plain = Trained(case, None)
    methods = {"plain": Method(plain.step), "states recorded": Method(plain.recorded_step)}
    for name in ("inf-ssm", "inf-ssm-exact"):
        methods[name] = Method(Trained(case, name).step)
    methods[QUARTER] = Method(Trained(case, "inf-ssm-exact", fraction=0.25).step)
    return methods, plain.matmul_flops()


def transformers_methods() -> dict[str, Method]:
    from infssm import _torchvision as guarded

    guarded.torchvision()  # transformers imports it
    from transformers import MambaConfig, MambaForCausalLM

    from infssm.integrations.transformers import accelerate

    config = MambaConfig(vocab_size=256, hidden_size=192, num_hidden_layers=2, use_cache=False)
    tokens = torch.randint(0, 256, (4, 197))

    def stepper(model: nn.Module) -> Method:
        def run() -> None:
            logits: Tensor = model(tokens).logits
            logits.square().mean().backward()

        return Method(run)

    torch.manual_seed(0)
    slow = MambaForCausalLM(config)
    fast = MambaForCausalLM(config)
    fast.load_state_dict(slow.state_dict())
    accelerate(fast)
    difference = (slow(tokens).logits - fast(tokens).logits).abs().max().item()
    print(f"largest difference of the accelerated logits: {difference:.1e}")
    return {"transformers' own": Method(stepper(slow).run, 2), "accelerated": stepper(fast)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=6)
    add_clock(parser)
    args = parser.parse_args()
    with_raised_malloc("benchmarks.kernels.steps")
    rate = matmul_rate(args.clock)
    print(f"{machine()}, torch.mm {rate / 1e9:.0f} GFLOP/s")
    found: dict[str, Any] = {"machine": machine(), "matmul_flops_per_s": rate}
    for name, case in CASES.items():
        methods, flops = step_methods(case)
        timings = interleaved(methods, args.repeats, args.clock)
        rate = max(rate, matmul_rate(args.clock))
        found[name] = report(name, timings, 1e3 * flops / rate)
    timings = interleaved(transformers_methods(), args.repeats, args.clock)
    found["transformers"] = report("transformers' Mamba, 2 layers, width 192, 197 tokens, batch 4", timings, None)
    if args.json:
        write_json(args.json, found)


def report(title: str, timings: dict[str, Timing], matmul_ms: float | None) -> dict[str, Any]:
    first = next(iter(timings.values()))
    print(f"\n{title}" + (f" (matmul alone {matmul_ms:.0f} ms)" if matmul_ms else ""))
    rows = {}
    for name, timing in timings.items():
        row = {"median_ms": timing.median, "best_ms": timing.best, "over_first": timing.median / first.median}
        row["best_over_first"] = timing.best / first.best
        line = f"  {name:<20} {timing.median:9.1f} ({timing.best:.1f}) ms"
        line += f"   x {row['over_first']:.3f} ({row['best_over_first']:.3f})"
        if matmul_ms:
            row["over_matmul"] = timing.median / matmul_ms
            row["best_over_matmul"] = timing.best / matmul_ms
            line += f"   {row['over_matmul']:.2f} ({row['best_over_matmul']:.2f}) times matmul"
        if aim := AIMS.get(title, {}).get(name):
            line += "   " + aim.verdict(row["best_over_matmul" if name == "plain" else "best_over_first"])
        print(line)
        rows[name] = row
    return rows


if __name__ == "__main__":
    main()
