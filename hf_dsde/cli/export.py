"""`hf-dsde export-generate`: a folder in, the files of it out. The work is done in `hf_dsde.hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_dsde.cli.options import usage_errors
from hf_dsde.hub.folder import export_generate


def export_generate_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Made if it is not there; other files in it stay.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier export.")] = False,
) -> None:
    """Write a folder that transformers loads generate with drafts from.

    model.generate(custom_generate=FOLDER, trust_remote_code=True, assistant_model=...)
    takes the folder, or the Hub repository that it was uploaded to. It holds a README, a
    few lines of Python and the versions of hf-dsde that they need.
    """
    with usage_errors((OSError,)):
        files = export_generate(folder, overwrite=overwrite)
    console = Console()
    for file in files:
        console.print(f"{file} written", soft_wrap=True)
