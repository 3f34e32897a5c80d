"""A draft that turns bad in the middle of a run, and comes back: when do cost-aware policies notice?

Code, then news, then word problems; then, twice, a draft that is never right; then code with the good draft again.

python benchmarks/drift.py --output benchmarks/results/drift.json
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from hf_dsde.measurement import provenance
from hf_dsde.policies import create_policy
from hf_dsde.replay import CostSetting, Phase, TraceTable, play_schedule, useless_draft

TRACES = Path(__file__).parent / "traces"
POLICIES = ("goodput", "marginal_goodput")


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
) -> None:
    """Play both policies on both recorded traces, at both temperatures, two batch sizes and two costs."""
    torch.set_num_threads(1)
    runs = []
    for trace, temperature, rows, policy, cost in product(
        ("smollm2-distilled", "smollm2-4bit"), (0, 1), (1, 8), POLICIES, (0.1, 0.3)
    ):
        table = TraceTable.load(TRACES / trace, temperature=temperature)
        runs.append(
            {"trace": trace, "temperature": temperature, "rows": rows, "policy": policy, "draft_cost": cost}
            | _play(table, rows, policy, cost)
        )
        typer.echo(runs[-1])
    if output is not None:
        result = {"provenance": provenance.collect("cpu"), "runs": runs}
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _play(table: TraceTable, rows: int, policy: str, cost: float) -> dict[str, Any]:
    tokens = 600 * max(rows, 2)
    phases = [
        *(Phase(tokens, (task,)) for task in ("code", "news", "math")),
        Phase(tokens, table=1),
        Phase(tokens, table=1),
        Phase(2 * tokens, ("code",)),
    ]
    run = play_schedule(
        create_policy(policy),
        [table, useless_draft(table)],
        phases,
        seed=0,
        rows=rows,
        prices=CostSetting.linear(cost).prices(rows, 12),
    )
    lengths = [run.lengths(phase).max(axis=1) for phase in range(len(phases))]
    bad = np.concatenate(lengths[3:5])
    recent = np.convolve(lengths[5], np.ones(10) / 10, mode="valid")
    back = np.flatnonzero(recent >= 0.7 * lengths[0].mean())
    zeros = np.flatnonzero(bad == 0)
    return {
        "mean_length_of_each_phase": [round(float(phase.mean()), 3) for phase in lengths],
        "rounds_until_zero": int(zeros[0]) if len(zeros) else None,
        "mean_length_after_50_bad_rounds": round(float(bad[50:].mean()), 4),
        "rounds_until_back": int(back[0]) if len(back) else None,
    }


if __name__ == "__main__":
    typer.run(main)
