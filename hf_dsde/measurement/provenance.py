"""What a reader needs to know of a result file in order to believe it or to repeat it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hf-dsde", "torch", "transformers", "tokenizers", "accelerate")


def collect(device: torch.device | str) -> dict[str, Any]:
    """Command line, commit, versions, machine and time, in types that `json.dumps` takes.

    Args:
        device: Where the models ran.
    """
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "device": describe_device(device),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, "+" appended if files differ; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    return None if head is None else head + ("+" if _git(root, "status", "--porcelain") else "")


def describe_device(device: torch.device | str) -> str:
    """The name of a device as people call it, with the number of cores for a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_cpu_name()}, {torch.get_num_threads()} threads on {os.cpu_count()} cores"


def _cpu_name() -> str:
    """The processor's model name where the system tells it, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command; None when git is missing or refuses, since a result is worth having without it."""
    try:
        finished = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)  # noqa: S607 - git is found on PATH, as everywhere
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()
