"""X-DER's terms and its logit revision, as functions of logits.

A head is a block of logits, one per class of a task: past heads, the present one, future ones; ``widths`` are the
classes of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def revised_logits(stored: Tensor, new: Tensor, labels: Tensor, columns: slice, gamma: float) -> Tensor:
    """``stored: [m, K]`` with the given columns taken from ``new: [m, K]``, kept below the true class's stored logit.

    Where the largest of the new values exceeds ``l = stored[label]`` they are all multiplied by ``gamma · l / max``.
    A negative ``l`` flips their signs, as in the reference implementation; where the largest is 0, as in heads that
    start at 0, no factor changes it and the values stay.
    """
    values = new[:, columns]
    true = stored.gather(1, labels[:, None])
    top = values.amax(dim=1, keepdim=True)
    revised = stored.clone()
    revised[:, columns] = torch.where((top > true) & (top != 0), values * (gamma * true / top), values)
    return revised


def supervised_contrast(views: Tensor, labels: Tensor, *, temperature: float, base_temperature: float) -> Tensor:
    """Supervised contrastive loss of unit vectors ``views: [b, v, d]`` with ``labels: [b]``, summed over images.

    Per anchor: minus the mean over its positives (other views of its class) of the log-softmax over all other views
    of ``v_a · v_p / temperature``; averaged over the views of an image, times temperature / base_temperature.
    """
    images, count, _ = views.shape
    flat = views.transpose(0, 1).reshape(images * count, -1)
    owner = labels.repeat(count)
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    scores = (flat @ flat.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = scores - scores.logsumexp(dim=1, keepdim=True)
    positive = (owner[:, None] == owner) & ~itself
    mean = log_probability.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
    return -(temperature / base_temperature) * mean.sum() / count


def consistency(
    logits: Tensor, labels: Tensor, *, widths: Sequence[int], temperature: float, base_temperature: float
) -> Tensor:
    """Supervised contrast of every future head's normalised logits, mean over heads and images.

    logits: [b, v, sum of widths] of v views, labels: [b].
    """
    heads = [F.normalize(head, dim=2) for head in torch.split(logits, list(widths), dim=2)]
    contrast = {"temperature": temperature, "base_temperature": base_temperature}
    return torch.stack([supervised_contrast(head, labels, **contrast) for head in heads]).mean() / len(labels)


def similarity_distance(logits: Tensor, stored: Tensor) -> Tensor:
    """``|N(Z Zᵀ) - N(Y Yᵀ)|² / m²`` for ``logits Z: [m, d]`` and ``stored Y: [m, d]``; N divides rows by their L1 norm.

    The reference implementation normalises by L1, similarity-preserving distillation as published by L2.
    """
    new, old = (F.normalize(z @ z.T, p=1.0, dim=1) for z in (logits, stored))
    return (new - old).square().sum() / len(logits) ** 2


def distance_preservation(logits: Tensor, stored: Tensor, *, widths: Sequence[int]) -> Tensor:
    """Mean :func:`similarity_distance` over heads and views. logits: [m, v, sum of widths], stored: [m, sum]."""
    sizes = list(widths)
    distances = [
        similarity_distance(view, old)
        for head, old in zip(torch.split(logits, sizes, dim=2), torch.split(stored, sizes, dim=1), strict=True)
        for view in head.unbind(dim=1)
    ]
    return torch.stack(distances).mean()


def head_margin(bad: Tensor, good: Tensor, margin: float) -> Tensor:
    """Mean of the positive ``max(bad) + margin - max(good)`` over rows; 0 if none is. bad: [b, p], good: [b, q]."""
    gap = bad.amax(dim=1) + margin - good.amax(dim=1)
    return gap.clamp(min=0).sum() / (gap > 0).sum().clamp(min=1)


def past_margin(logits: Tensor, past: slice, present: slice, margin: float) -> Tensor:
    """:func:`head_margin` of probabilities over past and present classes; no gradient to the past. logits: [b, K]."""
    probabilities = logits[:, past.start : present.stop].softmax(dim=1)
    return head_margin(probabilities[:, past].detach(), probabilities[:, present], margin)


def true_head(logits: Tensor, labels: Tensor, widths: Sequence[int]) -> Tensor:
    """The head each label belongs to: ``logits: [m, sum of widths]`` to ``[m, largest width]``, -inf beyond a head."""
    most = max(widths)
    heads = [
        F.pad(head, (0, most - head.shape[1]), value=-torch.inf) for head in torch.split(logits, list(widths), dim=1)
    ]
    ends = torch.tensor(widths, device=labels.device).cumsum(0)
    return torch.stack(heads, dim=1)[
        torch.arange(len(labels), device=logits.device), torch.bucketize(labels, ends, right=True)
    ]


def first_occurrence(values: Tensor) -> Tensor:
    """Mask ``[m]`` of the entries of ``values: [m]`` that appear for the first time."""
    earlier = torch.ones(len(values), len(values), dtype=torch.bool, device=values.device).tril(-1)
    return ~((values[:, None] == values) & earlier).any(dim=1)


def spread(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Split ``total`` into shares ``[count]`` that differ by at most one, the larger ones at random places."""
    shares = torch.full((count,), total // count)
    shares[torch.randperm(count, generator=generator)[: total % count]] += 1
    return shares
