"""The command `hf-dsde profile`: arguments in, a table by batch size and a saved configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_dsde.cli.demo.prompts import DEMO_PROMPTS
from hf_dsde.cli.options import DeviceOption, DraftOption, DtypeOption, ModelOption, chosen_dtype, lines_of, named_pair
from hf_dsde.integration.hooks import enable
from hf_dsde.profiling import DEFAULT_BATCH_SIZES, BatchProfile, ProfileOptions, profile_pair, tuned_config


def profile_command(
    output: Annotated[Path, typer.Option("--output", file_okay=False, help="Folder for speculation_config.json.")],
    device: DeviceOption,
    model: ModelOption = None,
    draft: DraftOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", exists=True, dir_okay=False, help="One per line.", show_default="the demo's"),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Repeat for several.", show_default=f"{DEFAULT_BATCH_SIZES}"),
    ] = None,
    draft_length: Annotated[int, typer.Option("--draft-length", min=1, help="The longest length to consider.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Limit of every answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the best token; more samples.")] = 0.0,
    dtype: DtypeOption = None,
) -> None:
    """Measure costs and acceptance by batch size, and save the best draft length of each."""
    console = Console()
    texts = [prompt.text for prompt in DEMO_PROMPTS] if prompts is None else lines_of(prompts)
    if not texts:
        raise typer.BadParameter(f"{prompts} has no prompt; write one per line", param_hint="--prompts")
    pair = named_pair(model, draft, chosen_dtype(dtype, torch.device(device)), torch.device(device))
    enable(pair.target)
    options = ProfileOptions(tuple(batch or DEFAULT_BATCH_SIZES), draft_length, max_new_tokens, temperature)
    with console.status("starting") as status:
        profiles = profile_pair(pair, texts, options, status.update)
    console.print(_table(profiles))
    tuned_config(profiles).save_pretrained(output)
    console.print(f"{output / 'speculation_config.json'} written; load it with SpeculationConfig.from_pretrained")


def _table(profiles: list[BatchProfile]) -> Table:
    table = Table(
        "rows",
        "first draft step",
        "further one",
        "plain pass",
        "first accepted",
        "best length",
        "predicted",
        title="Profile",
    )
    for profile in profiles:
        table.add_row(
            str(profile.rows),
            f"{1e3 * profile.costs.draft_seconds(1):.2f} ms",
            f"{1e3 * (profile.costs.draft_seconds(2) - profile.costs.draft_seconds(1)):.2f} ms",
            f"{1e3 * profile.costs.verify.at(1):.2f} ms",
            f"{profile.survival[0]:.0%}",
            str(profile.length),
            f"{profile.predicted_speedup(profile.length):.2f}x",
        )
    return table
