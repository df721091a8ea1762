"""Devices and processes through Lightning Fabric, their precision, gradients averaged over them; what this machine has.

Methods run several forwards per step and read states as side outputs, which a wrapped module cannot follow. So modules
stay unwrapped, every process works on its slice of the same global batch, and gradients are averaged after backward.
"""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException

from infssm._machine import measure
from infssm._processes import sum_over_processes, this_share
from infssm.errors import ConfigError, InfssmError
from infssm.learner.config.fields import TrainConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric


_LOST = re.compile(r"connection (reset|closed|refused)|broken pipe|timed out|remote process exited", re.I)
_BUCKET = 16 * 2**20  # elements per all-reduce: few messages, and a bounded copy
_UNITS = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}


def launch(config: TrainConfig, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(fabric, *args)`` on every process of the configuration; return what process 0 returned."""
    try:
        from lightning_fabric import Fabric
    except ImportError:
        raise ConfigError("training needs lightning-fabric: pip install 'infssm[bench]'") from None
    world, local = _torchrun_world()
    strategy = "ddp" if world > 1 else "ddp_spawn" if config.devices > 1 else "auto"
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=local if world else config.devices,
            num_nodes=world // local if world else 1,
            strategy=strategy,
            precision=config.precision,
        )
    except (RuntimeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot use train.accelerator={config.accelerator} devices={config.devices}: {error}"
        ) from error
    if config.batch_size % fabric.world_size:
        raise ConfigError(
            f"train.batch_size={config.batch_size} must be a multiple of the {fabric.world_size} processes"
        )
    if strategy == "ddp":  # torchrun's processes run several configurations in turn, so their group is left at exit
        atexit.register(_leave_group)
    if strategy != "ddp_spawn":
        try:
            return fabric.launch(function, *args)
        except RuntimeError as error:  # the network's own message depends on the back end
            if this_share().world == 1 or not _LOST.search(str(error)):
                raise
            raise InfssmError(
                "another process of this run died, so this one stops too. torchrun restarts all of them if "
                "it was given --max-restarts; otherwise run the same command again: the run continues from its "
                f"checkpoint ({str(error).splitlines()[0][:200]})"
            ) from error
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "error"
        try:
            return fabric.launch(_in_started_process, note, function, *args)
        except ProcessRaisedException:
            if note.exists():
                raise pickle.loads(note.read_bytes()) from None
            raise


def _torchrun_world() -> tuple[int, int]:
    """Processes in all and on this machine where torchrun started this one; else (0, 0)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 0
    world, local, machines = (int(os.environ[f"{name}WORLD_SIZE"]) for name in ("", "LOCAL_", "GROUP_"))
    if world != local * machines:
        raise ConfigError(
            f"torchrun started {world} processes on {machines} machines, {local} of them here: start equally many on "
            "each machine (--nproc-per-node)"
        )
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if machines > 1 and restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The shared store still holds the addresses of processes that ended: github.com/pytorch/pytorch/issues/135712
        raise ConfigError(
            "to restart processes on several machines (--max-restarts), torchrun must be started with the environment "
            "variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each; otherwise they wait for processes that have ended"
        )
    return world, local


def _in_started_process(fabric: Fabric, note: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Keep the first error of a started process as it is: only its text would reach the parent.

    The process group is destroyed first: a process that exits with an open connection sometimes aborts.
    """
    try:
        result = function(fabric, *args)
        torch.distributed.barrier()
        return result
    except InfssmError as error:
        if not note.exists():
            note.write_bytes(pickle.dumps(error))
        raise
    finally:
        _leave_group()


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def average_gradients(fabric: Fabric, parameters: list[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    bucket: list[Tensor] = []
    size = 0
    for number, gradient in enumerate(gradients, start=1):
        bucket.append(gradient)
        size += gradient.numel()
        if size >= _BUCKET or number == len(gradients):
            for mine, total in zip(bucket, sum_over_processes(bucket), strict=True):
                mine.copy_(total / fabric.world_size)
            bucket, size = [], 0


def bfloat16_unit() -> str | None:
    """The instructions with which this CPU multiplies bfloat16; None if it has none, and float32 is faster."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return next((name for name, flag in _UNITS.items() if getattr(torch.cpu, flag, bool)()), None)


def settle_precision(config: TrainConfig) -> str:
    """``train.precision``; on a CPU that has no instructions for bfloat16, float32 in its place."""
    others = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not others)
    return "32-true" if on_cpu and bfloat16_unit() is None else config.precision


def bfloat16_gain(repeats: int = 5) -> float:
    """How many times as fast as float32 a matrix product in bfloat16 is here, by a measurement of milliseconds."""
    best = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(512, 384, dtype=dtype), torch.ones(384, 384, dtype=dtype)
        best.append(min(measure(partial(torch.mm, x, w), repeats, warmup=0)))
    return best[0] / best[1]


_PACKAGES = ("infssm", "torch", "numpy", "timm", "torchvision", "scikit-learn", "lightning-fabric", "transformers")


def environment() -> dict[str, Any]:
    """Versions, commit, device, threads, kernels and command line of this process, as plain values."""
    from infssm import ops as kernels

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
        "commit": commit_of(Path(__file__).resolve()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": kernels.backend_report(),
        "command": sys.argv,
    }


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The name of the processor, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit_of(file: Path) -> str | None:
    """Commit of a source file's clone, with ``+`` where files differ from it; None for a file that is in none."""
    head = _git(file.parent, "rev-parse", "HEAD")
    if head is None or _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return head + ("+" if _git(file.parent, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
