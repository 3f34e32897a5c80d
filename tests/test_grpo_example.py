"""The example that trains with TRL's GRPO, on a tiny model."""

from __future__ import annotations

import copy
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from safetensors.torch import load_file
from tiny_pair import tiny_pair

import hf_dsde
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.pairs import Pair

pytest.importorskip("trl", reason="TRL is not installed: pip install 'hf-dsde[grpo]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl.*"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_rollouts.py"


@pytest.fixture(autouse=True)
def accelerate_starts_again() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def distinct_letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward in place of a sum's, of which these models know nothing."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(len(set(text))) for text in texts]


def trained(pair: Pair, folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> list[float]:
    """Run the example; return the acceptance of each step."""
    example = runpy.run_path(str(EXAMPLE))
    main = example["main"]
    main.__globals__.update(load_packaged_pair=lambda *_: pair, right_number=distinct_letters)
    settings = {"steps": 3, "rollouts": 2, "questions": 2, "new_tokens": 6, "learning_rate": 0.02, "policy": "static"}
    main(**{"output": folder, "model": None, "draft": None, "keep_memory": None, "seed": 0, **settings, **options})
    lines = re.findall(r"step \d: (\S+) tokens per pass and row, acceptance (\S+)", capsys.readouterr().out)
    assert len(lines) == settings["steps"]
    return [float(rate) for _, rate in lines]


def test_rollouts_are_the_law_of_the_weights_after_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recording: list[NotingCapture]
) -> None:
    """A model that drafts for itself accepts all of its drafts, as long as both sides read the newest weights.

    What it is recorded with is kept for all steps, whatever the trainer puts around it.
    """
    pair = tiny_pair()
    before = copy.deepcopy(pair.target.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_dsde.RunnerWarning)
        assert trained(Pair(pair.target, pair.target, pair.tokenizer), tmp_path, capsys, keep_memory=True) == [1.0] * 3
    assert len(recording) == 2, "a target's and a draft's"
    assert all(capture.recorded for capture in recording)
    assert why_not_fused(pair.target) is None
    after = load_file(tmp_path / "model.safetensors")
    assert any(not torch.equal(weight, before[name]) for name, weight in after.items())


def test_a_draft_falls_back_as_the_model_moves_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = tiny_pair()
    twin = copy.deepcopy(pair.target)
    rates = trained(Pair(pair.target, twin, pair.tokenizer), tmp_path, capsys, learning_rate=0.2)
    assert rates[0] == 1.0
    assert rates[-1] < 1.0
