"""What the commands share: options that mean the same everywhere, the pair that they name, and a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_dsde import pairs
from hf_dsde.utils.tuning import half_precision


class Dtype(str, Enum):
    """Precisions to choose from."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The same as PyTorch calls it."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype", help="Precision of both models.", show_default="bfloat16, or float16 on a GPU without bfloat16"
    ),
]


def chosen_dtype(dtype: Dtype | None, device: torch.device) -> torch.dtype:
    """What is named, or the two-byte dtype that the device computes in."""
    return half_precision(device) if dtype is None else dtype.torch


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


DeviceOption = Annotated[
    str, typer.Option("--device", default_factory=_default_device, help="Where both models run.", show_default="auto")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Target: folder or Hub id.", show_default="the demo's pair")
]
DraftOption = Annotated[str | None, typer.Option("--draft", help="Draft for the target: folder or Hub id.")]


def named_pair(model: str | None, draft: str | None, dtype: torch.dtype, device: torch.device) -> pairs.Pair:
    """The pair named, or the packaged one when neither part is."""
    if model is None and draft is None:
        return pairs.load_packaged_pair(dtype, device)
    if model is None or draft is None:
        missing, other = ("--model", "--draft") if model is None else ("--draft", "--model")
        raise typer.BadParameter(f"{missing} is missing; {other} needs it, since a draft belongs to its target")
    return pairs.load_pair(model, draft, dtype, device)


@contextmanager
def usage_errors(kinds: tuple[type[Exception], ...] = (OSError, TypeError, ValueError)) -> Iterator[None]:
    """Turn errors, by default those that checks of arguments raise, into errors of usage."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error)) from error


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def progress(console: Console) -> Progress:
    """A bar that counts steps."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
