"""What every test run shares: no network, one thread, costs that do not depend on the machine, and a header."""

from __future__ import annotations

import os

# Before transformers is imported: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import pytest
import torch
import transformers

from hf_dsde.costs import CostModel, LiveCosts

# A test fails for a change, not for a draw. HYPOTHESIS_PROFILE=default looks for new examples instead.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Tiny models gain nothing from threads, and one process per core shall not start a thread per core.
torch.set_num_threads(1)


CHEAP_DRAFTS = CostModel.relative(0.05, [1.0, 1.02, 1.04, 1.06, 1.08, 1.1])
"""Costs as a large target has them. Tiny models are all overhead, and policies that weigh costs would draft nothing."""


@pytest.fixture(autouse=True)
def given_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that ask for costs get these instead of measured ones, so that a test does the same on every machine."""
    monkeypatch.setattr(
        "hf_dsde.loop.live_costs", lambda target, *_: LiveCosts(CHEAP_DRAFTS, target.rows, refresh=False)
    )


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
