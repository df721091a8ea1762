"""The small weights inside the package, made again: ``python -m benchmarks.pretrain NAME --data-root DIR --out DIR``.

    omniglot        Vim-nano for 8x8 grey: 1,623 handwritten characters (omniglot.npz)
    cifar100-base   Vim-nano with a conv stem for 32x32 colour: 50 classes of CIFAR-100 (cifar100.npz)

A run that was stopped goes on where it was: all draws of a step follow from its number. ``--install`` copies the
result into the package and prints its hash.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.pages import write_whole
from infssm.data import load_dataset, make_recipe, make_split
from infssm.data.recipes import DIGITS
from infssm.models import create_model

WEIGHTS = Path(__file__).resolve().parent.parent / "src" / "infssm" / "models" / "weights"
SAVE_EVERY = 100
PARTS = ("train", "val")

Draw = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
"""From a generator and a number of images to model input ``[b, c, h, w]`` and labels ``[b]``."""


@dataclass(frozen=True)
class Source:
    """What a model is trained on: ``outputs`` of its training head, and held-out images to judge it by."""

    draw: Draw
    outputs: int
    test: Draw
    test_images: int


@dataclass(frozen=True)
class Plan:
    """One set of weights: the model, its data, and how long it trains.

    ``head`` is the number of classes of the head that is kept, 0 for none.
    """

    source: Callable[[Path, int], Source]
    options: dict[str, Any]
    steps: int
    lr: float
    head: int
    batch_size: int = 128
    weight_decay: float = 0.05


def omniglot(root: Path, _: int = 0) -> Source:
    """Characters cropped to their ink, bent and thickened at 32x32, then summed in blocks of 4x4, as digits were."""
    arrays = np.load(root / "omniglot.npz")
    parts = {name: torch.from_numpy(arrays[f"x_{name}"]).float()[:, None] / 255 for name in ("train", "test")}
    labels = {name: torch.from_numpy(arrays[f"y_{name}"]) for name in ("train", "test")}
    boxes = {name: _ink_boxes(x) for name, x in parts.items()}

    def draw(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(parts["train"]), (count,), generator=rng)
        return _bent(parts["train"][rows], boxes["train"][rows], rng), labels["train"][rows]

    def test(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(len(parts["test"]), generator=rng)[:count]
        return _bent(parts["test"][rows], boxes["test"][rows], rng, strength=0.0), labels["test"][rows]

    return Source(draw, len(arrays["classes"]), test, 8000)


def _ink_boxes(x: Tensor) -> Tensor:
    """Centre and half side of the ink, in grid_sample's coordinates: [n, 1, h, w] -> [n, 3] (x, y, half side)."""
    edges = []
    for dim in (2, 3):
        inked = (x > 0.3).any(dim=5 - dim)[:, 0].float()
        first = inked.argmax(dim=1)
        last = inked.shape[1] - 1 - inked.flip(1).argmax(dim=1)
        edges.append((first.float(), last.float()))
    size = x.shape[-1]
    (top, bottom), (left, right) = edges
    centre = [(2 * (low + high + 1) / 2 / size - 1) for low, high in ((left, right), (top, bottom))]
    half = torch.maximum(bottom - top, right - left).add(3) / size
    return torch.stack([*centre, half.clamp(min=0.25)], dim=1)


