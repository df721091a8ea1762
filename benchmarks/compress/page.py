"""The page docs/results/compress.md, from the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compress.jobs import JOBS

ARMS = ("output", "LAST's score", "magnitude", "output, no training", "from scratch")


def lost(job: dict[str, Any], n: str, arm: str = "output") -> float:
    """Points of accuracy lost, or per cent more bits per byte, against the full model."""
    full, now = job["scores"]["16"]["full"], job["scores"][n][arm]
    return 100 * (now / full - 1) if job["measure"] != "%" else full - now


def write(found: dict[str, Any], path: Path) -> None:
    """Write the page."""
    halved = ", ".join(
        f"{lost(job, '8'):.1f} {'points' if job['measure'] == '%' else 'per cent of the bits'} on {name}"
        for name, job in found.items()
    )
    easy = [name for name, job in found.items() if lost(job, "2", "from scratch") < 0.5]
    lines = [
        "# Fewer states",
        "",
    ]
    if easy:
        lines += [
            f"**On {' and '.join(easy)} a model trained from scratch with 2 states is within half a point of the one "
            "with 16, so these tasks do not show the value of compression**; they show that it does little harm, what "
            "a forward costs with fewer states, and nothing about tasks that need many states.",
            "",
        ]
    lines += [
        "`infssm.compress` prunes states by their closed-form output energy and trains the small model back towards "
        f"the large one, without labels. Half of the states cost {halved} (negative: the small model is better). "
        "One seed each: differences of a few tenths are noise.",
        "",
        "| task | states | " + " | ".join(ARMS) + " | forward, ms | decoding step, ms | state, bytes |",
        "|---|---|" + "---|" * (len(ARMS) + 3),
    ]
    for name, job in found.items():
        for n, scores in job["scores"].items():
            cells = [f"{scores[arm]:.2f}" if arm in scores else "" for arm in ARMS]
            if "full" in scores:
                cells[0] = f"{scores['full']:.2f} (full model)"
            ms = job["ms"][n]
            step = f"{ms['step']:.2f}" if "step" in ms else "-"
            times = [f"{ms['forward']:.1f}", step, f"{job['state bytes'][n]:,}"]
            lines.append(f"| {name}, {job['measure']} | {n} | " + " | ".join([*cells, *times]) + " |")
    lines += [
        "",
        "Written digits: a Vim (3 layers, width 48) on 8x8 images, accuracy on 597. Spoken digits: a Mamba (2 layers, "
        "width 48) on FSDD, 64 steps of 24 bands, accuracy on 300. Text: a Mamba language model (3 layers, width 64) "
        "of Python's help topics, bits per byte (lower is better). All arms but the last start from the full model and "
        "get 80 steps on 40 batches; *from scratch* has all the steps and labels that the full model had. "
        "*LAST's score* is `|c b|^2 / (1 - |a|)^2` (Gwak et al. 2024), taken within each layer; *magnitude* the size "
        "of the weights of B and C. Times are medians of processor time on one thread, 32 samples a forward, the sizes "
        "in turn, on a machine with other work.",
        "",
        "Made by `python -m benchmarks.compress --data DIR`, DIR with `fsdd.tar.gz`.",
        "",
    ]
    if missing := [name for name in JOBS if name not in found]:
        lines += [f"Not measured yet: {', '.join(missing)}.", ""]
    path.write_text("\n".join(lines))
