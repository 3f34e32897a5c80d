"""What every test run shares: no network, one thread, costs that do not depend on the machine, and a header.

Nothing heavy is imported at the top: the process that hands tests out to workers runs none of them.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

# Before torch and transformers are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models gain nothing from threads, and one process per core must not start a thread per core. Neither must those
# that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest

# A test fails for a change, not for a draw or a busy machine. HYPOTHESIS_PROFILE=default looks for new examples.
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=50, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

CHEAP_DRAFTS = 0.05, [1.0, 1.02, 1.04, 1.06, 1.08, 1.1]
"""Costs as a large target has them. Tiny models are all overhead, and policies that weigh costs would draft nothing."""


@pytest.fixture(autouse=True)
def given_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that ask for costs get these instead of measured ones, so that a test does the same on every machine."""
    from hf_dsde.costs import CostModel, LiveCosts

    costs = CostModel.relative(*CHEAP_DRAFTS)
    monkeypatch.setattr(
        "hf_dsde.decoding.loop.live_costs", lambda target, *_: LiveCosts(costs, target.rows, refresh=False)
    )


@pytest.fixture(autouse=True)
def rows_that_leave_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are short: rows that have finished stay in recorded passes for a few rounds only."""
    monkeypatch.setattr("hf_dsde.execution.pass_shapes.IDLE_PLACES", 8)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runners record on the CPU; of `NotingCapture`, one for each cache and each recording policy."""
    from recorded import record_on_cpu

    return record_on_cpu(monkeypatch)


@pytest.fixture
def quiet_datasets() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def pytest_report_header() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if hasattr(config, "workerinput"):
        # Nobody waits for a slow test at the end while the other cores have nothing left to do. Those that run whole
        # examples take longest and are collected last.
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [*reversed(slow), *(item for item in items if not item.get_closest_marker("slow"))]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Keep the collector from looking at what was imported: it lives until the end, and some tests collect often."""
    gc.collect()
    gc.freeze()
