"""What a run ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
