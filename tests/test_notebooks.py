"""The notebooks run from top to bottom, quietly, and show what their texts promise; so do the outputs that are kept.

After a change, `KEEP_NOTEBOOK_OUTPUTS=1 pytest tests/test_notebooks.py` keeps new ones; timings are best where the
machine does nothing else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from hf_dsde import smollm2

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"
NAMES = ("quickstart", "which_policy", "batch_inference")
PROMISES = {
    "quickstart": [
        "All texts are equal, token for token.",
        r"with dsde: +\d+\.\d s",
        "Speculation, policy &#x27;dsde&#x27;",
        "Acceptance by draft position",
    ],
    "which_policy": [
        "7 ways to decode, one text per row: all are equal.",
        r"draft steps, round by round: \[\d",
        "predicted [0-9.]+ times plain decoding",
        "my-pair/speculation_config.json: policy 'batch_table'",
        "Generated with it; the text is the same: True",
    ],
    "batch_inference": [
        "same key, result read from the cache: True",
        "Equal settings, equal key: +True",
        "Another policy, another key: +True",
        "Another length, another key: +True",
        "Other weights, another key: +True",
        "Interrupted; there is no finished file: True",
        r"[1-7] rows were done before, [1-7] were generated now",
        "With another policy: .*another `job`.*generator.settings.policy",
        "The texts are those that map gave.",
        r"refill: \d+ rounds, \d+% of the rows' rounds idle",
    ],
}
PICTURES = {"quickstart": 3, "which_policy": 3, "batch_inference": 1}
MACHINE = re.compile(r"(?:^|[\s\"'(=])(?:/(?:home|root|tmp|work|usr|opt|Users)/|[A-Z]:\\\\)")
"""Paths that only one machine has."""
LARGEST_FILE = 300_000
KEEP = "KEEP_NOTEBOOK_OUTPUTS"
"""With this in the environment, what a run gave replaces the outputs that are kept."""


class ThisInterpreter(AsyncKernelManager):
    """Starts the kernel of the interpreter that runs the tests, whatever is installed under its name elsewhere."""

    def __init__(self, **arguments):
        super().__init__(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **arguments)


def read(name):
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def keep(notebook, name):
    """Write a notebook without what only its run knew."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.clear()
    nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook):
    """All that the cells printed or showed as text or HTML."""
    parts = []
    for output in outputs(notebook):
        parts.append(output.get("text", ""))
        data = output.get("data", {})
        parts += [data[kind] for kind in ("text/plain", "text/html") if kind in data]
    return "\n".join(parts)


def check(notebook, name):
    """Nothing failed, nothing complained, and everything that was promised is there."""
    shown = outputs(notebook)
    assert [o for o in shown if o.output_type == "error"] == []
    assert "".join(o.text for o in shown if o.output_type == "stream" and o.name == "stderr") == ""
    text = texts(notebook)
    for promise in PROMISES[name]:
        assert re.search(promise, text), f"{name} does not show {promise!r}"
    assert sum("image/png" in o.get("data", {}) for o in shown) == PICTURES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_from_top_to_bottom(name, tmp_path):
    if not smollm2._is_complete(smollm2.cache_folder() / smollm2.FOLDER_NAME):
        pytest.skip("SmolLM2 is not in the cache; 'hf-dsde demo' fetches it")
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "HF_HOME": str(tmp_path / "hub"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        # Threads of one kernel that wait for each other lose much where other tests have the cores.
        "OMP_NUM_THREADS": "1",
    }
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        timeout=600,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=environment)
    check(notebook, name)
    if os.environ.get(KEEP):
        keep(notebook, name)


@pytest.mark.parametrize("name", NAMES)
def test_kept_outputs_are_whole_and_small_and_of_no_machine(name):
    notebook = read(name)
    check(notebook, name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not MACHINE.search(texts(notebook))
    assert all(not cell.metadata for cell in notebook.cells)
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < LARGEST_FILE


def test_every_notebook_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NAMES)
