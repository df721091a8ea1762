"""Processor time of a language task with `self-replay`, in plain training's: the steps, and the generation.

    python -m benchmarks.sequences.cost

The model and the batches of the streams of manual pages (width 64, two layers, 8 x 128 bytes), 156 steps a task. Steps
of all settings alternate, on one thread; a figure is the best of its rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.methods import Batch, build_method
from infssm.methods.core.losses import train_step
from infssm.methods.regularizers.self_replay import SelfReplay
from infssm.models import create_model

STEPS, ROWS, LENGTH, ROUNDS = 156, 8, 128, 30
SETTINGS = [(768, 16, 0), (768, 16, 256), (256, 8, 0), (256, 8, 256), (128, 4, 0), (128, 4, 256), (128, 3, 256)]
"""Sequences, of them in a step, MiB for the old model's logits."""


def setting(name: str, **options: int) -> tuple[Callable[[], object], float]:
    """A step of a second task, and the seconds that its beginning took, logits of the old model included."""
    torch.manual_seed(0)
    model = create_model("mamba_lm_nano", d_model=64, n_layer=2, vocab_size=256)
    method = build_method(model, name, data_kind="language", **options)
    method.begin_task(0)
    method.end_task(0)
    seconds = float("inf")
    for _ in range(3):
        before = time.process_time()
        method.begin_task(1)
        for regularizer in method.regularizers:
            if isinstance(regularizer, SelfReplay):
                regularizer.draw()
        seconds = min(seconds, time.process_time() - before)
        for regularizer in method.regularizers:
            regularizer.end_task(method.context.current, None)
    method.begin_task(1)
    tokens = torch.randint(256, (ROWS, LENGTH + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    optimizer = build_optimizer(method.param_groups(decay_groups(model, 0.01)))
    set_learning_rate(optimizer, 1e-4)
    return lambda: train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step), seconds


def main() -> None:
    torch.set_num_threads(1)
    arms = {"plain": setting("seq")}
    for sequences, drawn, cache in SETTINGS:
        options = {"sequences": sequences, "replay_batch": drawn, "length": LENGTH, "cache": cache}
        arms[f"{sequences} sequences, {drawn} a step, cache {cache}"] = setting("self-replay", **options)
    best = dict.fromkeys(arms, float("inf"))
    for _ in range(ROUNDS):
        for name, (step, _) in arms.items():
            before = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - before)
    plain = best["plain"]
    print("| setting | step, of plain | beginning, in plain steps | task of 156 steps, of plain |\n|---|---|---|---|")
    for name, (_, beginning) in arms.items():
        task = (STEPS * best[name] + beginning) / (STEPS * plain)
        print(f"| {name} | {best[name] / plain:.2f} | {beginning / plain:.0f} | {task:.2f} |")


if __name__ == "__main__":
    main()
