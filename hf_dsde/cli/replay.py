"""`hf-dsde replay`: arguments in, a grid of replays at work, a table, a file and a picture out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_dsde.cli.options import progress
from hf_dsde.policies import available_policies
from hf_dsde.replay.experiment import ReplayGrid, run_grid
from hf_dsde.replay.plot import save_plot
from hf_dsde.replay.pricing import DEFAULT_SLOPE, CostSetting
from hf_dsde.replay.report import result_view
from hf_dsde.replay.specs import PolicySpec

DEFAULT_DRAFT_COSTS = (0.05, 0.1, 0.3)


def replay_command(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE", exists=True, file_okay=False, help="Folders of recorded traces.")
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="NAME, NAME:ARGUMENT=VALUE,..., with +cap after it to draft nothing that costs more than it brings, "
            "and +fill to lift rows to the longest. Repeat for several.",
            show_default="every registered policy",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Repeat for several.", show_default="1, 8, 32")
    ] = None,
    draft_cost: Annotated[
        list[float] | None,
        typer.Option("--draft-cost", help="In plain steps. Repeat for several.", show_default="0.05, 0.1, 0.3"),
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option("--costs", exists=True, dir_okay=False, help="Measured costs, as JSON. Repeat for several."),
    ] = None,
    temperature: Annotated[
        list[int] | None, typer.Option("--temperature", min=0, max=1, help="0, 1 or both.", show_default="both")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Play only these.", show_default="all of a trace")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Orders and coins; the same for all policies.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Of a run; at least 300 per row are played.")] = 20_000,
    max_draft_length: Annotated[int, typer.Option("--max-draft-length", min=1, help="Of any policy.")] = 12,
    slope: Annotated[
        float, typer.Option(min=0.0, help="What a further column of a pass costs, in plain steps.")
    ] = DEFAULT_SLOPE,
    ridge: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a pass beyond which it is bound by arithmetic.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="A pass pays for each row's own tokens, not for the longest row's.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all numbers there.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the gaps there (.png, .svg, .pdf).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
) -> None:
    """Replay policies over recorded traces and compare them with the best fixed draft length."""
    console = Console()
    chosen = draft_cost or ([] if costs else DEFAULT_DRAFT_COSTS)
    try:
        settings = [CostSetting.linear(cost, slope, ridge, packed) for cost in chosen]
        settings += [CostSetting.measured(file, packed) for file in costs or []]
        grid = ReplayGrid(
            traces=tuple(traces),
            policies=tuple(PolicySpec.parse(text) for text in policy or available_policies()),
            costs=tuple(settings),
            batches=tuple(batch or (1, 8, 32)),
            temperatures=tuple(temperature if temperature is not None else (0, 1)),
            seeds=seeds,
            tokens=tokens,
            tasks=None if task is None else tuple(task),
            max_draft_length=max_draft_length,
        )
        grid.check()
    except (ValueError, TypeError, FileNotFoundError) as mistake:
        raise typer.BadParameter(str(mistake)) from mistake
    with progress(console) as bar:
        shown = bar.add_task("replaying", total=None)
        result = run_grid(grid, jobs, lambda done, total: bar.update(shown, completed=done, total=total))
    console.print(result_view(result))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
        console.print(f"result written to {json_path}")
    if plot is not None:
        save_plot(result, plot)
        console.print(f"plot written to {plot}")
