"""MDA: classes of several Gaussians, one for every task with images of the class (Hastie and Tibshirani 1996)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infssm.methods.core.build import register_method
from infssm.methods.heads.class_statistics import ClassStatistics
from infssm.methods.heads.gaussians import Mixtures, average_over_models, left_out_distances
from infssm.methods.heads.gda import GDA
from infssm.methods.heads.statistical import StatisticalHead

_SLACK = 1e-6
"""Share of a covariance's mean variance by which its eigenvalues may be negative: rounding, where images are few."""


@register_method
class MDA(GDA):
    """As gda, with one Gaussian per class and task that has images of it: for known classes in new domains.

    A class that sounds or looks different in every domain is no single Gaussian. Its score is the logarithm of the
    mixture of its Gaussians, each with the task's share of the class's images. The pooled covariance is that within
    Gaussians. Where every class comes with one task only, it is gda. Statistics grow with the number of tasks.

    Paper: Hastie and Tibshirani, Discriminant Analysis by Gaussian Mixtures, JRSS B 1996; here tasks are the mixture's
    components, so nothing is left to estimate by iterations
    """

    name = "mda"
    Module = Mixtures

    def reset(self) -> None:
        """No statistics."""
        super().reset()
        self.tasks: list[list[ClassStatistics]] = []
        """Like :attr:`statistics`, but separately for each task that had images, then by model."""

    def joined(self, kept: list[ClassStatistics], fresh: list[ClassStatistics]) -> list[ClassStatistics]:
        """See :class:`StatisticalHead`; the Gaussians of earlier tasks move as their classes do."""
        device = self.context.device
        self.tasks = [[one.to(device) for one in task] for task in self.tasks]
        if self.drift_maps:
            self.tasks = [
                [one.transformed_by(*drift_map) for one, drift_map in zip(task, self.drift_maps, strict=True)]
                for task in self.tasks
            ]
        self.tasks.append(fresh)
        return super().joined(kept, fresh)

    def resize(self) -> None:
        """Add classes without images if the statistics have fewer classes than the head."""
        super().resize()
        self.tasks = [[one.resized(self.num_classes) for one in task] for task in self.tasks]

    def forget(self, label: int) -> None:
        """Remove a class: the labels above move down by one, and tasks that had no other class are gone."""
        super().forget(label)
        remaining = [[one.without(label) for one in task] for task in self.tasks]
        self.tasks = [task for task in remaining if bool(task[0].seen.any())] or remaining[:1]

    def fit(self) -> Mixtures:
        """See :class:`Mixtures`; of several models the mean of the scores of each Gaussian."""
        counts = torch.stack([task[0].count for task in self.tasks])  # [tasks, K]
        rows = counts.flatten().nonzero().flatten()
        shares = counts / self.statistics[0].count.clamp(min=1)
        log_prior = (shares.log() + self.log_prior()).flatten()[rows]
        found = average_over_models(self._stacked(), self.config.alpha, self.config.beta, log_prior)
        members = torch.full((counts.numel(),), len(rows), device=counts.device)
        members[rows] = torch.arange(len(rows), device=counts.device)
        return Mixtures(found.mean, found.whiten, found.offset, members.view_as(counts).T.contiguous())

    def _stacked(self) -> list[ClassStatistics]:
        """By model the statistics of all Gaussians, task by task: each counts as a class."""
        return [_stacked(of_model) for of_model in zip(*self.tasks, strict=True)]

    def gaussians(self) -> Mixtures:
        """The fitted module itself: here scores and distances use the same covariances."""
        module = self.fitted_module
        assert isinstance(module, Mixtures)
        return module

    def _tasks_of(self, features: Tensor, labels: Tensor) -> Tensor:
        """Which task each image is probably of, ``[m]``: that of the nearest Gaussian of its class."""
        gaussians = self.gaussians()
        distances = gaussians.member_distances(features.to(gaussians.mean))
        return distances[torch.arange(len(labels), device=distances.device), labels.to(distances.device)].argmin(dim=1)

    @torch.no_grad()
    def left_out_distances(self, features: Tensor, labels: Tensor) -> Tensor:
        """As in the other heads, to the nearest Gaussian of the class, to which the image was most likely added."""
        found = []
        numbers = self.gaussians().members.to(labels.device)[labels, self._tasks_of(features, labels).to(labels.device)]
        parts = features.to(self.context.device).chunk(self.num_parts, dim=1)
        for statistics, part in zip(self._stacked(), parts, strict=True):
            known = numbers < len(statistics.count)
            distances = torch.full((len(part),), torch.inf, dtype=torch.float64, device=part.device)
            own = numbers[known].to(part.device)
            distances[known] = left_out_distances(statistics, part[known], own, self.config.alpha, self.config.beta)
            found.append(distances)
        return torch.stack(found).mean(dim=0)

    @torch.no_grad()
    def leaving_out(self, features: Tensor, labels: Tensor) -> StatisticalHead:
        """The head fitted to all images but these, each removed from the Gaussian of its class that is nearest.

        A Gaussian whose covariance would not be one afterwards, because images of other tasks were taken for its own,
        stays as it is.
        """
        other = copy.copy(self)
        numbers = self._tasks_of(features, labels).cpu()
        other.tasks = []
        for number, task in enumerate(self.tasks):
            rows = (numbers == number).nonzero().flatten()
            pairs = zip(task, self.statistics_of(features[rows], labels[rows]), strict=True)
            left = [one.to(self.context.device).removed(images) for one, images in pairs]
            other.tasks.append(_valid(task, left))
        return super(MDA, other).leaving_out(features, labels)

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, of all tasks together and of each."""
        tasks = [{str(model): one.state_dict() for model, one in enumerate(task)} for task in self.tasks]
        return super().state_dict() | {"tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, also that of a head with fewer classes."""
        device = self.context.device
        self.tasks = [[ClassStatistics.of(one).to(device) for one in task.values()] for task in state["tasks"]]
        super().load_state_dict(state)


