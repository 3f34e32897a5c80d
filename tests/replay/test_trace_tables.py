"""Reading a trace's two tables into flat arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from synthetic_traces import toy_rows, toy_table, write_trace

from hf_dsde.replay import TraceTable


def tables(**arguments):
    return tuple(pa.Table.from_pylist(rows) for rows in toy_rows(**arguments))


def test_sequences_stand_one_after_the_other() -> None:
    committed, _ = toy_rows(temperatures=(0,))
    table = toy_table(0)
    assert table.tasks == ("code", "news")
    assert len(table.starts) == 12
    assert table.positions == len(committed)
    assert table.columns["kld"].tolist() == pytest.approx([row["kld"] for row in committed])
    names = [table.tasks[task] for task in table.sequence_tasks[table.position_sequences]]
    assert names == [row["task"] for row in committed]


def test_one_temperature_and_some_tasks_are_taken() -> None:
    both = tables(tasks=("code", "math", "news"))
    table = TraceTable.from_arrow(*both, 1, ["news", "code"])
    assert table.tasks == ("code", "news")
    assert table.has_sampled_text
    expected = [row["kld"] for row in both[0].to_pylist() if row["temperature"] == 1 and row["task"] != "math"]
    assert table.columns["kld"].tolist() == pytest.approx(expected)
    after = [r for r in both[1].to_pylist() if r["temperature"] == 1 and r["task"] != "math" and not r["on_path"]]
    assert int(table.tails.lengths.sum()) == len(after)
    known = ~np.isnan(table.tails.signals["entropy"])
    assert table.tails.signals["entropy"][known].tolist() == pytest.approx([r["draft_entropy"] for r in after])


def test_greedy_acceptance_after_a_rejection_is_agreement() -> None:
    signals = toy_table(0).tails.signals["acceptance"]
    assert set(np.unique(signals[~np.isnan(signals)])) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("temperature", "tasks", "fragment"),
    [(2, None, r"no text at `temperature` 2; it has: 0, 1"), (0, ["cooking"], r"`tasks` names 'cooking'.*code, news")],
)
def test_what_is_not_there_is_named(temperature, tasks, fragment) -> None:
    with pytest.raises(ValueError, match=fragment):
        TraceTable.from_arrow(*tables(), temperature, tasks)


def test_unknown_tasks_of_a_table_are_named() -> None:
    with pytest.raises(ValueError, match=r"`tasks` names 'cooking'"):
        toy_table(0).sequences_of(["cooking"])


def test_positions_out_of_order_are_refused() -> None:
    committed, drafted = tables(temperatures=(0,))
    turned = committed.take(pa.array(range(committed.num_rows - 1, -1, -1)))
    with pytest.raises(ValueError, match="do not count up from 0"):
        TraceTable.from_arrow(turned, drafted, 0)


def test_a_recorded_folder_is_read(tmp_path) -> None:
    table = TraceTable.load(write_trace(tmp_path / "pair"), 1)
    assert table.name == "pair"
    assert np.array_equal(table.columns["kld"], toy_table(1).columns["kld"])
