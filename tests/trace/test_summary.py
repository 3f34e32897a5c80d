"""The means of a trace, against sums over its rows."""

from __future__ import annotations

from math import fsum

import pytest
from tiny_traces import PROMPTS, record

from hf_dsde.trace import summarise


def test_summaries_are_means_over_a_tasks_rows(tmp_path):
    recorded = record(tmp_path / "trace")
    summaries = summarise(recorded.trace)
    assert [(s.task, s.temperature) for s in summaries] == [("letters", 0), ("pairs", 0), ("letters", 1), ("pairs", 1)]
    for summary in summaries:

        def of(rows, key=(summary.task, summary.temperature)):
            return [row for row in rows if (row["task"], row["temperature"]) == key]

        rows, drafted = of(recorded.committed), of(recorded.drafted)
        assert summary.positions == len(rows)
        assert summary.sequences == sum(prompt.task == summary.task for prompt in PROMPTS)
        for field, column in {
            "agreement": "draft_agrees",
            "target_agreement": "target_agrees",
            "overlap": "acceptance",
            "kld": "kld",
            "reverse_kld": "reverse_kld",
        }.items():
            assert getattr(summary, field) == pytest.approx(fsum(row[column] for row in rows) / len(rows)), field
        rounds = {(row["sequence"], row["round"]) for row in drafted}
        assert summary.accepted_per_round == pytest.approx(sum(row["accepted"] for row in drafted) / len(rounds))


def test_answers_of_one_token_have_no_rounds_to_speak_of(tmp_path):
    recorded = record(tmp_path / "trace", max_new_tokens=1)
    assert recorded.trace.drafted.num_rows == 0
    assert {summary.accepted_per_round for summary in summarise(recorded.trace)} == {0}
