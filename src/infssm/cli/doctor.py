"""``infssm doctor``."""

from __future__ import annotations

import importlib
import json
import warnings
from typing import Annotated

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
    "works in infssm, although it was made for another torch. For other libraries, call "
    "infssm.integrations.mend_torchvision() before they import it, or reinstall torch and torchvision together: "
    "https://pytorch.org/get-started"
)


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder (of a run, of transformers or of a peft adapter): say which state space layers are "
            "trained, and which an adapter misses."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine has and which code will run on it, or look at the layers of a model.

    Examples:

    - `infssm doctor`

    - `infssm doctor my-adapter/` — how many state space layers a LoRA trains
    """
    if model is not None:
        _look_at(model, as_json)
        return
    from infssm.data import data_root
    from infssm.learner.devices import bfloat16_gain, bfloat16_unit
    from infssm.learner.store.env import environment

    env, root, unit = environment(), data_root(), bfloat16_unit()
    kernels = env["kernels"]
    reference = "the PyTorch reference (slower)"
    on_cpu = "the compiled CPU kernels" if kernels["native"] else f"{reference}: no compiled module found"
    bfloat16 = "no instructions for it: train.precision=bf16-mixed stays in float32 on this CPU"
    if unit is not None:
        gain = f"{bfloat16_gain():.1f} times as fast as in float32"
        bfloat16 = f"{unit}, matrix products {gain}: train.precision=bf16-mixed"
    found = {
        "infssm": env["packages"].get("infssm"),
        "python": env["python"],
        "torch": env["packages"].get("torch"),
        "platform": env["platform"],
        "cpu": f"{env['cpu']}, {env['cores']} cores",
        "threads": env["threads"],
        "device": env["cuda"] or "cpu",
        "kernels": f"{on_cpu}{', ' + kernels['isa'] if kernels.get('isa') else ''}",
        "kernels on a GPU": "Triton" if kernels["default_cuda"] == "triton" else f"{reference}: pip install triton",
        "bfloat16": bfloat16,
        "data root": f"{root} ({'exists' if root.is_dir() else 'does not exist yet'})",
        "optional packages": {name: _state_of(name, *how) for name, how in _OPTIONAL.items()},
    }
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


def _state_of(name: str, module: str, extra: str) -> str:
    """The version of a package that can be imported, or how to fix it: an installed package need not work."""
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


def _look_at(folder: str, as_json: bool) -> None:
    from infssm.integrations.folders import open_model
    from infssm.ssm import coverage

    found = coverage(open_model(folder))
    layers = {
        name: {
            "trained parameters": len(layer.trained),
            "form states": layer.forms_states,
            "adapters without effect": layer.ignored,
        }
        for name, layer in found.layers.items()
    }
    if as_json:
        typer.echo(json.dumps({"summary": found.summary(), "missed": found.missed, "layers": layers}, indent=2))
        return
    typer.echo(found.summary())
    width = max(map(len, layers))
    for name, facts in layers.items():
        states = "that form states" if facts["form states"] else "none that forms states"
        typer.echo(f"  {name:<{width}}  {facts['trained parameters']} trained parameters, {states}")
