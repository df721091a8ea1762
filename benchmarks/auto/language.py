"""Language in a plain loop with `infssm.attach`, for docs/results/auto.md: three kinds of text in turn."""

from __future__ import annotations

import math
import statistics

import torch
import torch.nn.functional as F

from infssm import attach, create_model
from infssm.data import load_dataset
from infssm.ssm import logits_of

DOMAINS = ("topics", "source", "names")
TOKENS, ROWS, STEPS = 128, 8, 150


def language(name: str, seed: int, order: int | None = None) -> list[list[float]]:
    """Perplexity of all domains so far, after each; ``order`` draws the batches, where it is not ``seed``."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = _texts()
    model = create_model("mamba_lm_130m", d_model=64, n_layer=2, vocab_size=256)
    method = attach(model, name)
    generator = torch.Generator().manual_seed(seed if order is None else order)
    found = []
    for task, domain in enumerate(DOMAINS):
        train, _ = text[domain]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        method.begin_task(task)
        for _ in range(STEPS * (2 if task == 0 else 1)):
            rows = train[torch.randint(len(train), (ROWS,), generator=generator)]
            loss = _loss(model, rows) + method.penalty(rows[:, :-1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        method.end_task(task)
        found.append([_perplexity(model, text[seen][1]) for seen in DOMAINS[: task + 1]])
    return found


def _texts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Training and test sequences ``[rows, tokens + 1]`` of each domain."""
    data = load_dataset("stdlib-text", length=TOKENS + 1)
    first_test = len(data.labels) - data.num_test
    parts: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {domain: ([], []) for domain in data.domains}
    for index, domain in enumerate(data.domain_of):
        if len(row := data.samples.sequence(index)) == TOKENS + 1:
            parts[data.domains[domain]][index >= first_test].append(row)
    return {domain: (torch.stack(train), torch.stack(test)) for domain, (train, test) in parts.items()}


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_of(model(rows[:, :-1])).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def _perplexity(model: torch.nn.Module, rows: torch.Tensor) -> float:
    model.eval()
    value = math.exp(statistics.mean(float(_loss(model, part)) for part in rows.split(32)))
    model.train()
    return value
