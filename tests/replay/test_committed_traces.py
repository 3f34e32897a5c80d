"""What replays of the recorded traces have always shown: orderings that have to hold on every machine.

The traces hold scalars, and coins and orders are seeded, so that a failure means that a policy or the replay changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hf_dsde.policies import create_policy
from hf_dsde.replay import (
    Cell,
    CostSetting,
    Phase,
    PolicySpec,
    ReplayGrid,
    TraceTable,
    play_schedule,
    run_grid,
    useless_draft,
)

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
DISTILLED, ROUNDED = TRACES / "smollm2-distilled", TRACES / "smollm2-4bit"
PER_ROW = ("heuristic", "confidence", "svip", "adaedl", "gammatune", "gammatune_plus", "dsde", "tapout")


def cells(trace: Path, policies: tuple[str, ...], rows: int, costs: tuple[float, ...], temperature: int) -> list[Cell]:
    grid = ReplayGrid(
        (trace,),
        tuple(PolicySpec.parse(text) for text in policies),
        tuple(CostSetting.linear(cost) for cost in costs),
        batches=(rows,),
        temperatures=(temperature,),
        seeds=1,
        tokens=3000,
    )
    return list(run_grid(grid).cells)


def gap(cell: Cell, policy: str) -> float:
    """Percent over the best fixed length."""
    return cell.gap(cell.score(policy).speeds).mean


@pytest.mark.parametrize(("trace", "temperature"), [(DISTILLED, 1), (ROUNDED, 0)], ids=["distilled", "4bit"])
def test_no_policy_outruns_the_oracle_and_lifting_rows_never_costs(trace: Path, temperature: int) -> None:
    fixed_before = ("dsde", "dsde:warmup=hold", "heuristic")
    policies = (*PER_ROW, "dsde:warmup=hold", *(f"{name}+fill" for name in fixed_before), "goodput")
    for cell in cells(trace, policies, rows=8, costs=(0.05, 0.3), temperature=temperature):
        best = cell.gap(cell.oracle).mean
        assert best > 0
        for score in cell.policies:
            assert gap(cell, score.name) < best
        for name in fixed_before:
            assert gap(cell, f"{name}+fill") >= gap(cell, name)
        # The batch pays for its longest row, whatever a rule saves on the others.
        assert max(gap(cell, name) for name in PER_ROW) < 0


@pytest.mark.parametrize(("trace", "least"), [(DISTILLED, 2.0), (ROUNDED, 8.0)], ids=["distilled", "4bit"])
def test_for_a_single_greedy_row_confidence_beats_every_fixed_length(trace: Path, least: float) -> None:
    (cell,) = cells(trace, ("marginal_goodput",), rows=1, costs=(0.1,), temperature=0)
    assert gap(cell, "marginal_goodput") > least


@pytest.mark.parametrize("temperature", [0, 1])
def test_policies_that_know_the_costs_match_the_best_length_of_a_batch(temperature: int) -> None:
    for cell in cells(DISTILLED, ("goodput", "marginal_goodput"), 8, (0.05, 0.3), temperature):
        for score in cell.policies:
            assert gap(cell, score.name) > -1.0


@pytest.mark.parametrize(
    ("trace", "rows", "policy"),
    [
        (DISTILLED, 1, "goodput"),
        (DISTILLED, 8, "marginal_goodput"),
        (ROUNDED, 8, "goodput"),
        (ROUNDED, 1, "marginal_goodput"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_draft_that_turns_bad_is_dropped_within_fifty_rounds_and_taken_up_again(
    trace: Path, rows: int, policy: str
) -> None:
    """Code, then news, then word problems; then a draft that is never right, and code with the good one again."""
    table = TraceTable.load(trace, temperature=0)
    tokens = 600 * max(rows, 2)
    phases = [
        *(Phase(tokens, (task,)) for task in ("code", "news", "math")),
        Phase(tokens, table=1),
        Phase(tokens, ("code",)),
    ]
    run = play_schedule(
        create_policy(policy),
        [table, useless_draft(table)],
        phases,
        seed=0,
        rows=rows,
        prices=CostSetting.linear(0.1).prices(rows, 12),
    )
    good, *_, bad, again = (run.lengths(phase).max(axis=1) for phase in range(5))
    assert good.mean() > 2
    assert 0 in bad[:50]
    assert bad[50:].mean() < 0.15
    # Back at seven tenths of its former length within 150 rounds, and there to stay.
    assert np.convolve(again[:150], np.ones(10) / 10, mode="valid").max() > 0.7 * good.mean()
    assert again[150:].mean() > 0.7 * good.mean()
