"""What `import hf_dsde` takes beyond torch and the part of transformers without which there is no model to generate.

python benchmarks/import_time.py --output benchmarks/results/import_time.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import hf_dsde
from hf_dsde.measurement import provenance

BASELINE = "import torch; from transformers import GenerationMixin, PreTrainedModel"
"""`PreTrainedModel` is the base of every model that `generate` runs on."""
STATEMENTS = {
    "torch and transformers": BASELINE,
    "and import hf_dsde": f"{BASELINE}; import hf_dsde",
    "and hf_dsde.enable": f"{BASELINE}; import hf_dsde; hf_dsde.enable",
}
TIMED = """
import time
start = time.perf_counter()
{statements}
print(time.perf_counter() - start)
"""


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes per case; cases take turns.")] = 7,
) -> None:
    """Time imports in fresh processes, files cached and byte code made, and print what each case adds."""
    seconds: dict[str, list[float]] = {case: [] for case in STATEMENTS}
    for statements in STATEMENTS.values():
        _seconds(statements)  # reads the files and makes byte code
    for _ in range(repeats):
        for case, statements in STATEMENTS.items():
            seconds[case].append(_seconds(statements))
    baseline = median(seconds["torch and transformers"])
    table = Table("imported", "median, s", "range, s", "beyond the first, s")
    for case, times in seconds.items():
        added = "-" if STATEMENTS[case] == BASELINE else f"{median(times) - baseline:+.3f}"
        table.add_row(case, f"{median(times):.3f}", f"{min(times):.3f} to {max(times):.3f}", added)
    Console().print(table)
    if output is not None:
        result = {
            "provenance": provenance.collect("cpu"),
            "settings": {"repeats": repeats, "statements": STATEMENTS},
            "seconds": {
                case: {"median": median(times), "beyond_first": median(times) - baseline, "all": times}
                for case, times in seconds.items()
            },
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _seconds(statements: str) -> float:
    """Run statements in a fresh process that imports the package from where this one does; returns their seconds."""
    root = str(Path(hf_dsde.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", TIMED.format(statements=statements)]
    finished = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return float(finished.stdout)


if __name__ == "__main__":
    typer.run(main)
