"""Tiny models, tasks and batches that all tests of methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infssm.methods import Batch, list_methods, parse_name
from infssm.methods.core.build import components
from infssm.models import create_model

CLASSES = 6
FOR_IMAGES = [name for name in list_methods() if "images" in components[name].supported_data]

MODELS: dict[str, dict[str, Any]] = {
    "vim_nano": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "in_chans": 1, "d_state": 4},
    "mamba_nano": {"d_model": 16, "n_layer": 2, "vocab_size": 20, "d_state": 4},
    "mamba2_nano": {"d_model": 16, "n_layer": 2, "vocab_size": 20, "d_state": 4, "headdim": 8},
    "s4d_nano": {"d_model": 8, "n_layer": 2, "d_state": 4, "in_dim": 2},
    "vmamba_nano": {"embed_dim": 8, "in_chans": 1},
    "mamba_generative_nano": {"d_model": 16, "n_layer": 2, "d_state": 4, "side": 2, "levels": 4},
}


@dataclass(frozen=True)
class Task:
    """A task as the library's streams give them."""

    index: int
    classes: tuple[int, ...]


TASKS = [Task(0, (0, 1)), Task(1, (2, 3)), Task(2, (4, 5))]


def fitting(method: str, **options: Any) -> nn.Module:
    """A model for images that the named method works with: a Vim, unless it has to generate images."""
    generates = parse_name(method).base.name == "generative"
    kept = {key: value for key, value in options.items() if key in ("dtype", "seed")}
    return model("mamba_generative_nano", **kept) if generates else vim(**options)


def vim(*, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> nn.Module:
    """A Vim of some thousand parameters, whose biases and rows are all different."""
    return model("vim_nano", dtype=dtype, seed=seed, **options)


def model(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    made = create_model(name, num_classes=CLASSES, **{**MODELS[name], **options}).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return made


def inputs(name: str, n: int = 4, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Input that the named model takes."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("mamba_nano", "mamba2_nano"):
        return torch.randint(20, (n, 6), generator=generator)
    shape = (n, 6, 2) if name == "s4d_nano" else (n, 1, 8, 8) if name == "vim_nano" else (n, 1, 16, 16)
    return torch.randn(shape, generator=generator, dtype=dtype)


def batch(task: Task, n: int = 4, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Random images of a task, raw ones beside."""
    generator = torch.Generator().manual_seed(1000 * task.index + seed)
    raw = torch.randint(256, (n, 1, 8, 8), generator=generator, dtype=torch.uint8)
    y = torch.tensor([task.classes[i % len(task.classes)] for i in range(n)])
    return Batch(x=raw.to(dtype) / 255, y=y, raw=raw)


def loader(task: Task, batches: int = 2, n: int = 4, *, dtype: torch.dtype = torch.float64) -> list[Batch]:
    return [batch(task, n, dtype=dtype, seed=i) for i in range(batches)]


def nudge(module: nn.Module, scale: float = 0.01, *, seed: int = 7) -> None:
    """Move every parameter a little, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def total(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum()
