"""What every test run shares: no network, one thread, and a header that says which versions are tested."""

from __future__ import annotations

import os

# Before transformers is imported: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers

# Tiny models gain nothing from threads, and one process per core shall not start a thread per core.
torch.set_num_threads(1)


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
