"""What a reader of a benchmark needs beyond the package's own provenance: the device's driver and its copy speed."""

from __future__ import annotations

import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_dsde.measurement import provenance

COMMIT_VARIABLE = "HF_DSDE_COMMIT"
"""Names the commit of a copy that has no git history."""
PACKAGES = ("triton", "numpy")
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
COPIES = 10


def collect(device: torch.device | str, dtype: torch.dtype, given_commit: str | None = None) -> dict[str, Any]:
    """Everything `hf_dsde.measurement.provenance.collect` tells, and what the device can do; `json.dumps` takes it.

    Args:
        device: Where the models run.
        dtype: Of the models.
        given_commit: The commit, where there is no git history to ask; else the environment variable `HF_DSDE_COMMIT`.
    """
    device = torch.device(device)
    collected = provenance.collect(device)
    collected["commit"] = collected["commit"] or given_commit or os.environ.get(COMMIT_VARIABLE)
    collected["versions"] |= {name: _version(name) for name in PACKAGES}
    return collected | {
        "dtype": str(dtype).removeprefix("torch."),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "copy_bytes_per_second": copy_bandwidth(device),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second when a large tensor is copied on the device, in the fastest of some copies.

    Decoding reads all weights at every step, so that this is what bounds it. A copy reads and writes each byte once.
    """
    size = COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    fastest = float("inf")
    for _ in range(COPIES):
        _wait_for(device)
        begin = time.perf_counter()
        goal.copy_(source)
        _wait_for(device)
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size / fastest


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _driver() -> str | None:
    """The version of the NVIDIA driver, None where its tool is missing: a result is worth having without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.split("\n", maxsplit=1)[0].strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