def _stacked(tasks: Sequence[ClassStatistics]) -> ClassStatistics:
    """The rows with images of several statistics, one below the other."""
    count = torch.cat([one.count for one in tasks])
    rows = count.nonzero().flatten()
    mean = torch.cat([one.mean for one in tasks])[rows]
    if any(one.triangles is None for one in tasks):
        total = count.sum().clamp(min=1)
        shared = sum((one.pooled * (one.count.sum() / total) for one in tasks), start=torch.zeros_like(tasks[0].pooled))
        return ClassStatistics(count[rows], mean, None, shared)
    triangles = [triangle for one in tasks for triangle in one.triangles or () if triangle.numel()]
    return ClassStatistics(count[rows], mean, triangles)


def _valid(before: Sequence[ClassStatistics], after: Sequence[ClassStatistics]) -> list[ClassStatistics]:
    """By model ``after``, with the classes of ``before`` where the covariance of some model is none or images lack."""
    usable = after[0].count >= 0
    changed = ((after[0].count > 0) & (after[0].count != before[0].count)).nonzero().flatten().tolist()
    for one in after:
        for label in changed if one.triangles is not None else ():
            own = one.covariance(label)
            slack = _SLACK * own.diagonal().abs().mean() + torch.finfo(torch.float64).tiny
            _, info = torch.linalg.cholesky_ex(own + slack * torch.eye(len(own), dtype=own.dtype, device=own.device))
            usable[label] &= int(info) == 0
    found = []
    for old, new in zip(before, after, strict=True):
        count, mean = torch.where(usable, new.count, old.count), torch.where(usable[:, None], new.mean, old.mean)
        if old.triangles is None or new.triangles is None:
            found.append(ClassStatistics(count, mean, None, new.shared))
            continue
        pairs = zip(usable.tolist(), new.triangles, old.triangles, strict=True)
        found.append(ClassStatistics(count, mean, [n if fine else o for fine, n, o in pairs]))
    return found
