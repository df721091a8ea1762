"""``infssm bench``."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to time; seq, lwf-ac, inf-ssm, inf-ssm-exact.")
    ] = None,
    model: Annotated[str, typer.Option(help="A vision model: see `infssm list models`.")] = "vim_nano",
    image_size: Annotated[int, typer.Option(min=1, help="Pixels.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
