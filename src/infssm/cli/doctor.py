"""``infssm doctor``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_OPTIONAL = {
    **dict.fromkeys(("timm", "torchvision", "scikit-learn", "lightning-fabric", "matplotlib", "tensorboard"), "bench"),
    "transformers": "hf",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "ray": "ray",
}


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
    from infssm.runs import environment
    from infssm.runs.env import package_version

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
        "data root": f"{root} ({'exists' if root.is_dir() else 'not there yet'})",
        "optional packages": {
            name: package_version(name) or f"missing: pip install 'infssm[{extra}]'"
            for name, extra in _OPTIONAL.items()
        },
    }
