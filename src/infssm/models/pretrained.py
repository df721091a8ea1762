"""Read checkpoints safely, and explain in one line why one does not fit."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infssm.errors import CheckpointError
from infssm.models.features import plain_weights

if TYPE_CHECKING:
    from infssm.models.backbone import Backbone

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_NESTED = ("model", "state_dict", "module")

PACKAGED: Mapping[str, str] = {
    "cifar100-base": "0c184a668b63f39901cde09614e85a53bdca072cbdbbbe4b0ce48d1d946e83f6",
    "omniglot": "32d57494dbfa23bb062d8d0a9cc49d803f34a3ef8552129fa6786ac5746cc014",
}
"""Weights inside the package by name, each with its sha256; docs/guide/weights.md says what they are."""


PACKAGED_FOR: Mapping[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "cifar100-base": (
        {"name": "vim_nano", "options": {"patch_size": 8, "embed_dim": 96, "depth": 4, "stem": "conv"}},
        (3, 32),
    ),
    "omniglot": ({"name": "vim_nano", "options": {"patch_size": 2, "embed_dim": 64, "depth": 4}}, (1, 8)),
}
"""The model that each of them is for, and its images: colour channels and pixels a side."""


def weights_root() -> Path:
    """Folder in which weights are looked up by name: ``$INFSSM_WEIGHTS``, else ``~/.cache/infssm/weights``."""
    return Path(os.environ.get("INFSSM_WEIGHTS", "~/.cache/infssm/weights")).expanduser()


def find_weights(weights: str | os.PathLike[str]) -> Path:
    """Return the file meant by a path (a file, or a folder with ``model.safetensors``) or by a name."""
    path = Path(os.path.expanduser(weights))
    if os.path.isdir(path):  # os.path: False, not an error, for names no system can hold
        path = path / "model.safetensors"
    candidates = [path] + [weights_root() / f"{weights}{suffix}" for suffix in ("", *_SUFFIXES)]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    if str(weights) in PACKAGED:
        packaged = Path(__file__).parent / "weights" / f"{weights}.safetensors"
        digest = hashlib.sha256(packaged.read_bytes()).hexdigest() if packaged.is_file() else "no file"
        if digest != PACKAGED[str(weights)]:
            raise CheckpointError(f"{packaged} is not the published file ({digest[:12]}): install the package again")
        return packaged
    raise CheckpointError(
        f"no weights at {path}, and none named {str(weights)!r} in {weights_root()} or in the package "
        f"({', '.join(PACKAGED)}); pass a path"
    )


def check_weights(weights: str | os.PathLike[str]) -> None:
    """Raise if there is no such file, or its first bytes are no checkpoint's; reads nothing else of it."""
    path = find_weights(weights)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot read the weights {path}: {error.strerror}") from None
    if not start.startswith((b"PK\x03\x04", b"\x80")) and start[8:] != b"{":  # zip, pickle, safetensors
        raise CheckpointError(f"{path} is not a checkpoint: give a .safetensors, .pth, .pt or .bin file of weights")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint file without running any code it may hold."""
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _torch_load(path)
    except Exception as error:  # readers of damaged files raise almost anything
        # torch's own message advises to load the file unsafely, which would run code of the file.
        unsafe = isinstance(error, pickle.UnpicklingError)
        reason = "more than tensors in it" if unsafe else str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is not a readable checkpoint (truncated, or not one): {reason}") from error
    while isinstance(content, Mapping):
        nested = next((key for key in _NESTED if isinstance(content.get(key), Mapping)), None)
        if nested is None:
            break
        content = content[nested]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(
            f"{path} holds no state dict: expected name -> tensor, alone or under one of {', '.join(_NESTED)}"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def load_weights(model: Backbone, weights: str | os.PathLike[str]) -> None:
    """Load a checkpoint into ``model``: every key must fit, save a head made for another number of classes."""
    check_weights(weights)
    path = find_weights(weights)
    state = model.adapt_state_dict(plain_weights(model, read_state_dict(path)))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.head_shape_differs(state):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        expected = {name: shape for name, shape in expected.items() if not name.startswith("head.")}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    both = sorted(expected.keys() & found.keys())
    groups = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "mismatched": [f"{k} {found[k]} instead of {expected[k]}" for k in both if found[k] != expected[k]],
    }
    problems = []
    for what, names in groups.items():
        if names:
            rest = f", ... ({len(names) - 4} more)" if len(names) > 4 else ""
            problems.append(f"{len(names)} {what}: {', '.join(names[:4])}{rest}")
    if problems:
        raise CheckpointError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(state, strict=False)


class _Record:
    """Stands in for objects pickled beside the tensors (arguments, configurations): makes a plain dict of each."""

    def __new__(cls, *_: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


class _Number:
    """Stands in for numpy scalars and their types: keeps nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


def _torch_load(path: Path) -> Any:
    """Load tensors; every class or function the file names is replaced by a stand-in, never imported or called."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except ValueError:  # files of the format before zip: no stand-ins, tensors only
        named = []
    stand_ins = [(_Number if name.startswith("numpy.") else _Record, name) for name in named]
    with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", weights_only=True)