def _bent(x: Tensor, boxes: Tensor, rng: torch.Generator, strength: float = 1.0) -> Tensor:
    """Random affine inside the ink's box, random thickness, 4x4 blocks: [b, 1, 32, 32] -> [b, 1, 8, 8]."""
    count = len(x)
    uniform = (2 * torch.rand(count, 6, generator=rng) - 1) * strength
    angle, shear = 0.25 * uniform[:, 0], 0.25 * uniform[:, 1]
    scale = boxes[:, 2, None] * (1 + 0.15 * uniform[:, 2:4])
    cos, sin = angle.cos(), angle.sin()
    affine = torch.stack([torch.stack([cos, shear - sin], 1), torch.stack([sin, cos], 1)], 1) * scale[:, None]
    shift = boxes[:, :2] + 0.2 * uniform[:, 4:6] * boxes[:, 2, None]
    grid = F.affine_grid(torch.cat([affine, shift[:, :, None]], dim=2), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    thick = F.max_pool2d(x, 3, stride=1, padding=1)
    share = torch.rand(count, 1, 1, 1, generator=rng) if strength else torch.full((count, 1, 1, 1), 0.75)
    x = torch.lerp(x, thick, (1.5 * share).clamp(max=1))
    return DIGITS.normalize(F.avg_pool2d(x, 4) * 255)


def cifar100_base(root: Path, class_order: int = 0) -> Source:
    """The training images of the 50 classes that come first in a class order, shifted, flipped and toned."""
    dataset = load_dataset("cifar100", str(root))
    split = make_split(dataset, seed=0)
    recipe = make_recipe("light", dataset)
    order = np.random.RandomState(class_order).permutation(100)
    label_of = np.full(100, -1)
    label_of[order[:50]] = np.arange(50)
    indices = {name: np.array([i for i in getattr(split, name) if label_of[dataset.labels[i]] >= 0]) for name in PARTS}
    pixels = {name: dataset.images.pixels[torch.from_numpy(found)] for name, found in indices.items()}
    labels = {name: torch.from_numpy(label_of[dataset.labels[found]]) for name, found in indices.items()}

    def draw(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(pixels["train"]), (count,), generator=rng)
        x = recipe.apply(pixels["train"][rows], recipe.draw(count, rng))
        return _toned(x, rng), labels["train"][rows]

    def test(rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(len(pixels["val"]), generator=rng)[:count]
        return recipe.eval(pixels["val"][rows]), labels["val"][rows]

    return Source(draw, 50, test, len(pixels["val"]))


def _toned(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random contrast and brightness of normalised images, per channel a little: [b, c, h, w]."""
    gain = 1 + 0.3 * (2 * torch.rand(len(x), 1, 1, 1, generator=rng) - 1)
    offset = 0.3 * torch.randn(len(x), 1, 1, 1, generator=rng) + 0.1 * torch.randn(len(x), 3, 1, 1, generator=rng)
    return x * gain + offset


PLANS = {
    "omniglot": Plan(
        omniglot,
        {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 4, "in_chans": 1},
        steps=2600,
        lr=2e-3,
        head=0,
    ),
    "cifar100-base": Plan(
        cifar100_base,
        {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "stem": "conv"},
        steps=2400,
        lr=2e-3,
        head=100,
    ),
}


def train(name: str, root: Path, out: Path, steps: int | None = None, class_order: int = 0) -> Path:
    """Train from the last saved step, or from the beginning; the path of the finished weights."""
    plan = PLANS[name]
    steps = steps or plan.steps
    source = plan.source(root, class_order)
    torch.manual_seed(class_order)
    model = create_model("vim_nano", num_classes=source.outputs, **plan.options)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr)
    out.mkdir(parents=True, exist_ok=True)
    saved, log, started = out / f"{name}.ckpt", out / f"{name}.log", time.monotonic()
    first = _resume(saved, model, optimizer)
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * _rate(step, steps)
        x, y = source.draw(torch.Generator().manual_seed(step), plan.batch_size)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            left = (time.monotonic() - started) / (step + 1 - first) * (steps - step - 1) / 60
            print(
                f"\r{name}: step {step + 1}/{steps}, loss {loss.item():.3f}, {left:.0f} min left ", end="", flush=True
            )
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            _save(saved, model, optimizer, step + 1)
            with log.open("a") as file:
                file.write(f"{step + 1} {loss.item():.4f} {time.monotonic() - started:.0f}\n")
    print(f"\n{name}: {100 * accuracy(model, source):.1f} % on {source.test_images} held-out images")
    return export(model, plan, out / f"{name}.safetensors")


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a twentieth of the steps up, then half a cosine down."""
    progress = (step + 1) / steps
    return min(20 * progress, 0.5 * (1 + math.cos(math.pi * progress)) + 0.01)


@torch.no_grad()
def accuracy(model: nn.Module, source: Source) -> float:
    """Share of held-out images that the training head names right."""
    model.eval()
    x, y = source.test(torch.Generator().manual_seed(0), source.test_images)
    right = [(model(a).argmax(1) == b).sum() for a, b in zip(x.split(500), y.split(500), strict=True)]
    return float(torch.stack(right).sum()) / len(y)


def _resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    write_whole(path, lambda part: torch.save(state, part))


def export(model: nn.Module, plan: Plan, path: Path) -> Path:
    """Write the weights in float16, with a head of ``plan.head`` classes whose unknown rows are 0, or with none."""
    state = {k: v.detach().half().contiguous() for k, v in model.state_dict().items() if not k.startswith("head.")}
    for key, value in model.get_classifier().state_dict().items() if plan.head else ():
        kept = torch.zeros(plan.head, *value.shape[1:], dtype=torch.float16)
        kept[:50] = value[:50]
        state[f"head.{key}"] = kept
    save_file(state, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(PLANS))
    parser.add_argument("--data-root", required=True, type=Path, help="folder with omniglot.npz or cifar100.npz")
    parser.add_argument("--out", required=True, type=Path, help="folder for the checkpoint and the weights")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the plan's")
    parser.add_argument(
        "--class-order", type=int, default=0, help="which 50 classes of CIFAR-100, and the first weights"
    )
    parser.add_argument("--install", action="store_true", help="copy the result into the package")
    args = parser.parse_args()
    path = train(args.name, args.data_root, args.out, args.steps, args.class_order)
    content = path.read_bytes()
    print(f"{path}: {len(content) / 2**20:.2f} MiB, sha256 {hashlib.sha256(content).hexdigest()}")
    if args.install:
        WEIGHTS.mkdir(exist_ok=True)
        (WEIGHTS / path.name).write_bytes(content)


if __name__ == "__main__":
    main()
