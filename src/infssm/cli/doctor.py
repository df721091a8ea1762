"""``infssm doctor``."""

from __future__ import annotations

import importlib
import json
import warnings
from typing import Annotated, Any

import typer

from infssm._registry import shorten

_OPTIONAL = {  # distribution: (module to import, extra that installs it)
    "torchvision": ("torchvision", "bench"),
    "timm": ("timm", "bench"),
    "scikit-learn": ("sklearn", "bench"),
    "lightning-fabric": ("lightning_fabric", "bench"),
    "matplotlib": ("matplotlib", "bench"),
    "tensorboard": ("torch.utils.tensorboard", "bench"),
    "transformers": ("transformers.models.mamba.modeling_mamba", "hf"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}
_WRONG_WHEEL = (
    "made for another torch; infssm works with it, other libraries after infssm.integrations.mend_torchvision(). "
    "To mend it for good, reinstall torch and torchvision together: https://pytorch.org/get-started"
)


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has and which code will run on it."""
    found = _examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            typer.echo(f"{key}:")
            for name, item in value.items():
                typer.echo(f"  {name:<18} {item}")
        else:
            typer.echo(f"{key:<20} {value}")


def _examine() -> dict[str, Any]:
    from infssm.data import data_root
    from infssm.learner.store.env import environment

    env = environment()
    kernels = env["kernels"]
    root = data_root()
    runs = (
        "the compiled CPU kernels" if kernels["native"] else "the PyTorch reference (slower): no compiled module found"
    )
    on_gpu = "Triton" if kernels["default_cuda"] == "triton" else "the PyTorch reference (slower): pip install triton"
    return {
        "infssm": env["packages"].get("infssm"),
        "python": env["python"],
        "torch": env["packages"].get("torch"),
        "platform": env["platform"],
        "cpu": f"{env['cpu']}, {env['cores']} cores",
        "threads": env["threads"],
        "device": env["cuda"] or "cpu",
        "kernels": f"{runs}{', ' + kernels['isa'] if kernels.get('isa') else ''}",
        "kernels on a GPU": on_gpu,
        "bfloat16": _bfloat16(),
        "data root": f"{root} ({'exists' if root.is_dir() else 'not there yet'})",
        "optional packages": {name: _state_of(name, *how) for name, how in _OPTIONAL.items()},
    }


def _bfloat16() -> str:
    """What ``train.precision=bf16-mixed`` does on this CPU."""
    from infssm.learner.precision import bfloat16_gain, bfloat16_unit

    if (unit := bfloat16_unit()) is None:
        return "no instructions for it: train.precision=bf16-mixed stays in float32 on this CPU"
    return f"{unit}, matrix products {bfloat16_gain():.1f} times as fast as in float32: train.precision=bf16-mixed"


def _state_of(name: str, module: str, extra: str) -> str:
    """The version of a package that can be imported, or what to do about it: what is installed need not work."""
    from infssm.integrations import mend_torchvision
    from infssm.learner.store.env import package_version

    version = package_version(name)
    if version is None:
        return f"missing: pip install 'infssm[{extra}]'"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mended = mend_torchvision()
            importlib.import_module(module)
    except Exception as error:  # whatever a broken installation raises
        return f"{version}, cannot be imported ({shorten(str(error))}): pip install --force-reinstall {name}"
    return f"{version}, {_WRONG_WHEEL}" if name == "torchvision" and mended else version
