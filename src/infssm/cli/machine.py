"""Commands about this machine: ``infssm doctor``, ``bench`` and ``data``."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from infssm._registry import shorten
from infssm.cli.options import AsJson, DataRoot
from infssm.errors import DataError

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


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder (of a run, of transformers or of a peft adapter): say which state space layers are "
            "trained, and which an adapter misses."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has and which kernels will run, or inspect the layers of a model.

    Examples:

    - `infssm doctor`

    - `infssm doctor my-adapter/` — how many state space layers a LoRA trains
    """
    if model is not None:
        _show_layers(model, as_json)
        return
    from infssm.data import data_root
    from infssm.learner.devices import bfloat16_gain, bfloat16_unit, environment

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
    from infssm.learner.devices import package_version

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


def _show_layers(folder: str, as_json: bool) -> None:
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


def bench(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to time; seq, lwf-ac, inf-ssm, inf-ssm-exact.")
    ] = None,
    model: Annotated[str, typer.Option(help="A vision model: see `infssm list models`.")] = "vim_nano",
    image_size: Annotated[int, typer.Option(min=1, help="Pixels.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Time training steps of methods on this machine, on random images of a second task.

    Example: `infssm bench seq inf-ssm-exact --model vim_tiny_patch16_224 --image-size 224 --batch-size 4`
    """
    from infssm.bench.timing import DEFAULT_METHODS, time_steps

    timings = time_steps(
        methods or DEFAULT_METHODS, model=model, image_size=image_size, batch_size=batch_size, steps=steps
    )
    if as_json:
        typer.echo(json.dumps([timing._asdict() for timing in timings], indent=2))
        return
    first = None
    for timing in timings:
        first = first or timing
        typer.echo(
            f"{timing.method:<20} {timing.milliseconds:9.1f} ms/step {timing.images_per_s:9.1f} images/s "
            f"{timing.milliseconds / first.milliseconds:6.2f} times {first.method}"
        )


data = typer.Typer(help="Get data sets, and check those that are there.", no_args_is_help=True)


@data.command("fetch")
def fetch(name: Annotated[str, typer.Argument(help="See `infssm list datasets`.")], data_root: DataRoot = None) -> None:
    """Download and unpack a data set; an interrupted download continues.

    Example: `infssm data fetch cifar100 --data-root ~/data`
    """
    from infssm.data import fetch as download

    for path in download(name, data_root):
        typer.echo(f"ready: {path}")


@data.command("check")
def check(name: Annotated[str, typer.Argument(help="A data set, or a path.")], data_root: DataRoot = None) -> None:
    """Count classes and images, find unreadable files, and report what is missing and where it was searched."""
    from infssm.data import check as check_files

    report = check_files(name, data_root, progress=_show_progress if sys.stderr.isatty() else None)
    place = "" if Path(name).exists() else f" under {report.root}"
    typer.echo(f"{name}{place}: {report.classes} classes, {report.images} images")
    for path, reason in report.unreadable:
        typer.echo(f"unreadable: {path}: {reason}")
    if not report.ok:
        raise DataError("; ".join(report.problems))


def _show_progress(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        typer.echo(f"\rread {done:,} of {total:,} files", nl=done == total, err=True)
