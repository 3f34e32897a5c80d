"""A recording holds a few positions' logits at a time, and an interrupted one leaves no trace."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny_models import VOCABULARY
from tiny_traces import PROMPTS, record

from hf_dsde.trace import load_trace, rounds, scoring
from hf_dsde.trace import record as record_module
from hf_dsde.trace.schema import SIGNAL_COLUMNS


@pytest.fixture
def nothing_older():
    """Hides all that lives already from `gc`: a test process holds millions of objects, and looking takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def living_distributions() -> int:
    """Values in tensors over the vocabulary that somebody still holds, weights aside."""
    return sum(
        obj.numel()
        for obj in gc.get_objects()
        if type(obj) is torch.Tensor and obj.dim() >= 2 and obj.shape[-1] == VOCABULARY
    )


def test_signals_are_computed_on_a_few_positions_at_a_time(tmp_path, monkeypatch):
    seen = {"rounds": [], "scoring": []}
    for name, module in (("rounds", rounds), ("scoring", record_module)):
        original = module.position_signals

        def spy(target_logits, *arguments, _name=name, _original=original):
            seen[_name].append(len(target_logits))
            return _original(target_logits, *arguments)

        monkeypatch.setattr(module, "position_signals", spy)
    monkeypatch.setattr(rounds, "POSITIONS_AT_ONCE", 4)
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 6)
    limited = record(tmp_path / "limited", batch_size=3)
    monkeypatch.undo()
    whole = record(tmp_path / "whole", batch_size=3)
    assert max(seen["rounds"]) == 4
    assert max(seen["scoring"]) == 6
    assert sum(seen["rounds"]) == limited.trace.drafted.num_rows
    assert sum(seen["scoring"]) == limited.trace.committed.num_rows
    # Which draw falls to which position depends on the chunks; nothing else may.
    fixed = [name for name in whole.trace.committed.column_names if name != "residual_draft_probability"]
    for name in fixed:
        expected = whole.trace.committed[name].to_pylist()
        found = limited.trace.committed[name].to_pylist()
        assert found == (pytest.approx(expected, rel=1e-5, abs=1e-7) if name in SIGNAL_COLUMNS else expected), name


@pytest.mark.usefixtures("nothing_older")
def test_no_logits_are_kept_from_batch_to_batch(tmp_path):
    held = []

    def on_batch(_sequences):
        gc.collect()
        held.append(living_distributions())

    record(tmp_path / "trace", on_batch=on_batch)
    assert len(held) == 2 * 3
    assert max(held) == 0, held


def test_scoring_never_asks_a_model_for_more_than_a_chunk(tmp_path, monkeypatch):
    sizes = []
    original = scoring.EagerRunner

    def create(*arguments, **options):
        runner = original(*arguments, **options)
        forward = runner.forward

        def spy(block, longest, keep=None):
            output = forward(block, longest, keep)
            sizes.append(output.logits.shape[0] * output.logits.shape[1])
            return output

        runner.forward = spy
        return runner

    monkeypatch.setattr(scoring, "EagerRunner", create)
    monkeypatch.setattr(scoring, "POSITIONS_AT_ONCE", 8)
    record(tmp_path / "trace", batch_size=4, max_new_tokens=40)
    assert max(sizes) == 8


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_recording_leaves_nothing(tmp_path, error):
    batches = []

    def on_batch(sequences):
        batches.append(sequences)
        if len(batches) == 4:
            raise error

    with pytest.raises(error):
        record(tmp_path / "trace", on_batch=on_batch)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_recording_leaves_nothing_that_reads_as_a_trace(tmp_path, monkeypatch):
    # A kill leaves no time to clean up.
    monkeypatch.setattr("hf_dsde.trace.writer.shutil.rmtree", lambda *_, **__: None)

    def on_batch(_sequences):
        assert not (tmp_path / "trace").exists()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        record(tmp_path / "trace", on_batch=on_batch)
    (left,) = tmp_path.iterdir()
    with pytest.raises(FileNotFoundError, match=r"trace\.json"):
        load_trace(left)
    monkeypatch.undo()
    assert record(tmp_path / "trace").trace.committed.num_rows == 2 * len(PROMPTS) * 30
